"""CUDA's driver by ctypes: what `tests/gpu` and `benches/gpu` do with a GPU by themselves.

Nothing but the driver is needed for it, so the same lines run on a GPU with or without torch, and on the stub
of `cuda/stub/cuda_app.c`, which is loaded where `KVXFER_CUDA_LIBRARY` names it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_NOT_READY = 600
# A stream that does not wait for the default stream, nor that for it.
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_MULTIPROCESSORS = 16
# What virtual memory of a device is given out in, on every GPU so far.
_VMM_UNIT = 2 << 20
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)


class DriverError(RuntimeError):
    """The driver refused a call."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationProperties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", c_int))


class Gate:
    """A stream stands still until it is opened; it must be, before the process ends."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._called = _HOST_FUNCTION(lambda _: self._wait())

    def _wait(self) -> None:
        self._event.wait(60)

    def open(self) -> None:
        self._event.set()


class Gpu:
    """A device, whose primary context is current on the thread that made this."""

    def __init__(self, ordinal: int = 0) -> None:
        self.lib = ctypes.CDLL(os.environ.get("KVXFER_CUDA_LIBRARY") or "libcuda.so.1")
        self.ordinal = ordinal
        self.is_stub = hasattr(self.lib, "kvxstub_faults")
        self.call("cuInit", c_uint(0))
        raw = c_int()
        self.call("cuDeviceGet", byref(raw), c_int(ordinal))
        self._device = raw
        self._context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(self._context), raw)
        self.use()

    def call(self, name: str, *arguments: Any) -> None:
        """Calls the driver; numbers go as the C types that they are given in."""
        code = getattr(self.lib, name)(*arguments)
        if code != 0:
            text = c_char_p()
            self.lib.cuGetErrorName(c_int(code), byref(text))
            raise DriverError(f"{name} failed with {(text.value or b'an unknown error').decode()} ({code})")

    def use(self) -> None:
        """Makes the device's context the calling thread's."""
        self.call("cuCtxPushCurrent_v2", self._context)

    def _attribute(self, which: int) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), c_int(which), self._device)
        return value.value

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, c_int(len(text)), self._device)
        return text.value.decode()

    @property
    def cuda(self) -> str:
        """The CUDA that the driver knows."""
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    @property
    def multiprocessors(self) -> int:
        return max(1, self._attribute(_MULTIPROCESSORS))

    # ---- memory

    def alloc(self, nbytes: int) -> int:
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", c_uint64(address))

    def pinned(self, nbytes: int) -> int:
        """Memory of the host, which every device may read."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), c_size_t(nbytes), c_uint(1))
        return address.value or 0

    def managed(self, nbytes: int) -> int:
        address = c_uint64()
        self.call("cuMemAllocManaged", byref(address), c_size_t(nbytes), c_uint(1))
        return address.value

    def pooled(self, nbytes: int, stream: int) -> int:
        """What `cudaMallocAsync` gives."""
        address = c_uint64()
        self.call("cuMemAllocAsync", byref(address), c_size_t(nbytes), c_uint64(stream))
        self.sync(stream)
        return address.value

    def virtual(self, nbytes: int) -> int:
        """Virtual memory that was not made to be exported, as torch's expandable segments are."""
        where = _Location(1, self.ordinal)
        properties = _AllocationProperties(1, 0, where)
        nbytes = -(-nbytes // _VMM_UNIT) * _VMM_UNIT
        handle, address = c_uint64(), c_uint64()
        self.call("cuMemCreate", byref(handle), c_size_t(nbytes), byref(properties), c_uint64(0))
        self.call(
            "cuMemAddressReserve", byref(address), c_size_t(nbytes), c_size_t(0), c_uint64(0), c_uint64(0)
        )
        self.call("cuMemMap", address, c_size_t(nbytes), c_size_t(0), handle, c_uint64(0))
        self.call("cuMemSetAccess", address, c_size_t(nbytes), byref(_Access(where, 3)), c_size_t(1))
        return address.value

    def write(self, address: int, data: Bytes) -> None:
        data = np.ascontiguousarray(data)
        self.call("cuMemcpyHtoD_v2", c_uint64(address), c_void_p(data.ctypes.data), c_size_t(data.nbytes))

    def read(self, address: int, nbytes: int) -> Bytes:
        out = np.empty(nbytes, np.uint8)
        self.call("cuMemcpyDtoH_v2", c_void_p(out.ctypes.data), c_uint64(address), c_size_t(nbytes))
        return out

    def fill(self, address: int, value: int, nbytes: int) -> None:
        self.call("cuMemsetD8_v2", c_uint64(address), ctypes.c_ubyte(value), c_size_t(nbytes))

    def export(self, address: int) -> bytes:
        """An IPC handle of memory that `alloc` gave."""
        handle = _IpcHandle()
        self.call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle.bytes)

    def import_(self, handle: bytes) -> int:
        """Another process's memory, by its handle."""
        address = c_uint64()
        passed = _IpcHandle((ctypes.c_ubyte * 64)(*handle))
        self.call("cuIpcOpenMemHandle_v2", byref(address), passed, c_uint(1))
        return address.value

    # ---- work

    def stream(self) -> int:
        stream = c_uint64()
        self.call("cuStreamCreate", byref(stream), c_uint(_NON_BLOCKING))
        return stream.value

    def sync(self, stream: int) -> None:
        self.call("cuStreamSynchronize", c_uint64(stream))

    def event(self, *, timed: bool = False) -> int:
        event = c_uint64()
        self.call("cuEventCreate", byref(event), c_uint(0 if timed else _DISABLE_TIMING))
        return event.value

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", c_uint64(event), c_uint64(stream))

    def is_done(self, event: int) -> bool:
        code = self.lib.cuEventQuery(c_uint64(event))
        if code not in (0, _NOT_READY):
            raise DriverError(f"cuEventQuery failed ({code})")
        return bool(code == 0)

    def gate(self, stream: int) -> Gate:
        """What is queued on the stream from now on waits until the gate is opened."""
        gate = Gate()
        self.call("cuLaunchHostFunc", c_uint64(stream), gate._called, c_void_p())
        return gate

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queues a copy from device to device."""
        self.call("cuMemcpyDtoDAsync_v2", c_uint64(to), c_uint64(source), c_size_t(nbytes), c_uint64(stream))

    def copy_in(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queues a copy from pinned memory to the device."""
        self.call("cuMemcpyHtoDAsync_v2", c_uint64(to), c_void_p(source), c_size_t(nbytes), c_uint64(stream))

    def copy_out(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queues a copy from the device to pinned memory."""
        self.call("cuMemcpyDtoHAsync_v2", c_void_p(to), c_uint64(source), c_size_t(nbytes), c_uint64(stream))

    def time_ms(self, work: Callable[[int], None], stream: int) -> float:
        """Milliseconds of what `work` queues on the stream, by the device's clock."""
        begin, end, found = self.event(timed=True), self.event(timed=True), c_float()
        self.record(begin, stream)
        work(stream)
        self.record(end, stream)
        self.call("cuEventSynchronize", c_uint64(end))
        self.call("cuEventElapsedTime", byref(found), c_uint64(begin), c_uint64(end))
        for event in (begin, end):
            self.call("cuEventDestroy_v2", c_uint64(event))
        return found.value

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        """In the global mode, in which no thread may make a call that could spoil it."""
        self.call("cuStreamBeginCapture_v2", c_uint64(stream), c_int(0))

    def end_capture(self, stream: int) -> int:
        """What was captured, ready to be launched."""
        graph, executable = c_uint64(), c_uint64()
        self.call("cuStreamEndCapture", c_uint64(stream), byref(graph))
        self.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        return executable.value

    def launch(self, executable: int, stream: int) -> None:
        self.call("cuGraphLaunch", c_uint64(executable), c_uint64(stream))

    def faults(self) -> str:
        """What the stub says that the driver does not allow; nothing on a GPU."""
        if not self.is_stub:
            return ""
        text = c_char_p()
        self.lib.kvxstub_faults(byref(text))
        return (text.value or b"").decode()


class PackKernel:
    """`kvxfer_copy_stripes`, launched as kvxfer launches it."""

    THREADS = 256

    def __init__(self, gpu: Gpu, ptx: bytes) -> None:
        self.gpu = gpu
        module, self.function = c_uint64(), c_uint64()
        gpu.call("cuModuleLoadData", byref(module), c_char_p(ptx + b"\0"))
        gpu.call("cuModuleGetFunction", byref(self.function), module, c_char_p(b"kvxfer_copy_stripes"))

    def table(self, table: bytes) -> int:
        """The table in the device's memory."""
        address = self.gpu.alloc(len(table))
        self.gpu.write(address, np.frombuffer(table, np.uint8))
        return address

    def launch(self, at: int, first: int, stripes: int, tiles: int, blocks: int, stream: int) -> None:
        """Queues the copies of the table at `at`, whose second list is `first` bytes on."""
        words = [c_uint64(at), c_uint64(at + first), c_uint64(stripes)]
        parameters = (c_void_p * 3)(*(ctypes.cast(ctypes.pointer(word), c_void_p) for word in words))
        grid = max(1, min(blocks, -(-tiles // (self.THREADS // 32))))
        shape = (grid, 1, 1, self.THREADS, 1, 1, 0)
        self.gpu.call(
            "cuLaunchKernel", self.function, *map(c_uint, shape), c_uint64(stream), parameters, c_void_p()
        )
