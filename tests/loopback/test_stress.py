"""`kvxfer stress`: figures over real processes, that it notices a broken rule, and how it looks at bytes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import kvxfer as kx
from kvxfer import _kvxfer
from kvxfer.cli import _FLAWS, _stress_run, main, stress
from kvxfer.cli._stress_plan import ENGINES, LAYOUT, PAGE_TOKENS, Plan, Room, make_plan, ranks_of
from kvxfer.cli._stress_words import Found, Memory
from kvxfer.cli._text import Counter

pytestmark = pytest.mark.timeout(180)

KEYS = {
    "rooms",
    "succeeded",
    "failed",
    "cancelled",
    "unended",
    "corrupt_bytes",
    "leaked_pages",
    "late_writes",
    "cancelled_mid_write",
    "kills_mid_write",
    "drain_ms_p50",
    "drain_ms_p99",
    "fabric",
    "seed",
    "seconds",
    "flaw",
}
UCX = pytest.param("ucx", id="ucx", marks=pytest.mark.ucx)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "stress", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def needs(fabric: str) -> None:
    try:
        kx.alloc(LAYOUT, kx.Shard(), pages=1, fabric=fabric)
    except kx.FabricError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("fabric", ["shm", UCX])
def test_every_room_ends_and_no_byte_is_wrong(fabric: str, tmp_path: Path) -> None:
    needs(fabric)
    log = tmp_path / "log"
    size = ("--rooms", "240", "--concurrent", "96", "--cancel", "0.3", "--kill", "2")
    result = run("--fabric", fabric, *size, "--seed", "5", "--json", "--log", str(log))
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert set(found) >= KEYS
    for name in stress.MUST_BE_ZERO:
        assert found.get(name, 0) == 0, (name, found)
    assert (found["rooms"], found["kills"], found["fabric"], found["seed"]) == (240, 2, fabric, 5)
    assert found["flaw"] is None
    assert found["succeeded"] + found["failed"] + found["cancelled"] == 240
    assert found["succeeded"] >= 40
    assert found["failures"] == {"Cancelled": found["cancelled"], "PeerLost": found["failed"]}
    assert 0 < found["cancelled"] <= 72
    assert 0 < found["cancelled_mid_write"] <= found["cancelled"]
    assert 0 <= found["kills_cut_off"] <= found["kills"]
    assert 0 < found["kills_mid_write"] <= 2
    assert 0 <= found["drain_ms_p50"] <= found["drain_ms_p99"]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum("kill" in line for line in lines) == 2
    assert sorted(line["index"] for line in lines if "index" in line) == list(range(240))


@pytest.mark.ucx
def test_a_release_without_an_answer_is_caught_over_ucx() -> None:
    """The detector detects: the same run, with the rule broken in every agent."""
    needs("ucx")
    size = ("--rooms", "400", "--concurrent", "128", "--cancel", "0.8", "--kill", "0")
    result = run("--fabric", "ucx", *size, "--seed", "3", "--break", "release-on-timeout", "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 1, found
    assert found["late_writes"] > 0
    assert (found["flaw"], found["caught"]) == ("release-on-timeout", True)
    assert "the flaw release-on-timeout was caught: " in result.stderr


def test_a_flaw_that_cannot_show_is_said_not_to_be_caught() -> None:
    """Nobody but decode's own thread writes over shared memory, so there is nothing to be late."""
    size = ("--rooms", "40", "--concurrent", "20", "--kill", "0", "--seed", "1")
    result = run(*size, "--break", "release-on-timeout")
    assert result.returncode == 0, result.stderr
    assert "the flaw release-on-timeout was NOT caught over shm" in result.stderr
    assert "late_writes" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cancel", "1.5"), "1.5 is not between 0 and 1"),
        (("--rooms", "0"), "0 is less than 1"),
        (("--fabric", "auto"), "invalid choice: 'auto'"),
        (("--break", "everything"), "invalid choice: 'everything'"),
        (("--kill", "-1"), "-1 is less than 0"),
    ],
)
def test_wrong_arguments_are_status_2(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert said in result.stderr


def test_every_flaw_is_one_that_agents_know() -> None:
    with pytest.raises(kx.BadArgument) as refused:
        agent(_flaw="none")
    for flaw in _FLAWS:
        agent(_flaw=flaw).close()
    known = re.fullmatch(r'flaw "none" is not known: (.*) are', str(refused.value))
    # Rooms here ask for no checksum, without which nobody sees a flipped byte; a grant that wakes nobody
    # breaks no rule of the contract: rooms fail by their timeouts.
    assert known is not None
    assert set(known[1].split(", ")) == {*_FLAWS, "flip-a-byte", "grant-wakes-nobody"}


def agent(**given: Any) -> kx.Agent:
    pool = kx.alloc(LAYOUT, kx.Shard(), pages=1, fabric="shm")
    return kx.Agent("one", LAYOUT, kx.Shard(), memory=pool, fabric="shm", **given)


# What the simulator of the compiled half answers.
SIMULATED: dict[str, Any] = dict.fromkeys(stress.MUST_BE_ZERO, 0) | {
    "rooms": 50,
    "succeeded": 40,
    "failed": 2,
    "cancelled": 8,
    "cancelled_mid_write": 2,
    "kills_mid_write": 1,
    "drain_ms_p50": 1.0,
    "drain_ms_p99": 2.0,
    "virtual_ms": 77.0,
}


@pytest.mark.parametrize(
    ("flaw", "wrong", "status"),
    [
        (None, {}, 0),
        (None, {"violation_count": 2}, 1),
        ("no-tombstone", {}, 0),
        ("no-tombstone", {"unended": 1}, 1),
    ],
)
def test_sim_passes_everything_on_and_says_how_to_replay(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flaw: str | None,
    wrong: dict[str, int],
    status: int,
) -> None:
    asked: list[tuple[int, dict[str, Any]]] = []

    def simulate(seed: int, **given: Any) -> dict[str, Any]:
        asked.append((seed, given))
        return SIMULATED | wrong

    monkeypatch.setattr(_kvxfer, "simulate", simulate, raising=False)
    words = (
        "stress --fabric sim --rooms 50 --concurrent 8 --cancel 0.25 --kill 1 --stop 3 --cut 2 "
        "--mover receiver --fence impossible"
    )
    broken = ["--break", flaw] if flaw else []
    assert main([*words.split(), *broken, "--seed", "12", "--json"]) == status
    sizes = {"rooms": 50, "concurrent": 8, "cancel": 0.25, "kill": 1, "stop": 3, "cut": 2}
    rest = {"flaw": flaw, "mover": "receiver", "fence": "impossible", "log": None}
    assert asked == [(12, sizes | rest)]
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert {key: found[key] for key in SIMULATED} == SIMULATED | wrong
    assert (found["fabric"], found["seed"], found["flaw"]) == ("sim", 12, flaw)
    replay = " ".join(["kvxfer", *words.split(), *broken, "--seed", "12"])
    assert found["replay"] == replay
    if flaw:
        assert ("was caught: unended 1" in err) == bool(wrong)
        assert ("NOT caught" in err) == (not wrong)
    else:
        assert (f"FAILED: violation_count 2 should be zero; again: {replay}" in err) == bool(wrong)


def test_a_run_that_cannot_be_carried_out_is_status_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(_kvxfer, "simulate", raising=False)
    assert main(["stress", "--fabric", "sim", "--json"]) == stress.FAILED_TO_RUN
    out, err = capsys.readouterr()
    assert out == ""
    assert "no simulator" in err


def test_figures_for_people_are_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_kvxfer, "simulate", lambda seed, **given: dict(SIMULATED), raising=False)
    assert main(["stress", "--fabric", "sim", "--seed", "1"]) == 0
    out, err = capsys.readouterr()
    assert "50 hand-offs over sim, seed 1" in out
    for name in ("late_writes", "cancelled_mid_write", "virtual_ms", "violation_count"):
        assert f"\n  {name} " in out
    assert err.startswith("kvxfer: kvxfer stress --fabric sim --rooms 1000 ")


def plan(**given: Any) -> Plan:
    return make_plan(**({"seed": 4, "rooms": 400, "concurrent": 64, "cancel": 0.25, "kill": 3} | given))


def test_a_seed_decides_every_choice() -> None:
    assert plan() == plan()
    assert plan() != plan(seed=5)


def test_a_plan_has_what_was_asked_for() -> None:
    one = plan()
    cancels = [room.cancel for room in one.rooms if room.cancel is not None]
    assert len(cancels) == 100
    assert {cancel.when for cancel in cancels} == {"in-flight", "at-once", "later"}
    everybody = {rank.name for engine in ENGINES for rank in ranks_of(engine)}
    assert {cancel.by for cancel in cancels} == {"decode"} | everybody
    assert {kill.rank.name for kill in one.kills} == everybody
    assert [kill.after for kill in one.kills] == sorted(kill.after for kill in one.kills)
    assert {room.engine for room in one.rooms} == set(ENGINES)
    assert len({room.room for room in one.rooms}) == 400
    assert {room.tokens % PAGE_TOKENS == 0 for room in one.rooms} == {True, False}
    assert max(room.pages for room in one.rooms) * LAYOUT.page_bytes(kx.Shard()) * 8 == 4 << 20
    assert {kill.rank.engine for kill in plan(spared=["b"]).kills} == {"a"}


def test_a_room_that_ends_by_a_kill_may_be_stamped_just_before_it() -> None:
    """A turn of decode's thread stamps all that it finds with the time at which it began."""
    given = plan()
    one = _stress_run._Run(cast(Any, None), given, {}, cast(Any, None))
    rank = given.kills[0].rank
    room = next(room for room in given.rooms if room.engine == rank.engine)
    one.kills = [_stress_run._Done(rank, 5e6, 1)]
    for failed_us, expected in [(6e6, True), (5e6 - 141, True), (1e6, False)]:
        failed = {"error": "PeerLost", "index": room.index, "failed_us": failed_us, "cut_off": {rank.name: 1}}
        one.ended = [failed]
        assert one._is_expected(failed) is expected
        assert bool(one._lost(0)) is expected


@pytest.fixture
def memory() -> Memory:
    return Memory(kx.alloc(LAYOUT, kx.Shard(), pages=64, fabric="shm"), Found())


def two_sources(*, pushes: tuple[tuple[int, int], ...] = ((0, 4),), index: int = 7) -> Room:
    """A room of two pages of engine a, with a last page that is not full."""
    return Room(
        index=index,
        room=1,
        engine="a",
        tokens=2 * PAGE_TOKENS - 3,
        pushes=pushes,
        pushed_first=False,
        cancel=None,
    )


def granted(memory: Memory, room: Room) -> tuple[Any, Any]:
    pages = memory.take(room.pages)
    assert pages is not None
    return pages, memory.filling[pages]


def test_whole_rooms_and_free_pages_are_found_right(memory: Memory) -> None:
    room = two_sources()
    pages, filling = granted(memory, room)
    assert memory.check_failure(room, memory.read(pages), filling, copied=False) == {}
    assert not memory.has_begun(pages, filling)
    memory.fill(room, pages)
    assert memory.has_begun(pages, filling)
    memory.check_success(room, memory.read(pages), filling)
    both = {"prefill-a0": False, "prefill-a1": False}
    assert memory.check_failure(room, memory.read(pages), filling, copied=False) == both
    memory.refill(pages)
    memory.put(pages)
    memory.scan(np.array(memory.free), "at the end")
    memory.scan_canaries()
    assert memory.found == Found()


@pytest.mark.parametrize("region", range(8))
def test_one_wrong_byte_in_a_room_is_found(memory: Memory, region: int) -> None:
    room = two_sources()
    pages, filling = granted(memory, room)
    memory.fill(room, pages)
    memory.regions[region][1].view(np.uint8)[pages[1], 2, 5, 17] ^= 1
    memory.check_success(room, memory.read(pages), filling)
    assert (memory.found.corrupt_bytes, memory.found.late_writes) == (1, 0)
    assert "room 7 ended well, but" in memory.found.told[0]


def test_a_byte_behind_the_last_token_is_found_in_either_end(memory: Memory) -> None:
    room = two_sources()
    pages, filling = granted(memory, room)
    memory.fill(room, pages)
    memory.regions[3][1].view(np.uint8)[pages[1], 0, PAGE_TOKENS - 3, 0] ^= 0x80
    memory.check_success(room, memory.read(pages), filling)
    assert memory.found.corrupt_bytes == 1
    for copied in (False, True):
        memory.check_failure(room, memory.read(pages), filling, copied=copied)
    assert memory.found.corrupt_bytes == 3


def test_writes_to_free_pages_are_late_and_say_whose_they_are(memory: Memory) -> None:
    room = two_sources()
    pages, _ = granted(memory, room)
    memory.refill(pages)
    memory.fill(room, pages)
    memory.scan(pages, "held back")
    assert memory.found.late_writes == 2
    assert "written after its release: a byte of room 7" in memory.found.told[0]
    # It is counted once, and watched on.
    memory.scan(pages, "held back")
    assert memory.found.late_writes == 2
    memory.regions[7][1].view(np.uint8)[pages[0], 3, PAGE_TOKENS - 1, -1] ^= 1
    memory.scan(pages, "held back")
    assert memory.found.late_writes == 3


def test_another_rooms_bytes_in_a_room_are_late(memory: Memory) -> None:
    room, other = two_sources(), two_sources(index=8)
    pages, filling = granted(memory, room)
    memory.fill(other, pages)
    got = memory.read(pages)
    memory.check_success(room, got, filling)
    assert (memory.found.late_writes, memory.found.corrupt_bytes > 0) == (2, True)
    memory.check_failure(room, got, filling, copied=False)
    assert memory.found.late_writes == 4


def test_a_write_beside_every_grant_is_found(memory: Memory) -> None:
    memory.regions[0][1][memory.canaries[0], 0, 0, 0] += np.uint64(1)
    memory.scan_canaries()
    assert memory.found.corrupt_bytes == 8


def test_a_push_that_arrived_in_part_is_told_by_its_source(memory: Memory) -> None:
    room = two_sources(pushes=((0, 2), (2, 4)))
    pages, filling = granted(memory, room)
    got = memory.read(pages)
    memory.fill(room, pages)
    complete = memory.read(pages)
    # All of the first rank's first push, and a page of a head of the second rank's.
    for n, layer in enumerate(memory.layers):
        if layer < 2:
            got[n][:, :2] = complete[n][:, :2]
    got[0][0, 2] = complete[0][0, 2]
    assert memory.check_failure(room, got, filling, copied=False) == {
        "prefill-a0": False,
        "prefill-a1": True,
    }
    assert memory.found == Found()


def test_a_word_that_a_dead_writer_left_in_part_is_no_fault(memory: Memory) -> None:
    room = two_sources()
    pages, filling = granted(memory, room)
    old = memory.read(pages)
    memory.fill(room, pages)
    new = memory.read(pages)
    old[0].view(np.uint8)[0, 0, 0, :3] = new[0].view(np.uint8)[0, 0, 0, :3]
    memory.check_failure(room, old, filling, copied=False)
    assert memory.found == Found()
    old[0].view(np.uint8)[0, 0, 0, 0] ^= 0xFF
    memory.check_failure(room, old, filling, copied=False)
    assert memory.found.corrupt_bytes == 1


def test_progress_is_for_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal, quiet, said in ((True, False, "\rkvxfer: 5 of 5\n"), (True, True, ""), (False, False, "")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        counter = Counter(quiet=quiet)
        counter.show(5, 5)
        counter.end()
        assert capsys.readouterr().err == said


def test_percentiles_of_nothing_are_none() -> None:
    assert _stress_run._rank([], 50) is None
    assert [_stress_run._rank([1.0, 2.0, 3.0], p) for p in (0, 50, 99)] == [1.0, 2.0, 3.0]


def test_the_verdict_names_what_is_not_zero() -> None:
    assert stress.verdict(dict.fromkeys(stress.MUST_BE_ZERO, 0)) == []
    for name in stress.MUST_BE_ZERO:
        assert stress.verdict({name: 1}) == [name]
