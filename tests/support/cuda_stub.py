"""A libcuda.so.1 that plays two GPUs in the host's memory: built from cuda/stub, and steered by tests."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).resolve().parents[2] / "cuda" / "stub" / "cuda_stub.c"
# The same with what an engine calls and kvxfer does not.
APP = SOURCE.with_name("cuda_app.c")

DEVICE, MANAGED, PINNED, VMM, VMM_FILE, VMM_FABRIC, POOL = range(7)


def build(
    folder: Path, name: str = "libcuda.so.1", defines: Sequence[str] = (), source: Path = SOURCE
) -> Path:
    """Compiles the stub, with `-DcuThatCall=gone` for calls that it is to lack."""
    library = folder / name
    flags = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread"]
    # UCX's CUDA transports ask the linker for the same library, by this name.
    flags.append("-Wl,-soname,libcuda.so.1")
    subprocess.run(["cc", *flags, *defines, "-o", str(library), str(source), "-ldl"], check=True)
    return library


def build_nvml(folder: Path) -> None:
    """A libnvidia-ml.so.1 that has nothing: UCX's CUDA transports cannot be loaded without one."""
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-x", "c", "-"]
    code = 'const char *nvmlErrorString(int code) { return code ? "none" : ""; }'
    subprocess.run(["cc", *flags, "-o", str(library)], input=code, text=True, check=True)


class Stub:
    """The stub that this process's kvxfer has loaded, or will."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(os.environ["KVXFER_CUDA_LIBRARY"])
        for name in ("alloc", "stream", "event", "calls", "faults"):
            getattr(self.lib, f"kvxstub_{name}").restype = ctypes.c_uint64

    def alloc(self, nbytes: int, memory: int = DEVICE, device: int = 0) -> int:
        address: int = self.lib.kvxstub_alloc(ctypes.c_size_t(nbytes), memory, device)
        assert address
        return address

    def stream(self, device: int = 0) -> int:
        return int(self.lib.kvxstub_stream(device))

    def event(self, device: int = 0) -> int:
        return int(self.lib.kvxstub_event(device))

    def start(self, stream: int) -> None:
        """A kernel begins on the stream."""
        self.lib.kvxstub_start(ctypes.c_uint64(stream))

    def finish(self, stream: int) -> None:
        """The oldest kernel of the stream ends."""
        self.lib.kvxstub_finish(ctypes.c_uint64(stream))

    def record(self, event: int, stream: int) -> None:
        self.lib.kvxstub_record(ctypes.c_uint64(event), ctypes.c_uint64(stream))

    def destroy(self, handle: int) -> None:
        self.lib.kvxstub_destroy(ctypes.c_uint64(handle))

    def capture(self, stream: int, on: bool) -> None:
        self.lib.kvxstub_capture(ctypes.c_uint64(stream), int(on))

    def fail(self, call: str, code: int, *, after: int = 0, times: int = 1) -> None:
        self.lib.kvxstub_fail(call.encode(), code, ctypes.c_uint64(after), ctypes.c_uint64(times))

    def calls(self, call: str) -> int:
        return int(self.lib.kvxstub_calls(call.encode()))

    def retained(self, device: int) -> int:
        return int(self.lib.kvxstub_retained(device))

    def faults(self) -> str:
        """What kvxfer did that the driver does not allow, a line each."""
        text = ctypes.c_char_p()
        self.lib.kvxstub_faults(ctypes.byref(text))
        return (text.value or b"").decode()


class TorchStream:
    """What kvxfer looks at in `torch.cuda.Stream`."""

    def __init__(self, stub: Stub, device: int = 0) -> None:
        self.cuda_stream, self.device_index = stub.stream(device), device


class TorchEvent:
    """What kvxfer looks at in `torch.cuda.Event`, which is null until it is recorded."""

    def __init__(self, stub: Stub) -> None:
        self.stub, self.cuda_event, self.device = stub, 0, None

    def record(self, stream: TorchStream) -> None:
        self.cuda_event = self.stub.event(stream.device_index)
        self.device = SimpleNamespace(type="cuda", index=stream.device_index)
        self.stub.record(self.cuda_event, stream.cuda_stream)


class CupyStream:
    """What kvxfer looks at in `cupy.cuda.Stream`."""

    def __init__(self, stub: Stub, device: int = 0) -> None:
        self.ptr, self.device_id = stub.stream(device), device

    def use(self) -> None: ...


class CupyEvent:
    """What kvxfer looks at in `cupy.cuda.Event`."""

    done = True

    def __init__(self, stub: Stub, device: int = 0) -> None:
        self.ptr = stub.event(device)

    def record(self) -> None: ...


class AnyStream:
    """A stream of NVIDIA's protocol."""

    def __init__(self, raw: int, version: int = 0) -> None:
        self.raw, self.version = raw, version

    def __cuda_stream__(self) -> tuple[int, int]:
        return self.version, self.raw
