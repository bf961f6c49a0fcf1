"""Hosts' memory, to which prefill servers may move caches that wait for their hand-off."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvxfer.simulate.costs import Costs
from kvxfer.simulate.events import Clock
from kvxfer.simulate.request import Request
from kvxfer.simulate.server import Server

__all__ = ["Hosts"]


class Hosts:
    """The hosts of prefill servers.

    Args:
        clock: virtual time.
        costs: what things take.
        pcie_bytes_ms: how fast a server's PCIe is, each way.
        servers: prefill servers.
        offload: whether caches are moved out at all.
    """

    def __init__(
        self, clock: Clock, costs: Costs, pcie_bytes_ms: float, servers: Iterable[Server], offload: bool
    ) -> None:
        self._clock, self._costs = clock, costs
        self._bytes_ms = pcie_bytes_ms
        self._offload = offload
        self._parked: dict[Server, OrderedDict[Request, None]] = {s: OrderedDict() for s in servers}
        self._busy_ms: dict[Server, float] = {}
        self.spilled_bytes = 0.0

    def park(self, server: Server, request: Request) -> None:
        """A prompt is computed, and its cache waits to be handed off."""
        self._parked[server][request] = None

    def unpark(self, server: Server, request: Request) -> None:
        """It waits no more."""
        self._parked[server].pop(request, None)

    def copy(self, server: Server, nbytes: float) -> float:
        """When a copy over this server's PCIe that begins now is over."""
        self.spilled_bytes += nbytes
        begin = max(self._clock.now_ms, self._busy_ms.get(server, 0.0))
        self._busy_ms[server] = begin + nbytes / self._bytes_ms
        return self._busy_ms[server]

    def spill(self, server: Server) -> None:
        """Makes room for the next prompt by moving out the caches that have waited longest."""
        if not self._offload or not server.works or server not in self._parked:
            return
        wanted = server.need(server.works[0].tokens, 0) - server.pool.free
        for request in list(self._parked[server]):
            if wanted <= 0:
                return
            del self._parked[server][request]
            request.spilled = True
            nbytes = self._costs.kv_bytes(request.prompt)
            self._clock.at(self.copy(server, nbytes), self._free, request)
            wanted -= server.need(request.prompt, 0)

    def release(self, request: Request) -> None:
        """Nobody reads this cache any more."""
        server = request.prefill
        assert server is not None
        self.unpark(server, request)
        # One that is moved out leaves the server's memory when its copy is complete.
        if not request.spilled:
            self._free(request)
        self.spill(server)

    def forget(self, server: Server) -> None:
        """A server has crashed, and its host's memory went with it."""
        self._busy_ms.pop(server, None)
        if server in self._parked:
            self._parked[server].clear()

    def _free(self, request: Request) -> None:
        server = request.prefill
        assert server is not None
        # A server that has crashed since has forgotten it.
        if request.holds_source and request.source_life == server.lives:
            server.give_back(server.need(request.prompt, 0))
        request.holds_source = False
