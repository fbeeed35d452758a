"""`cuda.bindings.runtime` over plain host memory: one host, and the processes on it.

Pointers are addresses, so that what is copied is copied. Memory that was freed or closed, a handle of a freed buffer
and a handle that its own process opens are refused, as CUDA refuses them or would read what is not there.
"""

import ctypes
from collections import Counter
from enum import Enum, IntEnum
from typing import Any


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorMapBufferObjectFailed = 205
    cudaErrorInvalidResourceHandle = 400


class cudaMemcpyKind(Enum):
    cudaMemcpyDefault = 4


OK = cudaError_t.cudaSuccess


class Handle:
    """`cudaIpcMemHandle_t`."""

    def __init__(self, content: bytes = bytes(64)) -> None:
        self._content = ctypes.create_string_buffer(content, 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._content)


class Host:
    """Memory of one device and its exported pointers, shared by the processes of a host."""

    def __init__(self, num_bytes: int = 1 << 30) -> None:
        self.num_free = num_bytes
        self.processes: list[Runtime] = []
        self.exported: dict[bytes, tuple[Runtime, int]] = {}


class Runtime:
    """One process.

    `fails`: an error by function, answered from the n-th call on for as long as it is there.
    """

    CUDA_IPC_HANDLE_SIZE = 64
    cudaIpcMemLazyEnablePeerAccess = 1
    cudaIpcMemHandle_t = Handle
    cudaMemcpyKind = cudaMemcpyKind
    cudaError_t = cudaError_t

    def __init__(self, host: Host) -> None:
        self._host = host
        host.processes.append(self)
        self.allocated: dict[int, Any] = {}
        self.opened: Counter[int] = Counter()
        self.fails: dict[str, tuple[int, cudaError_t]] = {}
        self.calls: Counter[str] = Counter()
        self._ghosts: list[Any] = []
        """Freed memory, which no address is reused of."""

    def _error(self, function: str) -> cudaError_t:
        self.calls[function] += 1
        first, error = self.fails.get(function, (0, OK))
        return error if first and self.calls[function] >= first else OK

    def cudaGetLastError(self) -> tuple[cudaError_t]:
        return (OK,)

    def cudaSetDevice(self, device: int) -> tuple[cudaError_t]:
        return (self._error("cudaSetDevice"),)

    def cudaMemGetInfo(self) -> tuple[cudaError_t, int | None, int | None]:
        error = self._error("cudaMemGetInfo")
        return (error, self._host.num_free, 1 << 40) if error == OK else (error, None, None)

    def cudaMalloc(self, num_bytes: int) -> tuple[cudaError_t, int | None]:
        error = self._error("cudaMalloc")
        if error == OK and num_bytes > self._host.num_free:
            error = cudaError_t.cudaErrorMemoryAllocation
        if error != OK:
            return error, None
        memory = ctypes.create_string_buffer(num_bytes)
        self.allocated[ctypes.addressof(memory)] = memory
        self._host.num_free -= num_bytes
        return OK, ctypes.addressof(memory)

    def cudaFree(self, pointer: int) -> tuple[cudaError_t]:
        if (error := self._error("cudaFree")) != OK:
            return (error,)
        if pointer not in self.allocated:
            return (cudaError_t.cudaErrorInvalidValue,)
        memory = self.allocated.pop(pointer)
        self._host.num_free += len(memory)
        self._ghosts.append(memory)
        return (OK,)

    def cudaIpcGetMemHandle(self, pointer: int) -> tuple[cudaError_t, Handle | None]:
        if (error := self._error("cudaIpcGetMemHandle")) != OK:
            return error, None
        content = pointer.to_bytes(8, "little") + bytes(range(56))
        self._host.exported[content] = self, pointer
        return OK, Handle(content)

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[cudaError_t, int | None]:
        error = self._error("cudaIpcOpenMemHandle")
        assert flags == self.cudaIpcMemLazyEnablePeerAccess
        source, pointer = self._host.exported.get(ctypes.string_at(handle.getPtr(), 64), (None, 0))
        if error == OK and (source in (None, self) or pointer not in source.allocated):
            error = cudaError_t.cudaErrorMapBufferObjectFailed
        if error != OK:
            return error, None
        self.opened[pointer] += 1
        return OK, pointer

    def cudaIpcCloseMemHandle(self, pointer: int) -> tuple[cudaError_t]:
        if self.opened[pointer] == 0:
            return (cudaError_t.cudaErrorInvalidValue,)
        self.opened[pointer] -= 1  # also when it fails: a test counts what was not even asked for
        return (self._error("cudaIpcCloseMemHandle"),)

    def cudaMemcpyAsync(
        self, target: int, source: int, num_bytes: int, kind: cudaMemcpyKind, stream: int
    ) -> tuple[cudaError_t]:
        if (error := self._error("cudaMemcpyAsync")) != OK:
            return (error,)
        if any(self._is_gone(pointer, num_bytes) for pointer in (target, source)):
            return (cudaError_t.cudaErrorInvalidValue,)
        ctypes.memmove(target, source, num_bytes)
        return (OK,)

    def _is_gone(self, pointer: int, num_bytes: int) -> bool:
        """True if the pointer is device memory that this process does not have."""
        for source in self._host.processes:
            if any(ctypes.addressof(ghost) <= pointer < end_of(ghost) for ghost in source._ghosts):
                return True
            for start, memory in source.allocated.items():
                if start <= pointer < end_of(memory):
                    is_known = source is self or self.opened[start] > 0
                    return not is_known or pointer + num_bytes > end_of(memory)
        return False


def end_of(memory: Any) -> int:
    return ctypes.addressof(memory) + len(memory)


def new_processes(num_processes: int = 2, num_bytes: int = 1 << 30) -> list[Runtime]:
    host = Host(num_bytes)
    return [Runtime(host) for _ in range(num_processes)]


FUNCTIONS = (
    "cudaSetDevice",
    "cudaMemGetInfo",
    "cudaMalloc",
    "cudaIpcGetMemHandle",
    "cudaIpcOpenMemHandle",
    "cudaIpcCloseMemHandle",
    "cudaMemcpyAsync",
    "cudaFree",
)
"""CUDA functions that may fail in a test."""
