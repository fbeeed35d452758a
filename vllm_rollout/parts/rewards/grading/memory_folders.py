"""Folders in memory with a bound of inodes, which bubblewrap does not offer.

They are mounted in a mount namespace of the sandbox's first process, between its fork and bubblewrap. No other process
sees them, and they go with it. A process that is not root makes a user namespace first, as bubblewrap itself does.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000


def mounter(folders: list[Path], size_bytes: int, max_inodes: int) -> Callable[[], None]:
    """Function that mounts a folder in memory at each path. It runs in a forked child: it looks nothing up, and imports
    nothing."""
    library = ctypes.CDLL(None, use_errno=True)
    unshare, mount = library.unshare, library.mount
    is_root, flags = os.geteuid() == 0, ctypes.c_ulong(MS_NOSUID | MS_NODEV)
    options = f"size={size_bytes},nr_inodes={max_inodes},mode=1777".encode()
    places = [os.fsencode(folder) for folder in folders]
    user, group = (b"%d %d 1" % (each, each) for each in (os.geteuid(), os.getegid()))
    maps = {} if is_root else {"setgroups": b"deny", "uid_map": user, "gid_map": group}

    def check(result: int) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), "no folder in memory can be mounted")

    def run() -> None:
        check(unshare(CLONE_NEWNS if is_root else CLONE_NEWNS | CLONE_NEWUSER))
        for name, said in maps.items():
            file = os.open(f"/proc/self/{name}", os.O_WRONLY)
            os.write(file, said)
            os.close(file)
        check(mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
        for place in places:
            check(mount(b"tmpfs", place, b"tmpfs", flags, options))

    return run
