"""What `kvxfer doctor` says of GPUDirect RDMA: a line for each thing that must be true."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from kvxfer import _rails
from kvxfer._rails import Card, Distance
from kvxfer.cli._text import size

__all__ = ["look"]

State = Literal["ok", "warn", "fail", "unknown", "not applicable"]
Found = dict[str, Any]

# From this kernel on memory of a GPU can be handed to a card as a dma-buf, and UCX takes it from 1.14 on.
_DMABUF_KERNEL, _DMABUF_UCX = (5, 12), (1, 14)
# With RDMA every registered byte is locked.
_LOCKED_BYTES = 64 << 30
_PCI_EXPRESS, _ACS = 0x10, 0x000D
# Redirect of requests and of completions, and egress control: with one of these a switch sends up what two
# devices below it say to each other.
_ACS_REDIRECTS = 0x04 | 0x08 | 0x20
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OFF = ("n", "no", "0", "off")
# Number of the capability that RLIMIT_MEMLOCK does not bind.
_CAP_IPC_LOCK = 14


class _Said(NamedTuple):
    """Of one thing that must be true."""

    state: State
    found: str
    """What is so, and what that means."""
    advice: str = ""
    """What to do."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the lines are drawn from."""

    root: Path
    ucx: Found
    host: Found
    gpus: Found
    env: Mapping[str, str]
    cards: list[Card] = field(default_factory=list)
    places: list[_rails.Place] = field(default_factory=list)

    @property
    def usable(self) -> list[Card]:
        return _rails.usable(self.cards)

    def pairs(self) -> Iterator[tuple[str, _rails.Place, Card]]:
        """Each GPU that this process may use, with the card that kvxfer would give it."""
        known = {place.address: place for place in self.places}
        by_rail = {card.rail: card for card in self.cards}
        for gpu in self.gpus["devices"]:
            place = known.get((gpu.get("pci") or "").lower())
            names = _rails.choose(place.address, self.root).names if place else ()
            if place is not None and names:
                yield f"GPU {gpu['ordinal']}", place, by_rail[names[0]]

    def is_guest(self) -> bool:
        """Whether this is a virtual machine, whose host knows what is between devices."""
        flags = re.search(r"^flags\s*:(.*)$", _text(self, "proc/cpuinfo") or "", re.MULTILINE)
        return flags is not None and "hypervisor" in flags[1].split()


_ASK_HOST = "ask who runs that host"
_NO_PAIR = _Said(
    "unknown", "no GPU that could be asked has a card that works", "see the lines on GPUs and cards"
)


def _text(asked: _Asked, path: str) -> str | None:
    try:
        return (asked.root / path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"[\d.]+", text)
    return tuple(int(part) for part in found[0].split(".") if part) if found else ()


def _driver(asked: _Asked) -> _Said:
    text = _text(asked, "proc/driver/nvidia/version")
    version = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text or "")
    if text is None or version is None:
        return _Said(
            "fail",
            f"not loaded, and the host has {len(asked.places)} NVIDIA GPUs"
            if asked.places
            else "no /proc/driver/nvidia/version, which containers may lack",
            "install it, or start the container with the GPU (docker run --gpus)",
        )
    kind = "open kernel modules" if _is_open(text) else "closed kernel modules"
    if asked.gpus["error"] is not None:
        return _Said(
            "fail",
            f"{version[1]}, {kind}, but libcuda says: {asked.gpus['error']}",
            "see what nvidia-smi says",
        )
    cuda = ".".join(str(n) for n in asked.gpus["version"] or ()) or "an unknown version"
    return _Said("ok", f"{version[1]}, {kind}, knows CUDA {cuda}")


def _is_open(text: str) -> bool:
    return "Open Kernel Module" in text


def _memory_path(asked: _Asked) -> _Said:
    """How a card gets at a GPU's memory at all."""
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if (asked.root / "sys/module" / module).is_dir():
            return _Said("ok", f"{module} is loaded, so that the card's driver can register GPU memory")
    kernel = _numbers(_text(asked, "proc/sys/kernel/osrelease") or "")[:2]
    version = _text(asked, "proc/driver/nvidia/version") or ""
    says = [gpu.get("dmabuf") for gpu in asked.gpus["devices"]]
    if not says:
        return _Said(
            "unknown",
            "nvidia_peermem is not loaded, and no GPU could be asked for dma-buf",
            "modprobe nvidia_peermem (after the card's driver), or see to NVIDIA's driver first",
        )
    ucx = _numbers(asked.ucx["version"] or "")[:2]
    lacks = []
    if kernel < _DMABUF_KERNEL:
        lacks.append("a kernel from 5.12 on")
    if not _is_open(version) and not any(says):
        lacks.append("NVIDIA's open kernel modules")
    elif says and not all(says):
        lacks.append("a driver that exports the GPU's memory as dma-buf")
    if ucx < _DMABUF_UCX:
        lacks.append("UCX from 1.14 on")
    if not lacks:
        return _Said(
            "ok",
            "no nvidia_peermem, but kernel, driver and UCX are new enough for dma-buf (ucx_info -d: the"
            " card's memory types must have cuda)",
        )
    return _Said(
        "fail",
        "nvidia_peermem is not loaded, and dma-buf lacks " + " and ".join(lacks),
        "modprobe nvidia_peermem (after the card's driver), or see to what dma-buf lacks",
    )


def _gpudirect(asked: _Asked) -> _Said:
    off = asked.env.get("UCX_IB_GPU_DIRECT_RDMA", "")
    if off.lower() in _OFF:
        return _Said("fail", f"turned off by UCX_IB_GPU_DIRECT_RDMA={off}", "unset it")
    cannot = [str(gpu["ordinal"]) for gpu in asked.gpus["devices"] if gpu.get("rdma") is False]
    if cannot:
        return _Said(
            "fail",
            f"the driver says that GPU {', '.join(cannot)} cannot be read or written by cards",
            "keep the pages that are handed off in pinned memory of the host",
        )
    if not asked.gpus["devices"] or any(gpu.get("rdma") is None for gpu in asked.gpus["devices"]):
        return _Said("unknown", "the driver did not say it of every GPU", "see to NVIDIA's driver first")
    return _Said("ok", "the driver says that cards may read and write the GPUs' memory")


def _ucx_transports(asked: _Asked) -> _Said:
    there = [t for t in asked.ucx["transports"] if t.startswith(("rc_", "dc_", "ud_"))]
    if any(t.startswith("rc_") for t in there):
        return _Said("ok", f"{', '.join(there)}, in {asked.ucx['path']}")
    found = f"only {', '.join(there)}" if there else "none"
    return _Said(
        "fail",
        f"{found}, in {asked.ucx['path'] or 'no UCX'}: pages go over TCP",
        "set KVXFER_UCX_LIBRARY to the libucp.so.0 of a UCX that is built with verbs and CUDA (docs/rdma.md)",
    )


def _ucx_cuda(asked: _Asked) -> _Said:
    there = [t for t in ("cuda_copy", "cuda_ipc") if t in asked.ucx["transports"]]
    if len(there) == 2:
        return _Said("ok", "cuda_copy and cuda_ipc")
    return _Said(
        "warn" if there else "fail",
        f"only {there[0]}" if there else "none: memory of a GPU cannot be registered",
        "take a UCX that is built --with-cuda, with its folder ucx/ of modules beside it",
    )


def _cards(asked: _Asked) -> _Said:
    ports = ", ".join(str(card) if card.works else f"{card.rail} is {card.condition}" for card in asked.cards)
    if asked.usable:
        return _Said("ok", ports)
    return _Said(
        "fail",
        ports or "none",
        "see ibstat or rdma link: cable, switch, subnet manager; into a container: --device /dev/infiniband",
    )


def _near(asked: _Asked) -> _Said:
    said, worst = [], Distance.SWITCH
    for gpu, place, card in asked.pairs():
        if card.place is None:
            continue
        far = _rails.distance(place, card.place)
        worst = max(worst, far)
        said.append(f"{gpu}: {card.rail} is {far.words} it")
    if not said:
        return _Said(
            "unknown",
            "the kernel lists none of this process's GPUs with a card that works",
            "name the card yourself: Agent(rails=[...])",
        )
    if worst <= Distance.ROOT_COMPLEX:
        return _Said("ok", "; ".join(said))
    return _Said(
        "warn",
        "; ".join(said)
        + ". Between root complexes a CPU's fabric carries every byte, at a part of the speed",
        "put card and GPU below one switch or root complex, or take GPUs that have one",
    )


def _capability(space: bytes, wanted: int) -> int | None:
    """Offset of a capability of a PCI device's configuration."""
    at, seen = space[0x34] & 0xFC if len(space) > 0x40 else 0, 0
    while 0x40 <= at < min(len(space), 256) - 10 and seen < 48:
        if space[at] == wanted:
            return at
        at, seen = space[at + 1] & 0xFC, seen + 1
    return None


def _extended(space: bytes, wanted: int) -> int | None:
    """The same of one that lies behind the first 256 bytes."""
    at, seen = 0x100, 0
    while 0x100 <= at <= len(space) - 8 and seen < 960:
        (header,) = struct.unpack_from("<I", space, at)
        if header & 0xFFFF == wanted:
            return at
        at, seen = (header >> 20) & 0xFFC, seen + 1
    return None


def _acs(asked: _Asked) -> _Said:
    bridges: dict[str, None] = {}
    pairs = list(asked.pairs())
    if not pairs:
        return _NO_PAIR
    if asked.is_guest():
        return _Said("unknown", "the host of this virtual machine has the switches", _ASK_HOST)
    for _, place, card in pairs:
        if card.place is not None:
            bridges |= dict.fromkeys(_rails.bridges_between(place, card.place))
    if not bridges:
        return _Said("not applicable", "no GPU shares a PCI switch with its card")
    on, hidden = [], []
    for bridge in bridges:
        space = _bytes(asked.root / "sys/bus/pci/devices" / bridge / "config")
        if len(space) <= 256:
            # Only root is shown more, and ACS is behind it.
            hidden.append(bridge)
            continue
        at = _extended(space, _ACS)
        if at is not None and struct.unpack_from("<H", space, at + 6)[0] & _ACS_REDIRECTS:
            on.append(bridge)
    if on:
        return _Said(
            "fail",
            f"on at {', '.join(on)}, between GPU and card: what they say to each other goes up to the CPU "
            "and back",
            "turn it off in the firmware's set-up, or as root for each bridge: setpci -s ADDRESS "
            "ECAP_ACS+0x6.w=0000",
        )
    if hidden:
        return _Said(
            "unknown",
            f"cannot tell: the settings of {', '.join(hidden)} are shown to CAP_SYS_ADMIN of the host only",
            "run as root, outside of containers",
        )
    return _Said("ok", f"off at the {len(bridges)} bridges between GPUs and cards")


def _iommu(asked: _Asked) -> _Said:
    kinds, hidden = {}, []
    pairs = list(asked.pairs())
    if not pairs:
        return _NO_PAIR
    for place in [*(p for _, p, _ in pairs), *(c.place for _, _, c in pairs if c.place)]:
        group = asked.root / "sys/bus/pci/devices" / place.address / "iommu_group"
        try:
            kinds[place.address] = (group / "type").read_text(encoding="ascii").strip()
        except OSError:
            if group.exists():
                hidden.append(place.address)
    translated = [address for address, kind in kinds.items() if kind != "identity"]
    if hidden and not translated:
        return _Said(
            "unknown",
            f"the kernel does not say what it does for {', '.join(hidden)}",
            "see that the kernel is booted with iommu=pt",
        )
    if not kinds and asked.is_guest():
        return _Said("unknown", "the host of this virtual machine has it", _ASK_HOST)
    if not kinds:
        return _Said("ok", "none between cards and GPUs")
    if not translated:
        return _Said("ok", "passes cards and GPUs through (identity)")
    return _Said(
        "warn",
        f"translates what {', '.join(translated)} do ({', '.join(sorted(set(kinds.values())))}), which is "
        "slow or fails between devices",
        "boot with iommu=pt (in a virtual machine that is its host's to do)",
    )


def _locked(asked: _Asked) -> _Said:
    limit = asked.host["memlock_bytes"]
    if limit is None or limit >= _LOCKED_BYTES:
        return _Said("ok", "unlimited" if limit is None else size(limit))
    rights = re.search(r"^CapEff:\s*([0-9a-f]+)", _text(asked, "proc/self/status") or "", re.MULTILINE)
    if rights and int(rights[1], 16) >> _CAP_IPC_LOCK & 1:
        return _Said("ok", f"{size(limit)}, which does not bind this process (CAP_IPC_LOCK)")
    return _Said(
        "fail",
        f"{size(limit)}, and RDMA locks all that is registered",
        "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1",
    )


def _relaxed(asked: _Asked) -> _Said:
    given = asked.env.get("UCX_IB_PCI_RELAXED_ORDERING")
    if given is not None and given.lower() in _OFF:
        return _Said("ok", f"off in UCX (UCX_IB_PCI_RELAXED_ORDERING={given})")
    allowed, hidden = [], []
    for card in asked.usable:
        space = _bytes(asked.root / "sys/class/infiniband" / card.name / "device/config")
        if len(space) <= 64 and card.name not in hidden:
            hidden.append(card.name)
        at = _capability(space, _PCI_EXPRESS)
        # Bit 4 of the device's control.
        if at is not None and struct.unpack_from("<H", space, at + 8)[0] & 0x10 and card.name not in allowed:
            allowed.append(card.name)
    if hidden and not allowed:
        return _Said(
            "unknown",
            f"cannot tell: the settings of {', '.join(hidden)} are shown to CAP_SYS_ADMIN of the host only",
            "run as root, outside of containers, or rule it out: UCX_IB_PCI_RELAXED_ORDERING=n",
        )
    if not allowed:
        return _Said("ok", "the cards' PCI settings do not allow it")
    words = f"the PCI settings of {', '.join(allowed)} allow it, and UCX "
    words += f"is told {given}" if given is not None else "decides by the CPU"
    return _Said(
        "warn",
        words + ". Whether all bytes are visible when a write is flushed has not been seen on hardware",
        "UCX_IB_PCI_RELAXED_ORDERING=n rules it out, at the cost of speed on some CPUs",
    )


def _allocator(asked: _Asked) -> _Said:
    for variable in _ALLOCATOR:
        said = asked.env.get(variable, "").replace(" ", "").lower()
        for words in ("expandable_segments:true", "backend:cudamallocasync"):
            if words in said:
                return _Said(
                    "fail",
                    f"{variable} has {words}: such memory cannot be exported, and an agent refuses it",
                    "leave it out where pages are allocated (expandable_segments:False), or allocate them "
                    "with cudaMalloc",
                )
    return _Said("ok", "gives memory that can be exported, as far as the environment says")


_Checks: TypeAlias = tuple[tuple[str, Callable[[_Asked], _Said]], ...]

_OF_GPUS: _Checks = (
    ("NVIDIA's driver", _driver),
    ("CUDA in UCX", _ucx_cuda),
    ("torch's allocator", _allocator),
)
_OF_CARDS: _Checks = (
    ("RDMA cards", _cards),
    ("RDMA in UCX", _ucx_transports),
    ("locked memory", _locked),
    ("relaxed ordering", _relaxed),
)
_OF_BOTH: _Checks = (
    ("GPU memory for cards", _memory_path),
    ("GPUDirect RDMA", _gpudirect),
    ("card near the GPU", _near),
    ("ACS", _acs),
    ("IOMMU", _iommu),
)


def look(
    ucx: Found,
    host: Found,
    gpus: Found,
    *,
    root: Path = _rails.SYSTEM,
    env: Mapping[str, str] = os.environ,
) -> Found:
    """All lines, and the rail of each GPU: `{"lines": [...], "rails": [...]}`.

    What is about GPUs does not apply to a host without one, and so for cards, and for what takes both.
    """
    asked = _Asked(root, ucx, host, gpus, env, _rails.cards(root), _rails.gpus(root))
    has_gpu = bool(gpus["devices"] or asked.places)
    has_card = any(card.place is not None for card in asked.cards)
    lines: list[Found] = []
    for checks, applies, why in (
        (_OF_GPUS, has_gpu, "no NVIDIA GPU"),
        (_OF_CARDS, has_card, "no RDMA card"),
        (_OF_BOTH, has_gpu and has_card, "takes a GPU and an RDMA card"),
    ):
        for name, check in checks:
            said = check(asked) if applies else _Said("not applicable", why)
            lines.append({"name": name, **said._asdict()})
    rails = []
    for gpu in gpus["devices"]:
        chosen = _rails.choose(gpu.get("pci") or "", root)
        rails.append({"gpu": gpu["ordinal"], "names": list(chosen.names), "why": chosen.why})
    return {"lines": lines, "rails": rails}
