"""A sender that is stopped: its room drains, its pages are in quarantine, and the metrics say so."""

from __future__ import annotations

import numpy as np
from pair import LAYOUT
from two import Rank, events, eventually, released

import kvxfer as kx


def test_a_drain_is_seen_while_it_lasts_and_counted_when_it_is_over() -> None:
    """Over UCX the peer writes, so its pages wait for its answer."""
    layout, shard = kx.PageLayout(**LAYOUT), kx.Shard()
    ways = {"fabric": "ucx", "ucx_tls": "tcp,self"}
    pool = kx.alloc(layout, shard, pages=8, **ways)
    with (
        Rank(LAYOUT, pages=8, name="prefill", alloc="ucx", **ways) as peer,
        kx.Agent("decode", layout, shard, memory=pool, **ways) as decode,
    ):
        room = kx.new_room()
        decode.expect(room, np.arange(3), tokens=12, source=peer.address)
        eventually(lambda: decode.state(room) == "Waiting", "the peers are in contact")
        eventually(lambda: peer.stats()["outbound"] == 1, "the grant has arrived")
        before = decode.metrics()["drains"]
        peer.stop()
        decode.cancel(room)

        def rooms() -> dict[str, int]:
            found: dict[str, int] = decode.metrics()["rooms"]["decode"]
            return found

        eventually(lambda: rooms()["draining"] == 1, "it drains")
        assert rooms() == {"bootstrapping": 0, "waiting": 0, "transferring": 0, "draining": 1}
        eventually(lambda: decode.stats()["quarantined_pages"] == 3, "its pages are in quarantine")
        assert decode.metrics()["failed"]["waiting"]["cancelled"] == 1
        assert decode.metrics()["drains"] == before, "not over yet"
        peer.go_on()
        events(decode, released(room))
        eventually(lambda: sum(decode.metrics()["drains"]["counts"]) == 1, "it is counted")
        drains = decode.metrics()["drains"]
        assert drains["sum_s"] > 0
        # A stop and a continuation take longer than the shortest bucket.
        assert drains["counts"][0] == 0
        assert rooms()["draining"] == 0
        eventually(lambda: decode.stats()["quarantined_pages"] == 0, "counted")
