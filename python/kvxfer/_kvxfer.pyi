"""Types of the compiled half of kvxfer. Its documentation is in the extension: `help(kvxfer.PageLayout)`."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, final

import numpy as np
from typing_extensions import Self, disjoint_base

from kvxfer._layout import StateBlock

__all__ = [
    "Agent",
    "Allocation",
    "Event",
    "PageLayout",
    "Plan",
    "Push",
    "RoomStats",
    "Shard",
    "Span",
    "Unreleased",
    "Waiter",
    "Watch",
    "_UcxProbeTarget",
    "_UcxProbeWriter",
    "__version__",
    "_after_fork_in_child",
    "_bench_copy",
    "_bench_plan",
    "_device_pci",
    "_doctor_gpus",
    "_doctor_host",
    "_doctor_ucx",
    "_memory_at",
    "_pack_table",
    "new_room",
    "plan_transfer",
    "simulate",
]

_Ids: TypeAlias = Any  # list, tuple or range of int, or a 1-D integer array (numpy, torch on the CPU)
_Layouts: TypeAlias = PageLayout | Sequence[PageLayout]
_Layers: TypeAlias = range | tuple[int, int]
_Counts: TypeAlias = int | Sequence[int]

__version__: str

def new_room() -> int:
    """A random room: 63 bits, one for each request's hand-off."""

def plan_transfer(
    src: tuple[_Layouts, Shard],
    dst: tuple[_Layouts, Shard],
    *,
    src_pages: _Ids,
    dst_pages: _Ids,
    tokens: int,
    start: int = 0,
    src_start: int = 0,
    dst_start: int | None = None,
    end: int | None = None,
    layers: _Layers | None = None,
    src_page_count: _Counts | None = None,
    dst_page_count: _Counts | None = None,
) -> Plan:
    """The writes that carry tokens `start` to `start + tokens` from source pages to destination pages."""

def simulate(
    seed: int,
    *,
    rooms: int = 1000,
    concurrent: int = 256,
    cancel: float = 0.2,
    kill: int = 3,
    stop: int = 3,
    cut: int = 6,
    flaw: str | None = None,
    mover: Literal["sender", "receiver"] = "sender",
    fence: Literal["completes", "impossible"] = "completes",
    log: str | PathLike[str] | None = None,
) -> dict[str, Any]:
    """Engines against each other under virtual time: `seed` decides all faults, and every byte is checked."""

def _after_fork_in_child() -> None: ...
def _bench_copy(
    regions: Sequence[
        tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], np.ndarray[tuple[int], np.dtype[np.uint8]]]
    ],
    *,
    dst: np.ndarray[tuple[int], np.dtype[np.uint64]],
    src: np.ndarray[tuple[int], np.dtype[np.uint64]],
    lens: np.ndarray[tuple[int], np.dtype[np.uint64]],
) -> int:
    """Nanoseconds of plain copying of the same pieces in each pair (to, from) of regions."""

def _pack_table(
    src: np.ndarray[tuple[int], np.dtype[np.uint64]],
    dst: np.ndarray[tuple[int], np.dtype[np.uint64]],
    lens: np.ndarray[tuple[int], np.dtype[np.uint64]],
) -> tuple[bytes, int, int, int]:
    """The pack kernel's table of copies by address: bytes, offset of its second list, stripes, tiles."""

def _bench_plan(
    src: tuple[_Layouts, Shard],
    dst: tuple[_Layouts, Shard],
    *,
    src_pages: _Ids,
    dst_pages: _Ids,
    tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Times the planning of one push, as the transfer thread does it."""

@final
class PageLayout:
    """How one page of a layer group lies in memory."""

    def __new__(
        cls,
        *,
        layers: int,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        page_tokens: int | None = 16,
        dtype: object = "bfloat16",
        order: str = "HND",
        kind: str = "kv",
        page_stride_bytes: int | None = None,
        cross_layer: bool = False,
        layer_stride_bytes: int | None = None,
        pp_layers: Sequence[int] | None = None,
        window_tokens: int | None = None,
        scale_dim: int | None = None,
        scale_dtype: object = "float32",
        scale_stride_bytes: int | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        state: Sequence[tuple[int, int, int, int]] | None = None,
    ) -> Self: ...
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def order(self) -> Literal["HND", "NHD"]: ...
    @property
    def kind(self) -> Literal["kv", "fused", "packed", "latent", "state"]: ...
    @property
    def page_stride_bytes(self) -> int | None: ...
    @property
    def cross_layer(self) -> bool: ...
    @property
    def layer_stride_bytes(self) -> int | None: ...
    @property
    def pp_layers(self) -> tuple[int, ...] | None: ...
    @property
    def window_tokens(self) -> int | None: ...
    @property
    def scale_dim(self) -> int | None: ...
    @property
    def scale_dtype(self) -> str | None: ...
    @property
    def scale_stride_bytes(self) -> int | None: ...
    @property
    def k_scale(self) -> float: ...
    @property
    def v_scale(self) -> float: ...
    @property
    def state(self) -> tuple[StateBlock, ...] | None: ...
    @property
    def item_bytes(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def parts(self) -> tuple[str, ...]: ...
    def page_bytes(self, shard: Shard) -> int: ...
    def page_extents(self, shard: Shard) -> tuple[tuple[int, int], ...]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Shard:
    """Which heads and layers of the model a rank holds."""

    def __new__(cls, tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1) -> Self: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def pp_rank(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    def layers(self, layout: PageLayout) -> range: ...
    def heads(self, layout: PageLayout) -> range: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs__(self) -> tuple[int, int, int, int]: ...

@final
class Plan:
    """The writes that carry a range of tokens from one rank's pages to another's."""

    @property
    def ops(self) -> np.ndarray[tuple[int], np.dtype[np.void]]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def src_regions(self) -> tuple[tuple[int, int, str], ...]: ...
    @property
    def dst_regions(self) -> tuple[tuple[int, int, str], ...]: ...
    def __len__(self) -> int: ...

@final
class Allocation:
    """Zeroed memory that a fabric likes; freed when the last view of it is gone."""

    def __new__(
        cls,
        nbytes: int,
        fabric: str = "auto",
        *,
        ucx_tls: str | None = None,
        ucx_wheel_dir: str | PathLike[str] | None = None,
    ) -> Self: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def fabric(self) -> str: ...
    def span(self, offset: int, shape: Sequence[int], typestr: str) -> Span: ...

@final
class Span:
    """A piece of an `Allocation` that `numpy.asarray` takes without a copy."""

    @property
    def allocation(self) -> Allocation: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

@final
class Push:
    """One push of one room: what `Agent.retract` takes and `Event.push` names."""

    @property
    def id(self) -> int: ...
    @property
    def room(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class RoomStats:
    """Time and bytes of one room on this side, by stage."""

    @property
    def bootstrap_us(self) -> int: ...
    @property
    def waiting_us(self) -> int: ...
    @property
    def transfer_us(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def writes(self) -> int: ...
    @property
    def first_write_at_us(self) -> int: ...
    @property
    def at_us(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Event:
    """Something that happened to a room."""

    @property
    def room(self) -> int: ...
    @property
    def state(self) -> Literal["Success", "Failed", "Released", "Retracted"]: ...
    @property
    def released(self) -> bool: ...
    @property
    def push(self) -> Push | None: ...
    @property
    def error(self) -> Exception | None: ...
    @property
    def meta(self) -> bytes | None: ...
    @property
    def stats(self) -> RoomStats: ...

@final
class Unreleased:
    """A room whose pages may still be written or read by a peer."""

    @property
    def room(self) -> int: ...
    @property
    def pages(self) -> list[list[int]]: ...
    @property
    def peers(self) -> list[str]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Watch:
    """Sees one room's end, even if `poll` takes it."""

    @property
    def room(self) -> int: ...
    def event(self) -> Event | None: ...

@final
class Waiter:
    """A descriptor that is readable after each room's end, until `clear`."""

    def fileno(self) -> int: ...
    def clear(self) -> None: ...

def _doctor_ucx(wheel_dir: str | PathLike[str] | None = None) -> dict[str, Any]:
    """The UCX that this process would use."""

def _doctor_host() -> dict[str, Any]:
    """What this host and this process are allowed."""

def _doctor_gpus() -> dict[str, Any]:
    """The GPUs."""

def _device_pci(device: int) -> str:
    """Where a GPU is on the PCI bus."""

def _memory_at(address: int) -> dict[str, Any]:
    """What memory an address names, by the CUDA driver's word."""

@final
class _UcxProbeTarget:
    """The receiver of a probe of one UCX transport."""

    def __new__(cls, tls: str, wheel_dir: str | PathLike[str] | None = None) -> Self: ...
    def address(self) -> bytes: ...
    def connect(self, writer: bytes) -> None: ...
    def progress(self) -> None: ...
    def arrived(self, value: int) -> tuple[bool, bool]: ...

@final
class _UcxProbeWriter:
    """The sender of a probe of one UCX transport."""

    def __new__(cls, tls: str, wheel_dir: str | PathLike[str] | None = None) -> Self: ...
    def address(self) -> bytes: ...
    def connect(self, target: bytes) -> None: ...
    def progress(self) -> bool: ...
    def transports(self) -> list[str]: ...
    def write(self, region: int, value: int) -> bool: ...

@disjoint_base
class Agent:
    """The compiled half of `kvxfer.Agent`, which prepares the arguments; use that one."""

    def __new__(
        cls,
        name: str,
        layout: _Layouts,
        shard: Shard,
        regions: Sequence[tuple[int, int, Allocation | None]],
        pages: Sequence[int],
        owner: object,
        *,
        listen: str = "127.0.0.1:0",
        directory: str | None = None,
        engine: str | None = None,
        dp_rank: int = 0,
        role: str = "both",
        model: str | None = None,
        fabric: str = "auto",
        secret: bytes | None = None,
        tls: tuple[PathLike[str], PathLike[str], PathLike[str], str | None] | None = None,
        insecure: bool = False,
        limits: dict[str, float] | None = None,
        cpu: int | None = None,
        queue_capacity: int = 4096,
        spin_us: int | None = None,
        ucx_tls: str | None = None,
        ucx_wheel_dir: str | PathLike[str] | None = None,
        heartbeat: float | None = None,
        suspect_after: float | None = None,
        fence_after: float | None = None,
        quarantine_limit: int | None = None,
        slice_bytes: int | None = None,
        staging: str = "auto",
        staging_slots: int = 32,
        staging_slot_bytes: int = 262144,
        devices: Sequence[int | None] | None = None,
        ucx_devices: tuple[list[str], int] | None = None,
        flaw: str | None = None,
    ) -> Self: ...
    @property
    def name(self) -> str:
        """Name, for people."""

    @property
    def address(self) -> str:
        """Control address, `"host:port"`."""

    @property
    def fabrics(self) -> tuple[str, ...]:
        """Names of the fabrics that it offers, best first."""

    @property
    def pages(self) -> tuple[int, ...]:
        """Registered pages of each group."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    def expect(
        self,
        room: int,
        pages: _Ids,
        *,
        tokens: int,
        start: int = 0,
        source: str,
        source_dp_rank: int = 0,
        timeout: float | None = 300.0,
        bootstrap_timeout: float | None = 300.0,
        verify: Literal["full", "sample"] | None = None,
    ) -> None:
        """Grants pages to the prefill engine at `source`, which may write them until the room's released
        event. `verify` asks for a checksum of what arrives: of every byte, or of a sample of rows.
        """

    def open(
        self, room: int, *, timeout: float | None = 300.0, bootstrap_timeout: float | None = 300.0
    ) -> None:
        """Gets a room's peers in contact before there is anything to push."""

    def push(
        self,
        room: int,
        pages: _Ids,
        *,
        start: int = 0,
        tokens: int,
        layers: _Layers | None = None,
        event: object = None,
        last: bool = True,
        meta: bytes | bytearray | None = None,
        timeout: float | None = 300.0,
        bootstrap_timeout: float | None = 300.0,
    ) -> Push:
        """Orders tokens `start` to `start + tokens` of a room to be delivered out of `pages`."""

    def retract(self, push: Push) -> None:
        """Takes a push's pages back; a `"Retracted"` event says when they are free."""

    def cancel(self, room: int) -> None:
        """Gives a room up on both sides."""

    def poll(self) -> list[Event]:
        """Everything that happened since the last call, oldest first."""

    def state(
        self, room: int
    ) -> Literal["Bootstrapping", "Waiting", "Transferring", "Success", "Failed"] | None:
        """Where a room stands; None if it is not known, or ended well and was polled."""

    def wait(self, room: int, timeout: float | None = None) -> Event:
        """Sleeps until the room has ended, at most `timeout` seconds, and returns its `"Success"`."""

    def _watch(self, room: int) -> Watch: ...
    def _new_waiter(self) -> Waiter: ...
    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to say."""

    def stats(self) -> dict[str, int]:
        """Counters (since the start) and gauges (now), by name."""

    def metrics(self) -> dict[str, Any]:
        """What `stats` has no plain number for: rooms by state, failures by stage and reason, histograms."""

    def evict(self, peer: str) -> None:
        """The operator says that a peer (its name, or its incarnation in hex) is gone for good."""

    def close(self, timeout: float = 5.0) -> list[Unreleased]:
        """Cancels every room, waits until no peer can touch the memory, and stops."""
