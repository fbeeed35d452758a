"""Which system calls a program in the sandbox may not use: a filter for the kernel, as `bwrap --seccomp` takes it.

Refused is what takes memory that neither a limit nor the sandbox counts, what reaches keys of ours or other machines,
and what makes namespaces, in which a program may mount. Numbers and layout: Linux' `unistd.h`, `seccomp.h` and
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
"""Where the kernel puts them, in bytes."""
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FIRST_UNKNOWN = 470
"""Numbers from here on are of calls that nobody has looked at (Linux 6.19 and later), or, on x86-64, name the calls of
the x32 ABI. The program is told that they do not exist."""

PRETENDED = 0
"""The call does nothing and says that all went well."""

CALLS = {
    # Memory that no process has.
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
"""Refused whatever their arguments: their numbers on each machine, None where it has no such call, and what the program
is told. `clone3` has its flags where a filter cannot look: a C library then takes `clone`."""


class Condition(NamedTuple):
    """Of an argument's lower 32 bits."""

    argument: int
    """Its position, from 0."""
    kind: int
    value: int
    must_hold: bool = True


class Rule(NamedTuple):
    """The call is refused if all conditions are as they must be."""

    error: int
    conditions: tuple[Condition, ...]


def _one_of(argument: int, error: int, *values: int) -> list[Rule]:
    return [Rule(error, (Condition(argument, EQUAL, value),)) for value in values]


CLONE_NEW = 0x7E020000
"""Namespaces of every kind."""
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW = 6, 7, 37, 38
PR_SET_SECCOMP, FIRST_UNKNOWN_OPTION = 22, 65
"""One of the later options makes a table of 1 GiB: PR_FUTEX_HASH."""
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
STREAMS = 0x5
"""Bits that every type of socket has but SOCK_DGRAM."""
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
"""Refused with some arguments: their numbers on each machine, and the rules."""


def filter_program(machine: str | None = None) -> bytes:
    """Raises: ValueError for a machine whose numbers are not known here."""
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
    """Of calls that are refused whatever their arguments, the number on that machine and the error, by name."""
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
