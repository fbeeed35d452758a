"""Filter of the system calls that a program in the sandbox may not use, for the kernel, as `bwrap --seccomp` takes it.

Refused calls are of three kinds. They take memory that neither limits nor the sandbox count, reach our keys or other
machines, or make namespaces, in which a program may mount. Numbers and layout: Linux' `unistd.h`, `seccomp.h` and
`bpf_common.h`.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence
from errno import EAFNOSUPPORT, EINVAL, ENOSYS, EOPNOTSUPP, EPERM
from typing import NamedTuple

INSTRUCTION = struct.Struct("=HBBI")
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in the kernel's data on a call, in bytes."""
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FIRST_UNKNOWN = 470
"""First number of the calls that are refused as unknown, with ENOSYS.

Such numbers are calls of Linux 6.19 and later, which were not reviewed, or on x86-64 calls of the x32 ABI.
"""

PRETENDED = 0
"""The call does nothing and reports success."""

CALLS = {
    # Memory that counts for no process.
    "memfd_create": (319, 279, EPERM),
    "memfd_secret": (447, 447, EPERM),
    "msgget": (68, 186, EPERM),
    "remap_file_pages": (216, 234, EPERM),
    "sendfile": (40, 71, EPERM),
    "shmget": (29, 194, EPERM),
    "splice": (275, 76, EPERM),
    "tee": (276, 77, EPERM),
    "userfaultfd": (323, 282, EPERM),
    "vmsplice": (278, 75, EPERM),
    # Objects of the kernel, more than a program has open files.
    "add_key": (248, 217, EPERM),
    "epoll_create": (213, None, EPERM),
    "epoll_create1": (291, 20, EPERM),
    "fanotify_init": (300, 262, EPERM),
    "fsetxattr": (190, 7, EOPNOTSUPP),
    "inotify_init": (253, None, EPERM),
    "inotify_init1": (294, 26, EPERM),
    "io_setup": (206, 0, EPERM),
    "io_uring_setup": (425, 425, EPERM),
    "keyctl": (250, 219, EPERM),
    "landlock_create_ruleset": (444, 444, EPERM),
    "lsetxattr": (189, 6, EOPNOTSUPP),
    "mbind": (237, 235, EPERM),
    "modify_ldt": (154, None, EPERM),
    "mq_open": (240, 180, EPERM),
    "request_key": (249, 218, EPERM),
    "seccomp": (317, 277, EPERM),
    "semget": (64, 190, EPERM),
    "set_mempolicy": (238, 237, EPERM),
    "set_mempolicy_home_node": (450, 450, EPERM),
    "setxattr": (188, 5, EOPNOTSUPP),
    "setxattrat": (463, 463, EOPNOTSUPP),
    # Other processes, mounts and the machine's disks.
    "bpf": (321, 280, EPERM),
    "clone3": (435, 435, ENOSYS),
    "fsmount": (432, 432, EPERM),
    "fsopen": (430, 430, EPERM),
    "fspick": (433, 433, EPERM),
    "migrate_pages": (256, 238, EPERM),
    "mount": (165, 40, EPERM),
    "mount_setattr": (442, 442, EPERM),
    "move_mount": (429, 429, EPERM),
    "move_pages": (279, 239, EPERM),
    "open_by_handle_at": (304, 265, EPERM),
    "open_tree": (428, 428, EPERM),
    "open_tree_attr": (467, 467, EPERM),
    "perf_event_open": (298, 241, EPERM),
    "pivot_root": (155, 41, EPERM),
    "ptrace": (101, 117, EPERM),
    "setns": (308, 268, EPERM),
    "sync": (162, 81, PRETENDED),
    "syncfs": (306, 267, PRETENDED),
    "umount2": (166, 39, EPERM),
}
"""Calls that are refused whatever their arguments: their numbers by machine, or None without such a call, and the
error.

`clone3` has its flags where a filter cannot look: a C library then takes `clone`.
"""


class Condition(NamedTuple):
    """Condition on an argument's lower 32 bits."""

    argument: int
    """Position of the argument, from 0."""
    kind: int
    value: int
    must_hold: bool = True


class Rule(NamedTuple):
    """A call is refused if all conditions of a rule are met."""

    error: int
    conditions: tuple[Condition, ...]


def _one_of(argument: int, error: int, *values: int) -> list[Rule]:
    return [Rule(error, (Condition(argument, EQUAL, value),)) for value in values]


CLONE_NEW = 0x7E020000
"""Flags of namespaces of every kind."""
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW = 6, 7, 37, 38
PR_SET_SECCOMP, FIRST_UNKNOWN_OPTION = 22, 65
"""PR_FUTEX_HASH, one of the later options, makes a table of 1 GiB."""
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
STREAMS = 0x5
"""Bits that every type of socket but SOCK_DGRAM has."""
SOL_SOCKET, SO_SNDBUF, SO_RCVBUF = 1, 7, 8
_NAMESPACES = [Rule(EPERM, (Condition(0, HAS_BITS, CLONE_NEW),))]
# Other families reach beyond a network namespace (AF_VSOCK: the hypervisor). TCP's memory counts for the whole machine.
_SOCKETS = [
    Rule(EAFNOSUPPORT, tuple(Condition(0, EQUAL, each, False) for each in (AF_UNIX, AF_INET, AF_INET6))),
    Rule(EPERM, (Condition(0, EQUAL, AF_UNIX, False), Condition(1, HAS_BITS, STREAMS))),
]

BY_ARGUMENT = {
    "clone": (56, 220, _NAMESPACES),
    # A process may hold locks without end, and waits for none of another program.
    "fcntl": (72, 25, _one_of(1, PRETENDED, F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW)),
    # Pages of shared memory stay after their unmapping, and huge pages are no resident memory.
    "mmap": (
        *(9, 222),
        [
            Rule(EPERM, (Condition(3, HAS_BITS, MAP_HUGETLB),)),
            Rule(EPERM, (Condition(3, HAS_BITS, MAP_ANONYMOUS), Condition(3, HAS_BITS, MAP_SHARED))),
        ],
    ),
    "prctl": (
        *(157, 167),
        [*_one_of(0, EINVAL, PR_SET_SECCOMP), Rule(EINVAL, (Condition(0, AT_LEAST, FIRST_UNKNOWN_OPTION),))],
    ),
    "setsockopt": (
        *(54, 208),
        [
            Rule(PRETENDED, (Condition(1, EQUAL, SOL_SOCKET), Condition(2, EQUAL, option)))
            for option in (SO_SNDBUF, SO_RCVBUF)
        ],
    ),
    "socket": (41, 198, _SOCKETS),
    "socketpair": (53, 199, _SOCKETS),
    "unshare": (272, 97, _NAMESPACES),
}
"""Calls that are refused with some arguments: their numbers by machine, and the rules."""


def filter_program(machine: str | None = None) -> bytes:
    """The filter as bytes. Raises: ValueError for a machine whose numbers are not known here."""
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise ValueError(f"a sandbox needs a machine of {' or '.join(MACHINES)}, got {machine}")
    code = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, MACHINES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, FIRST_UNKNOWN),
        (RETURN, 0, 0, ERROR | ENOSYS),
    ]
    for number, error in refused(machine).values():
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERROR | error)]
    for *numbers, rules in BY_ARGUMENT.values():
        judged = [*(each for rule in rules for each in _code_of(rule)), (RETURN, 0, 0, ALLOW)]
        code += [(EQUAL, 0, len(judged), numbers[list(MACHINES).index(machine)]), *judged]
    return b"".join(INSTRUCTION.pack(*each) for each in [*code, (RETURN, 0, 0, ALLOW)])


def refused(machine: str | None = None) -> dict[str, tuple[int, int]]:
    """Number and error by name, for the calls that are refused whatever their arguments."""
    index = list(MACHINES).index(machine or platform.machine())
    found = {name: (numbers[index], error) for name, (*numbers, error) in CALLS.items()}
    return {name: (number, error) for name, (number, error) in found.items() if number is not None}


def _code_of(rule: Rule) -> Sequence[tuple[int, int, int, int]]:
    code = []
    for position, condition in enumerate(rule.conditions):
        behind = 2 * (len(rule.conditions) - position) - 1  # instructions from the next one to that after the rule
        jumps = (0, behind) if condition.must_hold else (behind, 0)
        code += [(LOAD, 0, 0, FIRST_ARGUMENT + 8 * condition.argument), (condition.kind, *jumps, condition.value)]
    return [*code, (RETURN, 0, 0, ERROR | rule.error)]
