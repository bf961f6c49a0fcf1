"""Memory of a GPU, as the CUDA driver knows it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from kvxfer import _kvxfer
from kvxfer.errors import BadArgument, NotSupported

# DLPack's numbers for CUDA's memory: the device's, and managed.
DLPACK_DEVICE, _DLPACK_MANAGED = 2, 13
DLPACK_CUDA = (DLPACK_DEVICE, _DLPACK_MANAGED)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory by its address, for `Agent(memory=)`: `nbytes` from `address` on, on GPU `device`.

    The driver is asked what the address names, and must agree: memory of that device, or memory of the host
    that was pinned for CUDA. Whoever owns it keeps it until the agent is closed.
    """

    address: int
    nbytes: int
    device: int


def cuda_array(interface: Any, name: str) -> tuple[int, tuple[int, ...], list[int] | None, int, bool]:
    """What a `__cuda_array_interface__` says: address, shape, strides in bytes (None if contiguous), bytes of
    an element, and whether it is read-only.
    """
    try:
        address, read_only = interface["data"]
        shape = tuple(int(n) for n in interface["shape"])
        itemsize = int(interface["typestr"][2:])
        strides = interface.get("strides")
    except (KeyError, TypeError, ValueError) as error:
        raise BadArgument(f"{name}: its __cuda_array_interface__ cannot be used: {error!r}") from error
    return (
        int(address),
        shape,
        None if strides is None else [int(n) for n in strides],
        itemsize,
        bool(read_only),
    )


class _Tensor(ctypes.Structure):
    """DLPack's `DLTensor`, with which each of its managed tensors of version 0 begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def dlpack(tensor: Any, name: str) -> tuple[int, tuple[int, ...], list[int] | None, int, object]:
    """As `cuda_array`, of what has only `__dlpack__`; last comes what keeps the memory.

    Nothing is read, so its producer need not wait for its own streams.
    """
    try:
        capsule = tensor.__dlpack__(stream=-1)
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        found = ctypes.cast(get(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise BadArgument(
            f"{name}: this {type(tensor).__name__} cannot be taken by DLPack: {error}"
        ) from error
    itemsize, odd = divmod(found.bits * found.lanes, 8)
    if odd:
        raise BadArgument(f"{name}: elements of {found.bits} bits are no whole bytes")
    shape = tuple(found.shape[i] for i in range(found.ndim))
    strides = [found.strides[i] * itemsize for i in range(found.ndim)] if found.strides else None
    # The capsule, which nobody has consumed, frees the tensor when it goes.
    return (found.data or 0) + found.byte_offset, shape, strides, itemsize, capsule


def check(address: int, nbytes: int, name: str, device: int | None) -> int | None:
    """The device that the memory is on, by the driver's word; None for memory of the host that was pinned."""
    if not 0 < address < 2**64 or not 0 <= nbytes <= 2**64 - address:
        raise BadArgument(f"{name}: address {address} and {nbytes} bytes are no memory")
    found = _kvxfer._memory_at(address)
    kind, on = found["kind"], found["device"]
    where = f"{name} ({nbytes} bytes at {address:#x})"
    if kind == "unknown":
        raise BadArgument(
            f"{where} is said to be memory of a GPU, but CUDA does not know it: give the host's memory as"
            " an array or a pair (address, nbytes)"
        )
    if kind == "managed":
        raise NotSupported(
            f"{where} is managed memory, which CUDA moves between host and device: allocate it on the device"
            " (torch.empty(..., device='cuda')) or pinned on the host"
        )
    if device is not None and on != device:
        raise BadArgument(f"{where} is on device {on}, not on device {device}")
    start, end = found["range_start"], found["range_start"] + found["range_bytes"]
    if not start <= address <= address + nbytes <= end:
        raise BadArgument(
            f"{where} leaves its allocation of {found['range_bytes']} bytes at {start:#x}: a region is one"
            " piece of memory"
        )
    if kind == "pinned":
        return None
    if not found["exportable"]:
        raise NotSupported(
            f"{where} is memory that no other process and no network card can be let at: CUDA's virtual"
            " memory (torch's expandable segments) or a memory pool (cudaMallocAsync). Set"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False before torch's first allocation, leave out"
            " backend:cudaMallocAsync, or allocate the pages with cudaMalloc"
        )
    return int(on)
