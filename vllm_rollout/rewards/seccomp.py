"""Which system calls a program in the sandbox may not use: a filter for the kernel, as `bwrap --seccomp` takes it.

Denied is what takes memory that no limit of a process counts, what reaches keys of ours, and what makes a user
namespace, in which a program may mount. Numbers and layout: Linux' `unistd.h`, `seccomp.h` and `bpf_common.h`.
"""

from __future__ import annotations

import errno
import platform
import struct

INSTRUCTION = struct.Struct("=HBBI")
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Where the kernel puts them, in bytes."""
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
CLONE_NEWUSER = 0x10000000
X32 = 0x40000000
"""Numbers from here on name the same calls of x86-64 a second time."""

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clone": (56, 220),
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "shmget": (29, 194),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
"""Their numbers on each machine."""
BY_FLAGS = ("clone", "unshare")
"""Denied with CLONE_NEWUSER only. `clone3` has its flags where a filter cannot look: it is said not to exist, and a C
library then takes `clone`."""


def filter_program(machine: str | None = None) -> bytes:
    """Raises: ValueError for a machine whose numbers are not known here."""
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise ValueError(f"a sandbox needs a machine of {' or '.join(MACHINES)}, got {machine}")
    numbers = {name: each[list(MACHINES).index(machine)] for name, each in CALLS.items()}
    code = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, MACHINES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, ERROR | errno.ENOSYS),
    ]
    for name, number in numbers.items():
        if name not in BY_FLAGS:
            error = errno.ENOSYS if name == "clone3" else errno.EPERM
            code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERROR | error)]
    code += [
        (EQUAL, 1, 0, numbers["clone"]),
        (EQUAL, 0, 2, numbers["unshare"]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (HAS_BITS, 1, 0, CLONE_NEWUSER),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERROR | errno.EPERM),
    ]
    return b"".join(INSTRUCTION.pack(*each) for each in code)
