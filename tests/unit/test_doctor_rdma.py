"""`kvxfer doctor`'s lines for GPUDirect RDMA, on hosts that are folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_host import ACS_ON, Host, config_space, dgx

from kvxfer.cli import doctor
from kvxfer.cli._doctor_rdma import look
from kvxfer.cli.doctor import _show_rdma

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 13\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\nGCC version: 13\n"
TRANSPORTS = ["cuda_copy", "cuda_ipc", "dc_mlx5", "rc_mlx5", "rc_verbs", "self", "tcp", "ud_mlx5"]
VERSION = "proc/driver/nvidia/version"


class Asks:
    """A host on which all is well, until a test says otherwise."""

    def __init__(self, host: Host) -> None:
        self.host = host
        host.write(VERSION, OPEN)
        (host.root / "sys/module/nvidia_peermem").mkdir(parents=True)
        self.ucx: dict[str, Any] = {
            "path": "/opt/ucx/lib/libucp.so.0",
            "version": "1.22.0",
            "transports": TRANSPORTS,
        }
        self.limits: dict[str, Any] = {"memlock_bytes": None}
        self.gpus: dict[str, Any] = {
            "version": (13, 0),
            "error": None,
            "devices": [
                {"ordinal": n, "pci": f"0000:1{3 + n}:00.0", "rdma": True, "dmabuf": True} for n in range(2)
            ],
        }
        self.env: dict[str, str] = {}

    def look(self) -> dict[str, Any]:
        return look(self.ucx, self.limits, self.gpus, root=self.host.root, env=self.env)

    def __getitem__(self, name: str) -> tuple[str, str]:
        (line,) = [line for line in self.look()["lines"] if line["name"] == name]
        # Whoever is told that something is wrong is told what to do.
        assert bool(line["advice"]) == (line["state"] in ("warn", "fail", "unknown"))
        return line["state"], f"{line['found']}; {line['advice']}"

    def without_peermem(self) -> None:
        (self.host.root / "sys/module/nvidia_peermem").rmdir()


@pytest.fixture
def asks(tmp_path: Path) -> Asks:
    return Asks(dgx(tmp_path))


def test_a_host_on_which_all_is_well(asks: Asks, capsys: pytest.CaptureFixture[str]) -> None:
    found = asks.look()
    assert {line["state"] for line in found["lines"]} == {"ok"}, found["lines"]
    assert [rail["names"] for rail in found["rails"]] == [["mlx5_0:1"], ["mlx5_1:1"]]
    assert asks["NVIDIA's driver"][1].startswith("580.159.04, open kernel modules, knows CUDA 13.0")
    _show_rdma(found)
    shown = capsys.readouterr().out
    for words in ("rail of GPU 1", "mlx5_1:1", "behind the same PCI switch", "nvidia_peermem is loaded"):
        assert words in shown


def test_a_host_with_neither_gpu_nor_card_lacks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ucx = {"path": None, "version": None, "transports": []}
    gpus = {"version": None, "devices": [], "error": "no CUDA driver"}
    found = look(ucx, {"memlock_bytes": 65536}, gpus, root=tmp_path, env={})
    assert {line["state"] for line in found["lines"]} == {"not applicable"}
    assert found["rails"] == []
    _show_rdma(found)
    assert "neither an NVIDIA GPU nor an RDMA card" in capsys.readouterr().out


def test_a_gpu_without_a_card(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.gpu("pci0000:10/0000:10:01.0/0000:13:00.0")
    host.card("rxe0", None)
    asks = Asks(host)
    assert asks["CUDA in UCX"][0] == "ok"
    for name in ("RDMA cards", "locked memory", "ACS", "GPU memory for cards"):
        assert asks[name][0] == "not applicable", name


def test_the_driver(asks: Asks) -> None:
    asks.gpus["error"] = "cuInit failed with CUDA_ERROR_UNKNOWN (999)"
    state, text = asks["NVIDIA's driver"]
    assert state == "fail"
    assert "CUDA_ERROR_UNKNOWN" in text
    asks.gpus["error"] = None
    asks.host.write(VERSION, CLOSED)
    assert asks["NVIDIA's driver"][1].startswith("535.104.05, closed kernel modules")
    (asks.host.root / VERSION).unlink()
    state, text = asks["NVIDIA's driver"]
    assert state == "fail"
    assert "8 NVIDIA GPUs" in text


@pytest.mark.parametrize(
    ("kernel", "version", "dmabuf", "ucx", "lacks"),
    [
        ("5.12.0-1-generic", OPEN, True, "1.14.0", None),
        ("5.11.9", OPEN, True, "1.22.0", "a kernel from 5.12 on"),
        ("6.8.0", CLOSED, False, "1.22.0", "NVIDIA's open kernel modules"),
        ("6.8.0", OPEN, False, "1.22.0", "a driver that exports"),
        ("6.8.0", OPEN, True, "1.13.1", "UCX from 1.14 on"),
        ("6.8.0", OPEN, True, None, "UCX from 1.14 on"),
    ],
)
def test_cards_reach_gpu_memory_by_peermem_or_dmabuf(
    asks: Asks, kernel: str, version: str, dmabuf: bool, ucx: str | None, lacks: str | None
) -> None:
    name = "GPU memory for cards"
    asks.host.write("proc/sys/kernel/osrelease", kernel + "\n")
    asks.host.write(VERSION, version)
    asks.ucx["version"] = ucx
    for gpu in asks.gpus["devices"]:
        gpu["dmabuf"] = dmabuf
    assert asks[name][0] == "ok", "nvidia_peermem is there"
    asks.without_peermem()
    state, text = asks[name]
    assert state == ("ok" if lacks is None else "fail")
    if lacks is not None:
        assert lacks in text
        assert "modprobe nvidia_peermem" in text


def test_gpudirect_that_is_off_or_not_to_be_had(asks: Asks) -> None:
    asks.gpus["devices"][1]["rdma"] = False
    assert asks["GPUDirect RDMA"][0] == "fail"
    assert "GPU 1 cannot" in asks["GPUDirect RDMA"][1]
    asks.gpus["devices"][1]["rdma"] = None
    assert asks["GPUDirect RDMA"][0] == "unknown"
    asks.env["UCX_IB_GPU_DIRECT_RDMA"] = "no"
    assert asks["GPUDirect RDMA"][0] == "fail"


def test_what_nobody_could_be_asked_is_not_said_to_be_well(asks: Asks) -> None:
    asks.without_peermem()
    asks.gpus.update(devices=[], error="cuInit failed with CUDA_ERROR_UNKNOWN (999)")
    for name in ("GPU memory for cards", "GPUDirect RDMA", "IOMMU", "ACS", "card near the GPU"):
        assert asks[name][0] == "unknown", name


def test_a_virtual_machine_does_not_see_what_its_host_has(asks: Asks) -> None:
    asks.host.write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu sse2 hypervisor lm\n")
    for name in ("IOMMU", "ACS"):
        assert asks[name][0] == "unknown"
        assert "virtual machine" in asks[name][1]


def test_what_ucx_was_built_with(asks: Asks) -> None:
    asks.ucx["transports"] = ["cuda_copy", "self", "tcp", "ud_verbs"]
    state, text = asks["RDMA in UCX"]
    assert state == "fail"
    assert "KVXFER_UCX_LIBRARY" in text
    assert "only ud_verbs" in text
    assert asks["CUDA in UCX"][0] == "warn"
    asks.ucx.update(path=None, transports=[])
    assert asks["CUDA in UCX"][0] == "fail"
    assert "no UCX" in asks["RDMA in UCX"][1]


def test_cards_that_are_down(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.gpu("pci0000:10/0000:10:01.0/0000:13:00.0")
    host.card("mlx5_0", "pci0000:10/0000:10:02.0/0000:14:00.0", states=("1: DOWN",))
    asks = Asks(host)
    state, text = asks["RDMA cards"]
    assert state == "fail"
    assert "mlx5_0:1 is DOWN" in text
    for name in ("card near the GPU", "IOMMU", "ACS"):
        assert asks[name][0] == "unknown"
    assert asks.look()["rails"][0]["names"] == []


def test_a_card_that_is_far(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.gpu("pci0000:10/0000:10:01.0/0000:13:00.0", numa=0)
    host.card("mlx5_0", "pci0000:80/0000:80:01.0/0000:81:00.0", numa=1)
    asks = Asks(host)
    state, text = asks["card near the GPU"]
    assert state == "warn"
    assert "mlx5_0:1 is far (another NUMA node) from it" in text
    assert asks["ACS"][0] == "not applicable"


def test_acs(asks: Asks) -> None:
    bridge = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:02.0"
    assert asks["ACS"][0] == "ok"
    asks.host.write(f"sys/devices/{bridge}/config", config_space(acs=ACS_ON))
    state, text = asks["ACS"]
    assert state == "fail"
    assert "on at 0000:12:02.0" in text
    # What others than root are shown.
    asks.host.write(f"sys/devices/{bridge}/config", config_space(acs=ACS_ON)[:64])
    state, text = asks["ACS"]
    assert state == "unknown"
    assert "cannot tell" in text
    # A bridge without ACS redirects nothing; nor does a configuration that makes no sense hang anybody.
    asks.host.write(f"sys/devices/{bridge}/config", config_space())
    assert asks["ACS"][0] == "ok"
    for odd in (b"\xff" * 4096, b"\x00" * 4096, (b"\x01\x00\x01\x10" * 1024)):
        asks.host.write(f"sys/devices/{bridge}/config", odd)
        assert asks["ACS"][0] == "ok"


def test_the_iommu(asks: Asks) -> None:
    asks.host.iommu_group("0000:13:00.0", 7, "identity")
    assert asks["IOMMU"] == ("ok", "passes cards and GPUs through (identity); ")
    asks.host.iommu_group("0000:15:00.0", 8, "DMA-FQ")
    state, text = asks["IOMMU"]
    assert state == "warn"
    assert "0000:15:00.0" in text
    assert "iommu=pt" in text


def test_an_iommu_of_which_the_kernel_says_nothing(asks: Asks) -> None:
    asks.host.iommu_group("0000:13:00.0", 7, "identity")
    (asks.host.root / "sys/kernel/iommu_groups/7/type").unlink()
    assert asks["IOMMU"][0] == "unknown"


def test_locked_memory(asks: Asks) -> None:
    asks.limits["memlock_bytes"] = 8 << 20
    assert asks["locked memory"][0] == "fail"
    # Root's, and that of a process with nothing but CAP_IPC_LOCK; and one that lacks just this.
    for rights, state in (
        ("000001ffffffffff", "ok"),
        ("0000000000004000", "ok"),
        ("000001ffffffbfff", "fail"),
    ):
        asks.host.write("proc/self/status", f"Name:\tpython\nCapEff:\t{rights}\n")
        assert asks["locked memory"][0] == state
    asks.limits["memlock_bytes"] = 1 << 40
    assert asks["locked memory"][0] == "ok"


def test_relaxed_ordering(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.gpu("pci0000:10/0000:10:01.0/0000:13:00.0")
    host.card("mlx5_0", "pci0000:10/0000:10:02.0/0000:14:00.0", relaxed=True)
    asks = Asks(host)
    state, text = asks["relaxed ordering"]
    assert state == "warn"
    assert "settings of mlx5_0 allow it, and UCX decides by the CPU" in text
    asks.env["UCX_IB_PCI_RELAXED_ORDERING"] = "y"
    assert "is told y" in asks["relaxed ordering"][1]
    del asks.env["UCX_IB_PCI_RELAXED_ORDERING"]
    # What others than root are shown.
    device = "sys/devices/pci0000:10/0000:10:02.0/0000:14:00.0"
    asks.host.write(f"{device}/config", config_space(relaxed=True)[:64])
    assert asks["relaxed ordering"][0] == "unknown"
    asks.env["UCX_IB_PCI_RELAXED_ORDERING"] = "n"
    assert asks["relaxed ordering"][0] == "ok"


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_torchs_allocator(asks: Asks, variable: str) -> None:
    for value, state in (
        ("expandable_segments:True", "fail"),
        ("max_split_size_mb:64, expandable_segments: true", "fail"),
        ("backend:cudaMallocAsync", "fail"),
        ("expandable_segments:False", "ok"),
    ):
        asks.env[variable] = value
        assert asks["torch's allocator"][0] == state, value


def test_what_is_wrong_is_among_the_problems_once(asks: Asks, monkeypatch: pytest.MonkeyPatch) -> None:
    asks.env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    asks.ucx["transports"] = ["cuda_copy", "cuda_ipc", "tcp"]
    asks.limits["memlock_bytes"] = 65536
    found = asks.look()
    monkeypatch.setattr(doctor.rdma, "look", lambda *_: found)
    problems: list[str] = []
    assert doctor._look_at_rdma(asks.ucx, asks.limits, asks.gpus, problems) is found
    # The looks at UCX and at the host have said the other two.
    (problem,) = problems
    assert problem.startswith("torch's allocator: PYTORCH_CUDA_ALLOC_CONF has expandable_segments:true")
    assert "leave it out" in problem
