"""kill -9 of a peer before, during and after a write, whichever side it is on."""

from __future__ import annotations

import numpy as np
from scene import SUCCESS, Scene, endings, scene
from two import eventually
from ways import Remote, Way, each_way, tokens


def doomed_peer(way: Way, it: Scene) -> Remote:
    return Remote(way, it.other.shape, it.here.pages, name="doomed", seed=1)


def granted_to(it: Scene) -> int:
    """Rooms that were granted to the survivor."""
    return it.here.stats()["outbound"]


@each_way("moment", ["before", "during", "delivered", "after"], posix=["during", "after"])
def test_prefill_is_killed(way: Way, other: Remote, big_other: Remote, moment: str) -> None:
    """`delivered`: all bytes of a push are there, but it was not the last."""
    big = moment in ("during", "delivered")
    with scene(way, big_other if big else other, field=100 if big else 20) as it:
        room, dst = it.room(), it.field
        with doomed_peer(way, it) as doomed:
            it.here.expect(room, dst, tokens=tokens(dst), source=doomed.address)
            eventually(lambda: it.here.state(room) == "Waiting", "the grant is out")
            if moment == "during":
                # Not the last push, so that the room cannot end well, however fast the bytes are.
                doomed.push(room, it.source, tokens=tokens(dst), last=False)
                assert it.here.arrived(dst, 10), "the first bytes"
            elif moment == "delivered":
                doomed.push(room, it.source, tokens=tokens(dst), last=False)
                eventually(lambda: doomed.stats()["deliveries"] == 0 and it.here.arrived(dst), "delivered")
            elif moment == "after":
                doomed.push(room, it.source, tokens=tokens(dst))
                assert endings(it.here.end(room)) == SUCCESS
                it.give_up(room)
                it.here.received(doomed.seed, it.source, dst)
            doomed.child.kill()
            if moment != "after":
                failure = it.is_over(room, dst)[0]
                assert failure["error"] == "PeerLost"
                assert failure["state"] == "Failed"
            doomed.kill()
            if moment == "before":
                it.here.rest()
                assert np.array_equal(
                    it.here.guarded.rows[it.here.guarded.keys[0]][dst + 1],
                    it.here.guarded.content(it.here.seed, it.here.guarded.keys[0], dst),
                ), "nothing was ever written"


@each_way("moment", ["before", "during", "after"], posix=["during"])
def test_decode_is_killed(way: Way, other: Remote, big_other: Remote, moment: str) -> None:
    big = moment == "during"
    with scene(way, big_other if big else other, field=100 if big else 20) as it:
        room, src = it.room(), it.source
        with doomed_peer(way, it) as doomed:
            doomed.expect(room, it.field, tokens=tokens(src), source=it.here.address)
            eventually(lambda: granted_to(it) == 2, "the grant, beside the other room's")
            if moment == "before":
                # Nothing of ours is in its hands yet, but the room is known here: it ends with its peer.
                it.here.push(room, src, tokens=tokens(src), last=False, layers=(0, 1))
                eventually(lambda: it.here.state(room) == "Transferring", "known")
            elif moment == "during":
                it.here.push(room, src, tokens=tokens(src), last=False)
                eventually(lambda: it.here.state(room) == "Transferring", "bytes flow", pause=0)
            else:
                it.here.push(room, src, tokens=tokens(src))
                assert endings(it.here.end(room)) == SUCCESS
                it.give_up(room)
            doomed.child.kill()
            if moment != "after":
                events = it.here.end(room, way.death_s)
                it.give_up(room)
                assert events[0]["state"] == "Failed"
                assert events[0]["error"] == "PeerLost"
            doomed.kill()
            # Sent pages were read only.
            it.here.rest()


def test_a_push_waits_for_a_decode_that_was_killed_before_it_granted(way: Way, other: Remote) -> None:
    """Nobody granted anything, so nothing can be held: the room ends by its own timeout, and releases."""
    with scene(way, other) as it:
        room = it.room()
        with doomed_peer(way, it) as doomed:
            doomed.kill()
        it.here.push(room, it.source, tokens=tokens(it.source), bootstrap_timeout=0.2)
        (event,) = it.here.end(room, 5)
        it.give_up(room)
        assert (event["state"], event["error"], event["released"]) == ("Failed", "TransferTimeout", True)


def test_death_of_a_stopped_peer_ends_its_quarantine(way: Way, other: Remote) -> None:
    """It was given up before it died: the death counts all the same, and does so late."""
    with scene(way, other) as it:
        room, dst = it.room(), it.field
        with doomed_peer(way, it) as doomed:
            it.here.expect(room, dst, tokens=tokens(dst), source=doomed.address)
            eventually(lambda: it.here.state(room) == "Waiting", "the grant is out")
            doomed.stop()
            failure = it.here.first(room)
            assert (failure["state"], failure["error"]) == ("Failed", "PeerLost")
            if not failure["released"] and not way.fences:
                eventually(lambda: it.here.stats()["quarantined_pages"] == len(dst), "quarantine")
            doomed.child.kill()
            if not failure["released"]:
                assert [ev["state"] for ev in it.here.end(room, way.death_s)] == ["Released"]
            it.here.settle(dst)
            it.give_up(room)
            doomed.kill()
