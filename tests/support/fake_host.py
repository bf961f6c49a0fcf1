"""A host's /sys and /proc in a folder, with the GPUs, RDMA cards and PCI bridges that a test wants."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

# What lspci calls SrcValid+ alone, and what a kernel with an IOMMU makes of it.
ACS_OFF, ACS_ON = 0x0001, 0x001D
_PCI_EXPRESS, _ACS = 0x10, 0x000D


def config_space(*, acs: int | None = None, relaxed: bool = False) -> bytes:
    """A PCI device's configuration: a PCI Express capability, and ACS with these controls if any."""
    space = bytearray(4096)
    space[0x06] = 0x10  # There is a list of capabilities,
    space[0x34] = 0x60  # and it begins here.
    space[0x60], space[0x61] = _PCI_EXPRESS, 0
    struct.pack_into("<H", space, 0x60 + 8, 0x0010 if relaxed else 0)
    # Extended: advanced error reporting, and then ACS.
    struct.pack_into("<I", space, 0x100, 0x0001 | (1 << 16) | ((0x140 if acs is not None else 0) << 20))
    if acs is not None:
        struct.pack_into("<IHH", space, 0x140, _ACS | (1 << 16), 0x001F, acs)
    return bytes(space)


class Host:
    """Devices are named by their path below `pci0000:00`, as the kernel names folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/version", "Linux version 6.8.0-45-generic (buildd@lcy02)\n")
        self.write("proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
        self.write("proc/cmdline", "BOOT_IMAGE=/vmlinuz ro quiet\n")
        for name in ("lo", "eth0"):
            (root / "sys/class/net" / name).mkdir(parents=True)
        self.write("sys/class/net/bonding_masters", "\n")
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        (root / "sys/class/infiniband_verbs").mkdir(parents=True)

    def write(self, path: str, text: str | bytes) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)

    def _device(self, path: str, vendor: str, kind: str, numa: int = 0, config: bytes | None = None) -> Path:
        at = f"sys/devices/{path}"
        for file, text in (("vendor", vendor), ("class", kind), ("numa_node", str(numa))):
            self.write(f"{at}/{file}", text + "\n")
        self.write(f"{at}/config", config_space() if config is None else config)
        link = self.root / "sys/bus/pci/devices" / Path(path).name
        link.symlink_to(Path("../../../..") / at)
        return self.root / at

    def gpu(self, path: str, numa: int = 0) -> None:
        self._device(path, "0x10de", "0x030200", numa)

    def bridge(self, path: str, acs: int | None = ACS_OFF, config: bytes | None = None) -> None:
        self._device(path, "0x1000", "0x060400", config=config_space(acs=acs) if config is None else config)

    def card(
        self,
        name: str,
        path: str | None,
        *,
        numa: int = 0,
        link: str = "InfiniBand",
        states: Sequence[str] = ("4: ACTIVE",),
        rate: str = "400 Gb/sec (4X NDR)",
        of: str | None = None,
        relaxed: bool = False,
        opens: bool = True,
    ) -> None:
        """`of`: the path of the card that it is a virtual function of. No path: one in software. `opens`:
        whether this process, or its container, was given it.
        """
        folder = f"sys/class/infiniband/{name}"
        verbs = f"uverbs{len(os.listdir(self.root / 'sys/class/infiniband_verbs'))}"
        self.write(f"sys/class/infiniband_verbs/{verbs}/ibdev", name + "\n")
        if opens:
            self.write(f"dev/infiniband/{verbs}", b"")
        for port, state in enumerate(states, 1):
            for file, text in (("state", state), ("link_layer", link), ("rate", rate)):
                self.write(f"{folder}/ports/{port}/{file}", text + "\n")
        if path is None:
            return
        device = self._device(path, "0x15b3", "0x020700", numa, config_space(relaxed=relaxed))
        (self.root / folder / "device").symlink_to(os.path.relpath(device, self.root / folder))
        if of is not None:
            (device / "physfn").symlink_to(os.path.relpath(self.root / "sys/devices" / of, device))

    def iommu_group(self, address: str, number: int, kind: str) -> None:
        self.write(f"sys/kernel/iommu_groups/{number}/type", kind + "\n")
        device = Path(os.path.realpath(self.root / "sys/bus/pci/devices" / address))
        group = self.root / "sys/kernel/iommu_groups" / str(number)
        (device / "iommu_group").symlink_to(os.path.relpath(group, device))


def dgx(root: Path) -> Host:
    """Eight GPUs and eight cards, two and two behind each of four switches, two switches a socket; and a slow
    card for storage at each root of the first socket's.
    """
    host = Host(root)
    for switch in range(4):
        bus, numa = f"{switch + 1:x}", switch // 2
        top = f"pci0000:{bus}0/0000:{bus}0:01.0"
        host.bridge(top)
        host.bridge(f"{top}/0000:{bus}1:00.0")
        for n in range(4):
            down = f"{top}/0000:{bus}1:00.0/0000:{bus}2:0{n}.0"
            host.bridge(down)
            device = f"{down}/0000:{bus}{3 + n}:00.0"
            if n < 2:
                host.gpu(device, numa)
            else:
                host.card(f"mlx5_{2 * switch + n - 2}", device, numa=numa)
    host.card("mlx5_8", "pci0000:10/0000:10:02.0/0000:18:00.0", rate="100 Gb/sec (4X EDR)")
    host.card("mlx5_9", "pci0000:20/0000:20:02.0/0000:28:00.0", rate="100 Gb/sec (4X EDR)")
    return host
