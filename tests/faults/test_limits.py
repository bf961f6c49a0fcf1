"""What the system refuses: descriptors, memory, registrations. Each is a typed error, and nothing is half
alive.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time

import pytest
from scene import ENDINGS, SUCCESS, endings, hand_off, scene
from script import run, script
from two import eventually
from ways import SHM, SMALL, TCP, Remote, Way, each_way, params, tokens

import kvxfer as kx

EVEN = [0, 2, 4, 6, 8]


def test_an_agent_that_may_open_no_more_files_does_not_start(way: Way) -> None:
    """With every number of free descriptors from none up, until it starts: a typed error, no thread, no
    file, no port.
    """
    out = run(
        way,
        """
        a, b = pool(), pool()
        with agent(a, "first") as one, agent(b, "second") as two:
            whole(one, two)
        gc.collect()
        before, refused = footprint(), []
        for free in range(200):
            # The lowest number that is not in use, and so many more.
            probe = os.dup(0)
            os.close(probe)
            used = len(os.listdir("/proc/self/fd")) - 1
            set_limit("NOFILE", max(used, probe) + free)
            try:
                started = agent(a)
            except (kx.FabricError, kx.ListenError, kx.InternalError, kx.KvxferError) as error:
                refused.append(type(error).__name__)
                set_limit("NOFILE", 1024)
                gc.collect()
                assert footprint() == before, (free, error, before, footprint())
                continue
            set_limit("NOFILE", 1024)
            with started, agent(b, "second") as two:
                whole(started, two)
            break
        else:
            raise SystemExit("it never starts")
        print(len(refused), sorted(set(refused)))
        """,
    )
    count, names = out.split(" ", 1)
    assert int(count) > 0, out
    assert "KvxferError" not in names


def test_connections_that_come_when_no_descriptor_is_left(way: Way, other: Remote) -> None:
    """The newcomer's room fails or waits, and goes in when there is room again; the others go on."""
    with scene(way, other) as it, contextlib.ExitStack() as stack:
        with Remote(way, SMALL, it.here.pages, name="full", seed=4) as full:
            hand_off(full, it.here, EVEN, it.field[:5])
            full.order(limit={"NOFILE": sum(full.footprint()["files"].values())})
            late = stack.enter_context(Remote(way, SMALL, it.here.pages, name="late", seed=5))
            room = kx.new_room()
            late.expect(room, [1, 3, 5, 7, 9], tokens=80, source=full.address, bootstrap_timeout=1.5)
            # Rooms with those it knows are as good as ever.
            for n in range(3):
                hand_off(full, it.here, EVEN, it.field[n : n + 5])
            events = late.end(room)
            assert endings(events) in ENDINGS[1:], late.last
            assert events[0]["error"] in ("TransferTimeout", "PeerLost", "FabricError"), late.last
            late.rest()
            full.order(limit={"NOFILE": 1024})
            deadline = time.monotonic() + 15
            while True:
                room = kx.new_room()
                late.expect(room, [1, 3, 5, 7, 9], tokens=80, source=full.address, bootstrap_timeout=2)
                full.push(room, EVEN, tokens=80, bootstrap_timeout=2)
                if endings(late.end(room)) == SUCCESS:
                    break
                assert time.monotonic() < deadline, late.last
            assert endings(full.end(room)) == SUCCESS
            late.received(full.seed, EVEN, [1, 3, 5, 7, 9])
            late.rest()
            full.rest()


@pytest.mark.parametrize("way", params(SHM, TCP), indirect=True)
def test_a_dialler_that_may_open_no_more_files(way: Way, other: Remote) -> None:
    """Here the survivor itself: its room with a stranger ends by its timeout, and its other rooms know
    nothing of it. (Not over UCX's shared memory: to see whether a peer lives it opens a file each second,
    and takes one that it cannot
    open for dead.)
    """
    with scene(way, other) as it:
        with Remote(way, SMALL, it.here.pages, name="stranger", seed=4) as stranger:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            hogs: list[int] = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        hogs.append(os.dup(2))
                room = it.room()
                it.here.expect(
                    room, it.field, tokens=tokens(it.field), source=stranger.address, bootstrap_timeout=0.7
                )
                (event,) = it.here.end(room)
                it.give_up(room)
            finally:
                for fd in hogs:
                    os.close(fd)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert (event["state"], event["released"]) == ("Failed", True)
            assert event["error"] in ("TransferTimeout", "PeerLost", "FabricError", "InternalError"), event
            it.here.rest()
            hand_off(stranger, it.here, EVEN, it.field[:5])


def test_memory_that_cannot_be_had(way: Way) -> None:
    """RLIMIT_FSIZE bounds memfds and shared memory files, RLIMIT_AS all of it: FabricError, and later
    memory is as good as ever.
    """
    out = run(
        way,
        """
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        def check():
            a, b = pool(), pool()
            with agent(a, "first") as one, agent(b, "second") as two:
                whole(one, two)
        check()
        gc.collect()
        before, said = footprint(), []
        limits = [("AS", 1 << 29)] + ([("FSIZE", 1 << 20)] if FABRIC == "shm" or "posix" in TLS else [])
        for name, soft in limits:
            if name == "AS":
                # What is mapped now, and half a gigabyte more than that.
                with open("/proc/self/statm") as file:
                    soft += int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
            set_limit(name, soft)
            try:
                pool(400_000 if name == "AS" else 4096)
            except kx.FabricError as error:
                said.append(f"{name}: FabricError")
            except kx.KvxferError as error:
                said.append(f"{name}: {type(error).__name__} {error}")
            else:
                said.append(f"{name}: none")
            set_limit(name, resource.RLIM_INFINITY)
            gc.collect()
            assert footprint() == before, (name, before, footprint())
            check()
        print("; ".join(said))
        """,
    )
    wanted = ["AS: FabricError"]
    if way.fabric == "shm":
        wanted.append("FSIZE: FabricError")
    said = out.split("; ")
    assert said[: len(wanted)] == wanted
    # UCX may find other memory for what is no file: then there is nothing to refuse.
    assert set(said[len(wanted) :]) <= {"FSIZE: FabricError", "FSIZE: none"}


def test_memory_that_cannot_be_locked(way: Way) -> None:
    """No transport here locks memory (RDMA does): a limit of nothing changes nothing."""
    out = run(
        way,
        """
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        a, b = pool(), pool()
        with agent(a, "first") as one, agent(b, "second") as two:
            whole(one, two)
        print("good")
        """,
    )
    assert out == "good"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
@each_way("size", ["8m"], posix=["64k", "8m"])
def test_a_full_dev_shm(way: Way, size: str) -> None:
    """UCX's shared memory lies there, kvxfer's does not. A pool or agent that cannot have it is a typed
    error, never a signal; what was there before goes on.
    """
    mount = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$0" "$@"'
    out = run(
        way,
        """
        said = []
        try:
            a, b = pool(), pool()
            with agent(a, "first") as one, agent(b, "second") as two:
                whole(one, two)
                said.append("good")
                # 64 MB of pool do not fit into 8 MB of /dev/shm.
                big = pool(8192)
                for tensor in big.tensors.values():
                    np.asarray(tensor).view(np.uint16)[:] = 1
                said.append("big")
                with agent(big, "third") as three:
                    whole(three, two)
                said.append("big works")
        except kx.FabricError as error:
            said.append("FabricError")
        print(said)
        """,
        prefix=("unshare", "--mount", "sh", "-c", mount),
    )
    assert out in ("['FabricError']", "['good', 'FabricError']", "['good', 'big', 'big works']"), out
    if way.fabric == "shm":
        assert out == "['good', 'big', 'big works']"


@pytest.mark.parametrize("way", params(SHM), indirect=True)
def test_a_sender_whose_memory_is_gone_fails_the_room_alone(way: Way, other: Remote) -> None:
    """Over shm engine memory is read across processes: what its owner has unmapped is a FabricError of that
    room.
    """
    with scene(way, other) as it:
        code = f"""
        import mmap, ctypes
        layout = kx.PageLayout(**{SMALL!r})
        size = layout.page_bytes(kx.Shard()) * {it.here.pages}
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        base = libc.mmap(None, 8 * size, 3, 0x22, -1, 0)
        at = [base + n * size for n in range(8)]
        regions = {{n: ((at[2 * n], size), (at[2 * n + 1], size)) for n in range(4)}}
        a = kx.Agent("hollow", layout, kx.Shard(), memory=regions, fabric="shm")
        print(a.address, flush=True)
        room = int(sys.stdin.readline())
        libc.munmap(base, 8 * size)
        a.push(room, range(20), tokens=320)
        try:
            a.wait(room, timeout=20)
        except kx.KvxferError as error:
            print(type(error).__name__, flush=True)
        sys.stdin.readline()
        a.close()
        """
        child = subprocess.Popen(
            [sys.executable, "-c", script(way, code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin
        assert child.stdout
        try:
            address = child.stdout.readline().strip()
            room = it.room()
            it.here.expect(room, it.field, tokens=tokens(it.field), source=address)
            eventually(lambda: it.here.state(room) == "Waiting", "the grant is out")
            child.stdin.write(f"{room}\n")
            child.stdin.flush()
            events = it.is_over(room, it.field)
            assert (events[0]["state"], events[0]["error"]) == ("Failed", "FabricError"), it.here.last
            assert child.stdout.readline().strip() in ("FabricError", "PeerLost")
        finally:
            child.stdin.close()
            child.wait(20)
            child.stdout.close()
        assert child.returncode == 0
        it.here.rest()
