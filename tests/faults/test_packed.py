"""Faults while pushes go packed, through staging slots: what holds for pages holds for slots too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scene import SUCCESS, Scene, endings, hand_off, scene
from two import eventually
from ways import POSIX_PACKED, TCP_PACKED, Remote, Way, params, tokens

each = pytest.mark.parametrize("way", params(TCP_PACKED, POSIX_PACKED), indirect=True)
FEW: dict[str, Any] = {"staging_slots": 4, "staging_slot_bytes": 16384}
"""So that a push takes hundreds of slices."""


def doomed_peer(way: Way, it: Scene, **given: Any) -> Remote:
    return Remote(way, it.other.shape, it.here.pages, name="doomed", seed=1, **given)


def quarantined(it: Scene) -> int:
    slots: int = it.here.stats()["quarantined_slots"]
    return slots


def slots_free(it: Scene) -> bool:
    stats = it.here.stats()
    return stats["staging_slots"] == 0 and stats["quarantined_slots"] == 0


@each
def test_whole_rooms_go_packed_and_no_slot_stays_behind(way: Way, other: Remote) -> None:
    with scene(way, other, **FEW) as it:
        hand_off(other, it.here, it.source % 40, it.field)
        stats = it.here.stats()
        eventually(lambda: it.here.stats()["unpacked_bytes"] > 0, f"it came packed: {stats}")
        eventually(lambda: slots_free(it), "every slot is free")


@each
@pytest.mark.parametrize("by", ["decode", "prefill"])
def test_case_11_a_cancel_in_mid_slice(way: Way, big_other: Remote, by: str) -> None:
    """Its pages are given to another room at its release, and nothing of it comes into them after that."""
    with scene(way, big_other, field=100, **FEW) as it, doomed_peer(way, it) as peer:
        for _ in range(3):
            room, dst = it.room(), it.field
            it.here.expect(room, dst, tokens=tokens(dst), source=peer.address)
            peer.push(room, it.source, tokens=tokens(dst), last=False)
            assert it.here.arrived(dst, 10), "the first slices"
            (it.here if by == "decode" else peer).cancel(room)
            events = it.is_over(room, dst)
            assert (events[0]["state"], events[0]["error"]) == ("Failed", "Cancelled")
            peer.end(room)
            hand_off(it.other, it.here, it.source, dst)
            eventually(lambda: slots_free(it), "every slot is free")


@each
def test_prefill_is_killed_in_mid_slice(way: Way, big_other: Remote) -> None:
    with scene(way, big_other, field=100, **FEW) as it:
        room, dst = it.room(), it.field
        with doomed_peer(way, it) as doomed:
            it.here.expect(room, dst, tokens=tokens(dst), source=doomed.address)
            doomed.push(room, it.source, tokens=tokens(dst), last=False)
            assert it.here.arrived(dst, 10), "the first slices"
            doomed.child.kill()
            events = it.is_over(room, dst)
            assert (events[0]["state"], events[0]["error"]) == ("Failed", "PeerLost")
            doomed.kill()
        eventually(lambda: slots_free(it), "its slots are free by its death")


@each
def test_decode_is_killed_in_mid_slice(way: Way, big_other: Remote) -> None:
    with scene(way, big_other, field=100) as it:
        room, src = it.room(), it.source
        with doomed_peer(way, it, **FEW) as doomed:
            doomed.expect(room, it.field, tokens=tokens(src), source=it.here.address)
            eventually(lambda: it.here.stats()["outbound"] == 2, "the grant, beside the other room's")
            it.here.push(room, src, tokens=tokens(src), last=False)
            eventually(lambda: it.here.state(room) == "Transferring", "bytes flow", pause=0)
            doomed.child.kill()
            events = it.here.end(room, way.death_s)
            it.give_up(room)
            assert (events[0]["state"], events[0]["error"]) == ("Failed", "PeerLost")
            doomed.kill()
        it.here.rest()


@each
@pytest.mark.parametrize("then", ["dies", "goes-on"])
def test_a_peer_that_stops_with_slots_in_hand_does_not_stop_the_others(
    way: Way, big_other: Remote, then: str
) -> None:
    """It has half of the ring at most, which waits in quarantine as its pages do."""
    with scene(way, big_other, field=100, **FEW) as it:
        room, dst = it.room(), it.field
        with doomed_peer(way, it) as doomed:
            it.here.expect(room, dst, tokens=tokens(dst), source=doomed.address)
            doomed.push(room, it.source, tokens=tokens(dst), last=False)
            assert it.here.arrived(dst, 10), "the first slices"
            doomed.stop()
            beside = it.room()
            src = np.arange(5)
            # Pages of its own: the scene's other rooms wait in theirs.
            free = it.first_beside - 2
            it.here.expect(beside, [free], tokens=16, source=it.other.address)
            it.other.push(beside, src[:1], tokens=16)
            assert endings(it.here.end(beside)) == SUCCESS, it.here.last
            assert endings(it.other.end(beside)) == SUCCESS
            it.give_up(beside)
            it.here.received(it.other.seed, src[:1], [free])
            failure = it.here.first(room)
            assert (failure["state"], failure["error"], failure["released"]) == ("Failed", "PeerLost", False)
            eventually(lambda: quarantined(it) > 0, "its slots wait with its pages")
            for _ in range(3):
                hand_off(it.other, it.here, src[:1], [free])
                assert quarantined(it) > 0, "as long as it may go on"
            if then == "dies":
                doomed.child.kill()
            else:
                doomed.go_on()
            assert [ev["state"] for ev in it.here.end(room, way.death_s)] == ["Released"]
            it.here.settle(dst)
            it.give_up(room)
            eventually(lambda: slots_free(it), "its slots are free by its death, or by its answer")
            doomed.kill()


@pytest.mark.parametrize("way", params(TCP_PACKED), indirect=True)
def test_decodes_that_stop_hold_up_no_packed_push_to_another(way: Way, big_other: Remote) -> None:
    """Their writes do not come back, and keep the buffers that they were packed into. Nobody is given up
    meanwhile.
    """
    patient = {"suspect_after": 60, "fence_after": 60}
    with (
        scene(way, big_other, field=100, **patient) as it,
        doomed_peer(way, it, **FEW) as one,
        doomed_peer(way, it, **FEW) as two,
    ):
        src = it.source
        rooms = []
        for n, doomed in enumerate((one, two)):
            room = it.room()
            rooms.append(room)
            doomed.expect(room, it.field, tokens=tokens(src), source=it.here.address)
            outbound = 2 + n
            eventually(lambda n=outbound: it.here.stats()["outbound"] == n, "the grant")
            it.here.push(room, src, tokens=tokens(src), last=False)
            eventually(lambda r=room: it.here.state(r) == "Transferring", "bytes flow", pause=0)
            doomed.stop()
        even = 2 * np.arange(10)
        for _ in range(3):
            hand_off(it.here, it.other, even, it.beside_other[0] - 20 - 2 * np.arange(10))
        for doomed in (one, two):
            doomed.kill()
        for room in rooms:
            events = it.here.end(room, way.death_s)
            assert (events[0]["state"], events[0]["error"]) == ("Failed", "PeerLost")
            it.give_up(room)
        it.here.rest()
