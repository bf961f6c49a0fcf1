"""Which network card an agent's pages go over: the one nearest to their GPU, as the kernel's sysfs has it.

What is chosen depends on the tree of devices and on which cards a process may open (in a container: those
that it was given). Processes that may open the same choose from the same, each for itself.
"""

from __future__ import annotations

import enum
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvxfer import _kvxfer
from kvxfer._memory import ucx_wheel_dir
from kvxfer.errors import BadArgument, FabricError, NotSupported

__all__ = [
    "Card",
    "Distance",
    "Rails",
    "bridges_between",
    "cards",
    "choose",
    "distance",
    "for_agent",
    "place",
]

SYSTEM = Path("/")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_NVIDIA = "0x10de"
# Display controllers: VGA and 3D. A switch of NVLink is none.
_GPU_CLASSES = ("0x0300", "0x0302")
_RDMA_WORDS = ("rc", "dc", "ud", "ib", "gga", "srd", "all", "^")


class Distance(enum.IntEnum):
    """How far two PCI devices are apart: PIX and PXB, PHB, NODE, SYS of `nvidia-smi topo -m`."""

    SWITCH = 0
    ROOT_COMPLEX = 1
    NUMA_NODE = 2
    OTHER = 3

    @property
    def words(self) -> str:
        """For people."""
        return (
            "behind the same PCI switch as",
            "at the same root complex as",
            "at the same NUMA node as",
            "far (another NUMA node) from",
        )[self]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a PCI device is: root, bridges and the device itself, from the root on."""

    path: tuple[str, ...]
    numa: int

    @property
    def address(self) -> str:
        return self.path[-1]


@dataclass(frozen=True, slots=True)
class Card:
    """A port of an RDMA card."""

    name: str
    port: int
    place: Place | None
    """None for one that is software."""
    link: str
    """`InfiniBand`, or `Ethernet` for RoCE."""
    state: str
    """`ACTIVE` is the one that works."""
    opens: bool
    """Whether this process may open it. sysfs shows a container the cards of others too."""
    gbits: float
    parent: str | None
    """PCI address of the card that this is a virtual function of, if that is to be seen."""

    @property
    def works(self) -> bool:
        """Whether UCX will take it: of a port that is not active it knows nothing, also later."""
        return self.state == "ACTIVE" and self.opens

    @property
    def condition(self) -> str:
        """For people."""
        return self.state if self.opens else f"{self.state}, but not in this process's /dev/infiniband"

    @property
    def rail(self) -> str:
        """By UCX's name."""
        return f"{self.name}:{self.port}"

    def __str__(self) -> str:
        kind = {"Ethernet": "RoCE"}.get(self.link, self.link)
        return f"{self.rail} ({kind}, {self.gbits:g} Gb/s)"


@dataclass(frozen=True, slots=True)
class Rails:
    """The network cards that an agent's UCX is held to, by UCX's names (`"mlx5_0:1"`), and why.

    Without names, UCX chooses among all that there are.
    """

    names: tuple[str, ...]
    why: str


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def place(device: Path) -> Place | None:
    """Where the PCI device of this folder of sysfs is; None if it is none."""
    real = Path(os.path.realpath(device))
    path = tuple(part for part in real.parts if _ADDRESS.fullmatch(part) or _ROOT.fullmatch(part))
    if not path or not _ADDRESS.fullmatch(real.name):
        return None
    numa = _read(real / "numa_node")
    return Place(path, int(numa) if numa is not None and re.fullmatch(r"-?\d+", numa) else -1)


def _opened_by(root: Path) -> set[str]:
    """Cards that this process may open. The kernel has a file for each that programs may use."""
    found = set()
    folder = root / "sys/class/infiniband_verbs"
    for name in _names(folder):
        card = _read(folder / name / "ibdev")
        if card and os.access(root / "dev/infiniband" / name, os.R_OK | os.W_OK):
            found.add(card)
    return found


def cards(root: Path = SYSTEM) -> list[Card]:
    """All ports of all RDMA cards."""
    found = []
    opened = _opened_by(root)
    folder = root / "sys/class/infiniband"
    for name in _names(folder):
        at = place(folder / name / "device")
        parent = place(folder / name / "device" / "physfn")
        for port in _names(folder / name / "ports"):
            files = folder / name / "ports" / port
            # "4: ACTIVE", "400 Gb/sec (4X NDR)".
            state, rate = _read(files / "state") or "", _read(files / "rate") or ""
            speed = re.match(r"[\d.]+", rate)
            found.append(
                Card(
                    name=name,
                    port=int(port) if port.isdigit() else 0,
                    place=at,
                    link=_read(files / "link_layer") or "unknown",
                    state=state.partition(":")[2].strip() or state or "unknown",
                    opens=name in opened,
                    gbits=float(speed[0]) if speed else 0.0,
                    parent=parent.address if parent else None,
                )
            )
    return found


def gpus(root: Path = SYSTEM) -> list[Place]:
    """NVIDIA's GPUs of the host, also those that this process may not use, by PCI address."""
    folder = root / "sys/bus/pci/devices"
    found = []
    for address in _names(folder):
        device = folder / address
        if _read(device / "vendor") == _NVIDIA and (_read(device / "class") or "")[:6] in _GPU_CLASSES:
            at = place(device)
            if at is not None:
                found.append(at)
    return found


def _common(a: Place, b: Place) -> int:
    """How many of the first parts of two paths are the same."""
    shorter = min(len(a.path), len(b.path))
    return next((i for i in range(shorter) if a.path[i] != b.path[i]), shorter)


def distance(a: Place, b: Place) -> Distance:
    """How far apart two devices are."""
    shared = _common(a, b)
    # The first part is the root complex, the second a port of it: what shares that port is below one switch.
    if shared >= 2:
        return Distance.SWITCH
    if shared == 1:
        return Distance.ROOT_COMPLEX
    return Distance.NUMA_NODE if a.numa == b.numa else Distance.OTHER


def bridges_between(a: Place, b: Place) -> list[str]:
    """Bridges below the switch that two devices share: where ACS would send up what they say."""
    shared = _common(a, b)
    return [*a.path[shared:-1], *b.path[shared:-1]] if shared >= 2 else []


def usable(found: Sequence[Card]) -> list[Card]:
    """Ports that work; virtual functions only where their card itself is not among them."""
    active = [card for card in found if card.works and card.place is not None]
    real = {card.place.address for card in active if card.place is not None}
    return [card for card in active if card.parent not in real]


def choose(address: str, root: Path = SYSTEM) -> Rails:
    """The card for the GPU at this PCI address: of the nearest the fastest, of these the one that has the
    fewest GPUs so far when the host's GPUs choose one after the other.
    """
    there = cards(root)
    ports = usable(there)
    if not ports:
        down = ", ".join(f"{card.rail} is {card.condition}" for card in there if card.place is not None)
        return Rails((), f"no RDMA card works here ({down})" if down else "this host has no RDMA card")
    load = dict.fromkeys((card.rail for card in ports), 0)
    for gpu in gpus(root):
        near = min(_distance(card, gpu) for card in ports)
        close = [card for card in ports if _distance(card, gpu) == near]
        fastest = max(card.gbits for card in close)
        best = [card for card in close if card.gbits == fastest]
        card = min(
            best, key=lambda card: (load[card.rail], _hops(card, gpu), card.place.path if card.place else ())
        )
        load[card.rail] += 1
        if gpu.address == address.lower():
            others = f", shared evenly among {len(best)} as near and fast" if len(best) > 1 else ""
            return Rails((card.rail,), f"{card} is {near.words} the GPU at {gpu.address}{others}")
    return Rails((), f"the kernel lists no GPU at {address}, so nothing can be said to be near it")


def _distance(card: Card, gpu: Place) -> Distance:
    return distance(card.place, gpu) if card.place is not None else Distance.OTHER


def _hops(card: Card, gpu: Place) -> int:
    """Below one switch, and only there, fewer bridges are better."""
    if card.place is None or _distance(card, gpu) != Distance.SWITCH:
        return 0
    return len(card.place.path) + len(gpu.path) - 2 * _common(card.place, gpu)


def named(rails: Sequence[str], root: Path = SYSTEM) -> Rails:
    """What the user has named: cards (`"mlx5_0"`, with all ports that work) or ports (`"mlx5_0:1"`).

    Raises:
        BadArgument: for a card or a port that there is not, with those that there are.
    """
    there = cards(root)
    known = ", ".join(f"{card.rail} ({card.condition})" for card in there) or "none"
    names: list[str] = []
    for rail in rails:
        name, colon, port = rail.partition(":")
        ports = [
            card
            for card in there
            if card.works and card.name == name and (not colon or str(card.port) == port)
        ]
        if not ports:
            raise BadArgument(f"rails: {rail!r} is no RDMA card that works here; there are: {known}")
        names += [card.rail for card in ports if card.rail not in names]
    return Rails(tuple(names), "named by rails=")


def _speaks_rdma(tls: str | None) -> bool:
    """Whether these transports, or kvxfer's own choice, have RDMA among them."""
    words = tls if tls is not None else os.environ.get("UCX_TLS")
    return words is None or any(word.strip().startswith(_RDMA_WORDS) for word in words.split(","))


@functools.cache
def _ucx() -> tuple[bool, str]:
    """Whether the UCX that will be loaded has RDMA, and which one it is."""
    found = _kvxfer._doctor_ucx(ucx_wheel_dir())
    return bool(found["rdma"]), str(found["path"])


def for_agent(
    rails: Sequence[str] | None, *, device: int | None, fabric: str, ucx_tls: str | None, root: Path = SYSTEM
) -> Rails:
    """What an agent with memory on this GPU (None: of the host) is held to. Where there is no RDMA, nothing.

    Raises:
        BadArgument, NotSupported: for `rails` that cannot be had.
    """
    if isinstance(rails, str):
        raise BadArgument(f"rails is a list of cards, as in rails=[{rails!r}]")
    if rails is not None:
        if not rails:
            return Rails((), "left to UCX by rails=[]")
        chosen = named(rails, root)
        try:
            rdma, path = _ucx()
        except FabricError as error:
            raise NotSupported(f"rails: there is no UCX to use them: {error}") from error
        if fabric == "shm" or not _speaks_rdma(ucx_tls) or not rdma:
            why = f"the UCX at {path} has no RDMA" if not rdma else "fabric or ucx_tls leave RDMA out"
            raise NotSupported(f"rails: {why}; docs/rdma.md says which UCX has it")
        return chosen
    if fabric == "shm" or device is None:
        return Rails((), "left to UCX: the pages are in the host's memory")
    if os.environ.get("UCX_NET_DEVICES") is not None:
        return Rails((), "left to UCX_NET_DEVICES, which is set")
    if not _speaks_rdma(ucx_tls):
        return Rails((), "left to UCX: ucx_tls or UCX_TLS leave RDMA out")
    if not usable(cards(root)):
        return choose("", root)
    try:
        rdma, path = _ucx()
        if not rdma:
            return Rails((), f"left to UCX: the one at {path} has no RDMA")
        return choose(_kvxfer._device_pci(device), root)
    except FabricError as error:
        # The agent's start, or nothing at all, says more about it.
        return Rails((), f"left to UCX: {error}")


def ucx_devices(rails: Rails, root: Path = SYSTEM) -> tuple[list[str], int] | None:
    """For UCX: the rails and all interfaces of the network, over which peers without RDMA are met; and how
    many rails.
    """
    if not rails.names:
        return None
    folder = root / "sys/class/net"
    interfaces = [name for name in _names(folder) if (folder / name).is_dir()]
    return [*rails.names, *interfaces], len(rails.names)
