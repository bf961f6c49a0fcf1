"""Servers that crash and come back, and what becomes of the requests that were there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvxfer.simulate.request import Request
from kvxfer.simulate.server import Server

if TYPE_CHECKING:
    from kvxfer.simulate.cluster import Cluster

__all__ = ["Crashes"]


class Crashes:
    """Breaks servers and repairs them.

    A crash takes all that is in a server's memory. The router knows at once, as connections are refused, and
    sends nobody there; who was there is noticed after `detect_ms`. Then, by the policy: the request fails; or
    it is tried once more. Where its prefill server was lost, decode computes the prompt itself; where decode
    was lost, all begins anew on other servers. An answer that has begun cannot begin again: its client has
    seen some of it, and gets an error.
    """

    def __init__(self, cluster: Cluster) -> None:
        setup = cluster.setup
        self._cluster = cluster
        self.count = self.retried = self.cut_off = 0
        self._down_ms = 0.0
        self._since_ms: dict[int, float] = {}
        prefills, decodes = cluster.servers
        self._servers = [*prefills, *decodes]
        # Added to the loads by which the router chooses.
        self.out = {id(pool): np.zeros(len(pool)) for pool in (prefills, decodes)}
        self._pools = (prefills, decodes)
        self._draws = [np.random.default_rng([setup.crash_seed, i]) for i in range(len(self._servers))]
        for crash in setup.crashes:
            if crash.server >= len(self._servers):
                raise ValueError(
                    f"a crash of server {crash.server}: there are {len(self._servers)}, numbered from 0"
                )
            cluster.clock.at(crash.at_s * 1e3, self._crash, (crash.server, crash.repair_s * 1e3, False))
        if setup.mtbf_s:
            for number in range(len(self._servers)):
                self._draw(number)

    def _draw(self, number: int) -> None:
        """The next crash of a server, unless all is over by then. The same for every mode."""
        setup = self._cluster.setup
        wait_ms = float(self._draws[number].exponential(setup.mtbf_s * 1e3))
        self._cluster.clock.after(wait_ms, self._drawn, (number, setup.repair_s * 1e3, True))

    def _drawn(self, which: tuple[int, float, bool]) -> None:
        number = which[0]
        if self._servers[number].up:
            self._crash(which)
        elif not self._cluster.over:
            # Down already, by the schedule.
            self._draw(number)

    @property
    def serving(self) -> bool:
        """Whether each kind of server has one that is up."""
        return all(any(server.up for server in pool) for pool in self._pools if pool)

    def down_ms(self, until_ms: float) -> float:
        """For how long servers were away up to then, all added up."""
        return self._down_ms + sum(max(0.0, until_ms - since_ms) for since_ms in self._since_ms.values())

    def _crash(self, which: tuple[int, float, bool]) -> None:
        number, repair_ms, drawn = which
        cluster, server = self._cluster, self._servers[number]
        if cluster.over or not server.up:
            return
        self.count += 1
        self._since_ms[number] = cluster.clock.now_ms
        self._mark(server, float("inf"))
        for work in server.crash():
            if not work.local:
                cluster.end_prefill(work.request)
        cluster.forget(server)
        if cluster.gate is not None:
            cluster.gate.down(server)
        for request in list(cluster.live):
            self._hit(server, request)
        cluster.clock.after(repair_ms, self._repair, (number, drawn))

    def _mark(self, server: Server, out: float) -> None:
        for pool in self._pools:
            if server in pool:
                self.out[id(pool)][pool.index(server)] = out

    def _repair(self, which: tuple[int, bool]) -> None:
        number, drawn = which
        cluster, server = self._cluster, self._servers[number]
        if cluster.over:
            return
        self._down_ms += cluster.clock.now_ms - self._since_ms.pop(number)
        server.repair()
        self._mark(server, 0.0)
        if cluster.gate is not None:
            cluster.gate.up(server)
        if drawn:
            self._draw(number)

    def _hit(self, server: Server, request: Request) -> None:
        """Whether a request had something there that it cannot do without."""
        waiting = not request.arrived and not request.noticed
        from_there = request.prefill is server
        to_there = request.decode is server and (request.bound or request.local)
        if to_there:
            request.holds_slot = request.holds_pages = False
            # A first token that was to come at the end of the step under way.
            if request.first_ms > self._cluster.clock.now_ms:
                request.first_ms = -1.0
        if to_there or (from_there and waiting):
            request.sourceless |= from_there and waiting
            self.strand(request)

    def strand(self, request: Request) -> None:
        """What a request stands on is gone, which is noticed after a while."""
        request.gone = True
        if request.broken and not request.noticed:
            # It broke before, and that is about to be noticed.
            return
        request.broken, request.noticed = True, False
        self._cluster.stop_moving(request)
        self._cluster.clock.after(self._cluster.costs.detect_ms, self.lost, request)

    def lost(self, request: Request) -> None:
        """It is noticed: what the request still holds anywhere is given back."""
        cluster = self._cluster
        request.noticed = True
        cluster.give_up(request)
        begun = request.first_ms >= 0
        if begun or request.tries or cluster.setup.on_failure == "fail":
            self.cut_off += begun
            cluster.fail(request)
            return
        self.retried += 1
        cluster.again(request, local=request.sourceless and request.prefill is not None)
