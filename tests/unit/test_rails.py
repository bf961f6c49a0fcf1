"""Which network card an agent goes over, in trees of devices that hosts have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_host import Host, dgx

import kvxfer as kx
from kvxfer import _agent, _rails
from kvxfer._memory import ucx_wheel_dir
from kvxfer._rails import Distance, Rails, cards, choose, distance, for_agent, gpus, named, ucx_devices

ACTIVE, DOWN = "4: ACTIVE", "1: DOWN"


def chosen(host: Host) -> dict[str, tuple[str, ...]]:
    return {gpu.address: choose(gpu.address, host.root).names for gpu in gpus(host.root)}


def test_eight_gpus_and_eight_cards_go_together_behind_their_switches(tmp_path: Path) -> None:
    host = dgx(tmp_path)
    found = chosen(host)
    assert found == {
        f"0000:{switch + 1}{3 + n}:00.0": (f"mlx5_{2 * switch + n}:1",)
        for switch in range(4)
        for n in range(2)
    }
    why = choose("0000:13:00.0", host.root).why
    assert "behind the same PCI switch as the GPU at 0000:13:00.0" in why
    assert "mlx5_0:1 (InfiniBand, 400 Gb/s)" in why
    # The driver's letters may be capitals.
    assert choose("0000:1A:00.0", host.root) == Rails(
        (), "the kernel lists no GPU at 0000:1A:00.0, so nothing can be said to be near it"
    )


def test_all_gpus_share_the_one_card(tmp_path: Path) -> None:
    host = Host(tmp_path)
    for n in range(4):
        host.gpu(f"pci0000:{n}0/0000:{n}0:01.0/0000:{n}1:00.0", numa=n // 2)
    host.card("mlx5_0", "pci0000:30/0000:30:02.0/0000:32:00.0", numa=1)
    assert set(chosen(host).values()) == {("mlx5_0:1",)}
    places = {
        gpu.address: distance(gpu, card.place)
        for gpu in gpus(host.root)
        for card in cards(host.root)
        if card.place
    }
    assert places == {
        "0000:01:00.0": Distance.OTHER,
        "0000:11:00.0": Distance.OTHER,
        "0000:21:00.0": Distance.NUMA_NODE,
        "0000:31:00.0": Distance.ROOT_COMPLEX,
    }


def test_ties_are_spread_evenly(tmp_path: Path) -> None:
    """As in a virtual machine, where everything is on one bus."""
    host = Host(tmp_path)
    for n in range(4):
        host.gpu(f"pci0000:00/0000:00:0{n}.0", numa=-1)
    for n in range(2):
        host.card(f"mlx5_{n}", f"pci0000:00/0000:00:1{n}.0", numa=-1)
    assert list(chosen(host).values()) == [("mlx5_0:1",), ("mlx5_1:1",)] * 2
    assert "shared evenly among 2" in choose("0000:00:00.0", tmp_path).why


def test_of_the_nearest_cards_the_fastest(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.gpu("pci0000:00/0000:00:01.0/0000:01:00.0")
    host.card("bnxt_re0", "pci0000:00/0000:00:02.0/0000:02:00.0", link="Ethernet", rate="25 Gb/sec (1X EDR)")
    host.card("mlx5_0", "pci0000:00/0000:00:03.0/0000:03:00.0", link="Ethernet", rate="200 Gb/sec (4X HDR)")
    rails = choose("0000:01:00.0", host.root)
    assert rails.names == ("mlx5_0:1",)
    assert "mlx5_0:1 (RoCE, 200 Gb/s) is at the same root complex" in rails.why


def test_below_one_switch_fewer_bridges_are_nearer(tmp_path: Path) -> None:
    host = Host(tmp_path)
    top = "pci0000:00/0000:00:01.0/0000:01:00.0"
    host.gpu(f"{top}/0000:02:00.0/0000:03:00.0")
    host.card("mlx5_0", f"{top}/0000:02:01.0/0000:04:00.0/0000:05:00.0/0000:06:00.0")
    host.card("mlx5_1", f"{top}/0000:02:02.0/0000:07:00.0")
    assert chosen(host) == {"0000:03:00.0": ("mlx5_1:1",)}


def test_a_port_that_is_down_is_not_taken(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.gpu("pci0000:00/0000:00:01.0/0000:01:00.0")
    host.card("mlx5_0", "pci0000:00/0000:00:02.0/0000:02:00.0", states=(DOWN, ACTIVE))
    assert chosen(host) == {"0000:01:00.0": ("mlx5_0:2",)}
    down = Host(tmp_path / "down")
    down.gpu("pci0000:00/0000:00:01.0/0000:01:00.0")
    down.card("mlx5_0", "pci0000:00/0000:00:02.0/0000:02:00.0", states=("2: INIT",))
    assert choose("0000:01:00.0", down.root) == Rails((), "no RDMA card works here (mlx5_0:1 is INIT)")


def test_a_virtual_function_counts_where_its_card_is_not_to_be_had(tmp_path: Path) -> None:
    physical, virtual = "pci0000:00/0000:00:02.0/0000:02:00.0", "pci0000:00/0000:00:02.0/0000:02:00.3"
    host = Host(tmp_path)
    for n in (1, 4):
        host.gpu(f"pci0000:00/0000:00:0{n}.0/0000:0{n}:00.0")
    host.card("mlx5_0", physical)
    host.card("mlx5_3", virtual, of=physical)
    # One wire: it is not shared out twice.
    assert set(chosen(host).values()) == {("mlx5_0:1",)}
    alone = Host(tmp_path / "alone")
    alone.gpu("pci0000:00/0000:00:01.0/0000:01:00.0")
    alone.card("mlx5_0", physical, states=(DOWN,))
    alone.card("mlx5_3", virtual, of=physical)
    assert chosen(alone) == {"0000:01:00.0": ("mlx5_3:1",)}


def test_a_container_takes_the_card_that_it_was_given_and_not_the_nearest(tmp_path: Path) -> None:
    """In sysfs it sees all of the host's. Held to one that it may not open, UCX would be left with TCP."""
    gpu = "pci0000:00/0000:00:01.0/0000:01:00.0"
    near, far = "pci0000:00/0000:00:02.0/0000:02:00.0", "pci0000:80/0000:80:02.0/0000:82:00.0"
    host = Host(tmp_path)
    host.gpu(gpu)
    host.card("mlx5_0", near, opens=False)
    host.card("mlx5_1", far, numa=1)
    assert chosen(host) == {"0000:01:00.0": ("mlx5_1:1",)}
    with pytest.raises(kx.BadArgument, match=r"mlx5_0:1 .ACTIVE, but not in this process's /dev/infiniband"):
        named(["mlx5_0"], host.root)
    # Its own virtual function of a card that it may not open itself.
    virtual = Host(tmp_path / "virtual")
    virtual.gpu(gpu)
    virtual.card("mlx5_0", near, opens=False)
    virtual.card("mlx5_3", near[:-1] + "3", of=near)
    assert chosen(virtual) == {"0000:01:00.0": ("mlx5_3:1",)}
    none = Host(tmp_path / "none")
    none.gpu(gpu)
    none.card("mlx5_0", near, opens=False)
    found = choose("0000:01:00.0", none.root)
    assert found.names == ()
    assert "not in this process's /dev/infiniband" in found.why


def test_hosts_without_rdma_are_left_alone(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.gpu("pci0000:00/0000:00:01.0/0000:01:00.0")
    none = choose("0000:01:00.0", host.root)
    assert none == Rails((), "this host has no RDMA card")
    assert ucx_devices(none, host.root) is None
    # Software is no card, and says nothing of where it is.
    host.card("rxe0", None, link="Ethernet")
    assert choose("0000:01:00.0", host.root).names == ()
    assert choose("0000:01:00.0", tmp_path / "empty").names == ()


def test_rails_that_are_named(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.card("mlx5_0", "pci0000:00/0000:00:02.0/0000:02:00.0", states=(ACTIVE, DOWN))
    host.card("mlx5_1", "pci0000:00/0000:00:03.0/0000:03:00.0", states=(ACTIVE, ACTIVE))
    assert named(["mlx5_1", "mlx5_0", "mlx5_1:2"], host.root).names == ("mlx5_1:1", "mlx5_1:2", "mlx5_0:1")
    # UCX takes no port that is down, also not when it comes up: pages would go over TCP without a word.
    for wrong in ("mlx5_0:2", "mlx5_7", "mlx5_0:3", "", "mlx5_0:"):
        with pytest.raises(
            kx.BadArgument, match=r"there are: mlx5_0:1 \(ACTIVE\), mlx5_0:2 \(DOWN\), mlx5_1:1"
        ):
            named([wrong], host.root)
    # Peers without RDMA are still met over the network.
    assert ucx_devices(Rails(("mlx5_0:1", "mlx5_1:1"), ""), host.root) == (
        ["mlx5_0:1", "mlx5_1:1", "eth0", "lo"],
        2,
    )


class Ask:
    """`for_agent` on a host, with a UCX and a driver that say what they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, *, rdma: bool = True) -> None:
        self.root = root
        for name in [name for name in os.environ if name.startswith("UCX_")]:
            monkeypatch.delenv(name)
        monkeypatch.setattr(_rails, "_ucx", lambda: (rdma, "/lib/libucp.so.0"))
        monkeypatch.setattr(
            _rails._kvxfer, "_device_pci", lambda device: f"0000:1{3 + device}:00.0", raising=False
        )

    def __call__(
        self,
        rails: list[str] | None = None,
        *,
        device: int | None = 1,
        fabric: str = "auto",
        ucx_tls: str | None = None,
    ) -> Rails:
        return for_agent(rails, device=device, fabric=fabric, ucx_tls=ucx_tls, root=self.root)


def test_an_agent_takes_its_gpus_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Ask(monkeypatch, dgx(tmp_path).root)
    assert ask().names == ("mlx5_1:1",)
    assert ask(ucx_tls="rc_mlx5,cuda").names == ("mlx5_1:1",)
    assert ask(["mlx5_6"], device=None).names == ("mlx5_6:1",)
    left = [
        ({"fabric": "shm"}, "the host's memory"),
        ({"device": None}, "the host's memory"),
        ({"ucx_tls": "tcp,self,cuda_copy"}, "leave RDMA out"),
        ({"rails": []}, "rails=[]"),
    ]
    for arguments, why in left:
        found = ask(**arguments)  # type: ignore[arg-type]
        assert found.names == ()
        assert why in found.why
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_7:1")
    assert ask() == Rails((), "left to UCX_NET_DEVICES, which is set")
    # What is asked for goes over what the environment says.
    assert ask(["mlx5_6"]).names == ("mlx5_6:1",)


def test_rails_that_cannot_be_had_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Ask(monkeypatch, dgx(tmp_path).root, rdma=False)
    assert ask() == Rails((), "left to UCX: the one at /lib/libucp.so.0 has no RDMA")
    with pytest.raises(kx.NotSupported, match=r"the UCX at /lib/libucp\.so\.0 has no RDMA"):
        ask(["mlx5_0"])
    with pytest.raises(kx.BadArgument, match="rails is a list"):
        ask("mlx5_0")  # type: ignore[arg-type]
    ask = Ask(monkeypatch, tmp_path)
    with pytest.raises(kx.NotSupported, match="leave RDMA out"):
        ask(["mlx5_0"], ucx_tls="tcp,self")


def test_an_agent_says_what_it_was_given() -> None:
    layout = kx.PageLayout(layers=1, kv_heads=2, head_dim=16, page_tokens=4, dtype="float16")
    pool = kx.alloc(layout, kx.Shard(), pages=2, fabric="shm")
    with kx.Agent("p", layout, kx.Shard(), memory=pool, fabric="shm") as agent:
        assert agent.rails == kx.Rails((), "left to UCX: the pages are in the host's memory")
    with pytest.raises(kx.BadArgument, match="no RDMA card that works here"):
        kx.Agent("p", layout, kx.Shard(), memory=pool, fabric="shm", rails=["nonexistent0"])


@pytest.mark.ucx
def test_ucx_is_held_to_its_rails_and_still_meets_peers_without_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    if ucx_wheel_dir() is None:
        pytest.skip("the libucx wheel is not installed")
    layout = kx.PageLayout(layers=1, kv_heads=2, head_dim=16, page_tokens=4, dtype="float16")

    def agent(name: str, devices: tuple[list[str], int] | None) -> kx.Agent:
        monkeypatch.setattr(_agent, "ucx_devices", lambda rails: devices)
        pool = kx.alloc(layout, kx.Shard(), pages=4, fabric="shm")
        pool.k(0)[:] = len(name)
        return kx.Agent(name, layout, kx.Shard(), memory=pool, fabric="ucx", ucx_tls="tcp")

    interfaces = sorted(os.listdir("/sys/class/net"))
    # A card that UCX does not know is passed over without a word; the network remains.
    with agent("prefill", (["mlx5_9:1", *interfaces], 1)) as prefill, agent("decode", None) as decode:
        room = kx.new_room()
        decode.expect(room, [1], tokens=4, source=prefill.address)
        prefill.push(room, [2], tokens=4)
        assert decode.wait(room, timeout=30).state == "Success"
        prefill.wait(room, timeout=30)
    with pytest.raises(kx.FabricError):
        agent("nowhere", (["mlx5_9:1"], 1))
