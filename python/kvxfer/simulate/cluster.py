"""A cluster of engines behind a router, and the way of each request through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxfer.simulate.costs import Costs
from kvxfer.simulate.crashes import Crashes
from kvxfer.simulate.events import Clock
from kvxfer.simulate.gate import Gate
from kvxfer.simulate.host import Hosts
from kvxfer.simulate.link import Links
from kvxfer.simulate.metrics import Gaps, Gauge
from kvxfer.simulate.prefixes import Prefixes
from kvxfer.simulate.request import Request, Work
from kvxfer.simulate.server import Server
from kvxfer.simulate.setup import Setup
from kvxfer.simulate.traffic import Traffic

__all__ = ["Cluster", "Mark", "Sample"]

_SAMPLES = 240


@dataclass(frozen=True)
class Sample:
    """Levels at a moment."""

    at_ms: float
    admission_queue: int
    prefill_queue: int
    handoff_queue: int
    slots_used: int
    link_bytes: float


@dataclass(frozen=True)
class Mark:
    """What had come together when the last request arrived."""

    at_ms: float
    means: dict[str, float]
    prefill_busy_ms: float
    decode_busy_ms: float
    posting_ms: float
    link_bytes: float
    link_use_max: float
    link_used_ms: float


# What `kvxfer proxy` tells clients while no server is up.
_RETRY_AFTER_MS = 5000.0

# With fewer requests the time in which they arrive says little: then the whole run counts.
_FEW = 20


class Cluster:
    """One run.

    Args:
        setup: the cluster.
        traffic: who asks.
        costs: what things take.
    """

    def __init__(self, setup: Setup, traffic: Traffic, costs: Costs) -> None:
        self.setup, self.traffic, self.costs = setup, traffic, costs
        self.clock = Clock()
        self.gaps = Gaps()
        self.slots = Gauge()
        self.prefill_tokens, self.decode_tokens = Gauge(), Gauge()
        self.prefill_queue, self.handoff_queue, self.admission_queue = Gauge(), Gauge(), Gauge()
        self.requests: list[Request] = []
        self.samples: list[Sample] = []
        self.refused = self.rejected = self.failed = self.recomputed = 0
        self.prefix_tokens = self.decode_prefix_tokens = 0
        self.live: dict[Request, None] = {}  # that were sent to a server and have not ended
        self.moved_bytes = 0.0
        self.ended_ms = 0.0
        self.mark = Mark(0.0, {}, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._links = Links(self.clock)
        self._posting = setup.posting or setup.mode.posting
        self._engine = costs.engine(setup.tp)
        self._split = setup.mode.split
        self._ended = 0
        self._issued = 0
        self._prefills: list[Server] = []
        if self._split:
            self._prefills = [self._server("prefill", i) for i in range(setup.prefill)]
            self._decodes = [self._server("decode", i) for i in range(setup.decode)]
        else:
            self._decodes = [self._server("server", i) for i in range(setup.prefill + setup.decode)]
        self._load_p = np.zeros(max(1, len(self._prefills)))
        self._load_d = np.zeros(len(self._decodes))
        self._index = {server: i for pool in (self._prefills, self._decodes) for i, server in enumerate(pool)}
        self.hosts = Hosts(self.clock, costs, self._engine.pcie_bytes_ms, self._prefills, setup.offload)
        self._prefixes = Prefixes(
            traffic.blocks if setup.prefix_cache else None, self._index, self._engine.tokens
        )
        self.gate = Gate(self) if setup.admission and self._split else None
        self.crashes = Crashes(self) if setup.mtbf_s or setup.crashes else None

    def _server(self, kind: str, number: int) -> Server:
        setup, prefill = self.setup, kind == "prefill"
        return Server(
            self.clock,
            self._engine,
            name=f"{kind}-{number}",
            slots=setup.slots,
            chunk=setup.chunk,
            page_tokens=setup.page_tokens,
            # A prefill server's caches do not grow.
            whole=prefill or setup.admission,
            hooks=self,
            gaps=self.gaps,
            slot_gauge=Gauge() if prefill else self.slots,
            page_gauge=self.prefill_tokens if prefill else self.decode_tokens,
        )

    @property
    def over(self) -> bool:
        """Whether every request has ended."""
        return self._ended >= len(self.traffic)

    @property
    def servers(self) -> tuple[list[Server], list[Server]]:
        """Those that compute prompts for others, and those that write answers."""
        return self._prefills, self._decodes

    def run(self) -> None:
        """Until every request has ended."""
        traffic = self.traffic
        self._issued = min(traffic.users, len(traffic)) if traffic.users else 1
        for number in range(self._issued):
            self.clock.at(float(traffic.arrivals_ms[number]), self._arrive, number)
        if not traffic.users:
            self._sample(max(1.0, float(traffic.arrivals_ms[-1]) / _SAMPLES))
        else:
            self._sample(200.0)
        self.clock.run()

    def _marked(self) -> Mark:
        now = max(self.clock.now_ms, 1e-9)
        gauges = {
            "slots": self.slots,
            "admission_queue": self.admission_queue,
            "prefill_queue": self.prefill_queue,
            "handoff_queue": self.handoff_queue,
            "prefill_tokens": self.prefill_tokens,
            "decode_tokens": self.decode_tokens,
        }
        nics = [server.receives for server in self._decodes] + [server.sends for server in self._prefills]
        return Mark(
            at_ms=now,
            means={name: gauge.mean(now) for name, gauge in gauges.items()},
            prefill_busy_ms=sum(server.busy_ms for server in self._prefills),
            decode_busy_ms=sum(server.busy_ms for server in self._decodes),
            posting_ms=sum(server.posting_ms for server in self._decodes),
            link_bytes=self._link_bytes(),
            link_use_max=max(nic.moved for nic in nics) / now / self._engine.link_bytes_ms,
            link_used_ms=sum(
                server.receives.used_ms + (now - server.receives.since_ms if server.receives.flows else 0.0)
                for server in self._decodes
            ),
        )

    # The router.

    def _arrive(self, number: int) -> None:
        traffic, now = self.traffic, self.clock.now_ms
        rate = self.setup.failure_rate
        luck = float(traffic.luck[number])
        request = Request(
            number,
            now,
            int(traffic.prompts[number]),
            int(traffic.answers[number]),
            luck / rate if rate and luck < rate else 2.0,
        )
        request.place = len(self.requests)
        self.requests.append(request)
        if number + 1 == len(traffic):
            self.mark = self._marked()
        if not traffic.users and number + 1 < len(traffic):
            self.clock.at(float(traffic.arrivals_ms[number + 1]), self._arrive, number + 1)
        if self._decodes[0].need(request.prompt, request.answer) > self._engine.tokens or (
            request.prompt + request.answer > self._engine.tokens
        ):
            self.refused += 1
            request.failed = True
            self._over(request)
            return
        self.clock.after(self.costs.control_ms, self._route, request)

    def _route(self, request: Request) -> None:
        if self.gate is not None:
            self.admission_queue.add(self.clock.now_ms, 1)
            self.gate.offer(request)
        elif self.crashes is not None and not self.crashes.serving:
            self.turn_away(request)
        elif self._split:
            self.begin(request, self._best(self._prefills, self._load_p), None)
        else:
            self.begin(request, None, self._best(self._decodes, self._load_d))

    def begin(self, request: Request, prefill: Server | None, decode: Server | None) -> None:
        """Sends a request on its way: to a prefill server, or to a decode server that computes the prompt
        itself.

        Args:
            request: which.
            prefill: the prefill server; None: `decode` does all.
            decode: the decode server; None: it is chosen when the mode says.
        """
        now = self.clock.now_ms
        request.routed_ms = now
        request.decode = decode
        self.live[request] = None
        if self.gate is not None:
            self.admission_queue.add(now, -1)
        self.prefill_queue.add(now, 1)
        if decode is not None:
            self._count(self._load_d, decode, request, 1)
        if prefill is None:
            assert decode is not None
            request.local = True
            self.clock.after(self.costs.control_ms, self._submit, request)
            return
        request.prefill = prefill
        request.queued_ms = now + self.costs.control_ms
        self._count(self._load_p, prefill, request, 1)
        self.clock.after(self.costs.control_ms, self._submit, request)
        if self.setup.mode.bind == "arrival":
            self._bind(request)

    def _submit(self, request: Request) -> None:
        if request.broken:
            return
        server = request.prefill or request.decode
        assert server is not None
        server.compute(Work(request, request.prompt, local=request.local, finds=True))
        self.hosts.spill(server)

    def _best(self, pool: list[Server], load: Any) -> Server:
        if self.crashes is not None:
            load = load + self.crashes.out[id(pool)]
        return pool[int(load.argmin())]

    def _count(self, load: Any, server: Server, request: Request, sign: int) -> None:
        weight = (
            1
            if self.setup.route == "requests"
            else request.prompt + (request.answer if load is self._load_d else 0)
        )
        load[self._index[server]] += sign * weight

    def _bind(self, request: Request) -> None:
        """Chooses decode's server, and tells it."""
        if request.broken:
            return
        if request.decode is None:
            request.decode = self._best(self._decodes, self._load_d)
            self._count(self._load_d, request.decode, request, 1)
        elif self.gate is not None and self.setup.mode.bind == "prefilled":
            self._count(self._load_d, request.decode, request, -1)
            request.decode = self.gate.choose(request)
            self._count(self._load_d, request.decode, request, 1)
        request.bound = True
        if self.crashes is not None and not request.decode.up:
            # There is none that is up.
            self.crashes.strand(request)
            return
        request.pages = request.decode.need(request.prompt, request.answer)
        request.skip = self._prefixes.found(request.decode, request)
        request.moves -= request.skip
        self.decode_prefix_tokens += request.skip
        self.clock.after(self.costs.control_ms, self._ask, request)

    def _ask(self, request: Request) -> None:
        """Decode hears of a request: it queues it for a slot to read with, or grants pages."""
        decode = request.decode
        assert decode is not None
        if request.broken:
            return
        request.asked_ms = self.clock.now_ms
        if self.setup.mode.reads:
            decode.pull(request)
        else:
            decode.grant(request, self._granted)

    def _granted(self, request: Request) -> None:
        request.holds_pages = True
        request.granted_ms = self.clock.now_ms
        self.clock.after(self.costs.control_ms, self._grant_arrived, request)

    def _grant_arrived(self, request: Request) -> None:
        request.granted = True
        tokens, request.pending = request.pending, 0
        if tokens:
            self._push(request, tokens)

    # What servers say.

    def on_started(self, work: Work) -> None:
        """A prompt is begun."""
        if work.finds:
            where = work.request.decode if work.local else work.request.prefill
            assert where is not None
            work.base = work.done = self._prefixes.found(where, work.request)
            self.prefix_tokens += work.base
        if not work.local:
            server = work.request.prefill
            assert server is not None
            work.request.holds_source, work.request.source_life = True, server.lives
        if work.request.started_ms < 0:
            work.request.started_ms = self.clock.now_ms

    def on_chunk(self, work: Work, tokens: int) -> None:
        """A chunk is computed: others may find it. It is pushed if it may be; the last ends the prompt."""
        request = work.request
        where = request.decode if work.local else request.prefill
        assert where is not None
        self._prefixes.add(where, request, work.done)
        if work.local:
            return
        # A prefix that was found is pushed with what comes first.
        tokens += work.base if work.done - tokens == work.base else 0
        if request.granted:
            self._push(request, tokens)
        else:
            request.pending += tokens
        if work.done < work.tokens:
            return
        now, server = self.clock.now_ms, request.prefill
        assert server is not None
        self.end_prefill(request)
        if self.gate is not None:
            self.gate.prefilled(request)
        if request.broken:
            if request.noticed:
                self.hosts.release(request)
            return
        self.handoff_queue.add(now, 1)
        request.handing = True
        if not request.granted:
            self.hosts.park(server, request)
        if self.setup.mode.bind == "prefilled":
            self.clock.after(self.costs.control_ms, self._bind, request)
        self.hosts.spill(server)

    def on_pull(self, request: Request) -> None:
        """Decode has a slot and pages: it posts its reads."""
        request.granted_ms = self.clock.now_ms
        request.holds_pages = True
        assert request.decode is not None
        on_loop = self._posting == "loop"
        request.pending = request.skip = 0
        request.decode.post(
            self.costs.post_ms(request.moves), self._posted, (request, request.moves), on_loop=on_loop
        )

    def on_joined(self, request: Request) -> None:
        """It is being answered."""
        if request.handing:
            request.handing = False
            self.handoff_queue.add(self.clock.now_ms, -1)
        elif request.local and request.prefilled_ms < 0:
            request.prefilled_ms = self.clock.now_ms
            self.prefill_queue.add(self.clock.now_ms, -1)
        if self.gate is not None:
            self.gate.answered(request)

    def on_done(self, request: Request) -> None:
        """Its last token is written."""
        if request.local and request.prefilled_ms < 0:
            request.prefilled_ms = self.clock.now_ms
            self.prefill_queue.add(self.clock.now_ms, -1)
        assert request.decode is not None
        self._count(self._load_d, request.decode, request, -1)
        self._over(request)

    def _over(self, request: Request, pause_ms: float = 0.0) -> None:
        self.ended_ms = self.clock.now_ms
        self._ended += 1
        self.live.pop(request, None)
        if self.over and len(self.traffic) < _FEW:
            self.mark = self._marked()
        if self.gate is not None and request.decode is not None:
            self.gate.ended(request)
        if self.traffic.users and self._issued < len(self.traffic):
            self.clock.after(pause_ms, self._arrive, self._issued)
            self._issued += 1

    def turn_away(self, request: Request) -> None:
        """No server is up: the client gets 503, and the next user comes when it says so."""
        self.rejected += 1
        request.failed = True
        self._over(request, _RETRY_AFTER_MS)

    def reject(self, request: Request, retry_after_ms: float) -> None:
        """Admission says no: the client gets 429, and the next user comes when it says so."""
        self.admission_queue.add(self.clock.now_ms, -1)
        self.rejected += 1
        request.failed = True
        self._over(request, retry_after_ms)

    # The hand-off.

    def _push(self, request: Request, tokens: int) -> None:
        assert request.prefill is not None
        there = min(request.skip, tokens)
        request.skip -= there
        tokens -= there
        if tokens and not request.broken:
            cost = self.costs.post_ms(tokens)
            request.prefill.post(cost, self._posted, (request, tokens), on_loop=self._posting == "loop")

    def _posted(self, what: tuple[Request, int]) -> None:
        request, tokens = what
        source = request.prefill
        assert source is not None
        if request.broken:
            return
        self.hosts.unpark(source, request)
        if not request.spilled:
            self._move(what)
            return
        # From the host's memory it first comes back over PCIe.
        nbytes = self.costs.kv_bytes(tokens)
        self.clock.at(self.hosts.copy(source, nbytes), self._move, what)

    def _move(self, what: tuple[Request, int]) -> None:
        request, tokens = what
        if request.broken:
            return
        if not request.limit:
            whole = self.costs.kv_bytes(request.moves)
            request.limit = whole * min(1.0, request.fails_at)
        nbytes = min(self.costs.kv_bytes(tokens), max(0.0, request.limit - request.sent))
        request.sent += self.costs.kv_bytes(tokens)
        request.given += nbytes
        if request.flow is not None:
            self._links.add(request.flow, nbytes)
            return
        if nbytes <= 0:
            self._arrived(request)
            return
        assert request.prefill is not None
        assert request.decode is not None
        request.moved_ms = self.clock.now_ms if request.moved_ms < 0 else request.moved_ms
        request.flow = self._links.start(
            request.prefill.sends, request.decode.receives, nbytes, self._arrived, request
        )

    def _arrived(self, request: Request) -> None:
        """All that was posted so far has landed."""
        request.flow = None
        if request.fails_at < 1 and request.sent >= request.limit:
            if not request.broken:
                request.broken = True
                self.clock.after(self.costs.detect_ms, self._break, request)
            return
        # Chunks are pushed in order, so the prompt is complete once as many bytes were.
        if request.sent < self.costs.kv_bytes(request.moves) * (1 - 1e-9):
            return
        request.arrived = True
        self.stop_moving(request)
        if self.gate is not None:
            self.gate.moved(request)
        if self.setup.mode.reads:
            self._landed(request)
            self.clock.after(self.costs.control_ms, self.hosts.release, request)
        else:
            self.hosts.release(request)
            self.clock.after(self.costs.control_ms, self._landed, request)

    def _landed(self, request: Request) -> None:
        if request.broken:
            return
        request.landed_ms = self.clock.now_ms
        assert request.decode is not None
        self._prefixes.add(request.decode, request, request.prompt)
        request.decode.ready(request)

    def _break(self, request: Request) -> None:
        """A hand-off is known to have failed, and nothing of it can land any more."""
        decode = request.decode
        assert decode is not None
        self.stop_moving(request)
        if request.gone:
            assert self.crashes is not None
            self.crashes.lost(request)
            return
        request.noticed = True
        self._no_handoff(request)
        if request.prefilled_ms >= 0:
            self.hosts.release(request)
        if self.setup.on_failure == "recompute":
            self.recomputed += 1
            request.holds_pages = False
            decode.compute(Work(request, request.prompt, local=True, holds_pages=True))
            return
        decode.forget(request)
        self._count(self._load_d, decode, request, -1)
        self.fail(request)

    def _no_handoff(self, request: Request) -> None:
        if request.handing:
            request.handing = False
            self.handoff_queue.add(self.clock.now_ms, -1)

    # Requests that lose what they stand on.

    def stop_moving(self, request: Request) -> None:
        """No more bytes of it; those that moved are counted."""
        left = 0.0
        if request.flow is not None:
            self._links.stop(request.flow)
            left, request.flow = request.flow.left, None
        if not request.counted:
            request.counted = True
            self.moved_bytes += request.given - left

    def end_prefill(self, request: Request) -> None:
        """Its prefill server is not busy with it any more."""
        if request.prefilled_ms >= 0:
            return
        request.prefilled_ms = self.clock.now_ms
        self.prefill_queue.add(self.clock.now_ms, -1)
        if request.prefill is not None:
            self._count(self._load_p, request.prefill, request, -1)

    def give_up(self, request: Request) -> None:
        """Takes a request from all servers, in whatever state it is."""
        self._no_handoff(request)
        prefill, decode = request.prefill, request.decode
        if prefill is not None and request.prefilled_ms < 0:
            prefill.drop(request)
            request.holds_source = False
        elif prefill is not None:
            self.hosts.release(request)
        self.end_prefill(request)
        if decode is not None:
            self._count(self._load_d, decode, request, -1)
            decode.forget(request)

    def fail(self, request: Request) -> None:
        """It ends with an error."""
        self.failed += 1
        request.failed = True
        self._over(request)

    def again(self, request: Request, *, local: bool) -> None:
        """Another try: from the start, or computed where the answer is written."""
        other = request.again(self.clock.now_ms)
        self.requests[request.place] = other
        del self.live[request]
        if self.gate is not None:
            self.admission_queue.add(self.clock.now_ms, 1)
            self.gate.offer_again(other, local=local)
        elif local and any(server.up for server in self._decodes):
            decode = request.decode
            if decode is None or not decode.up:
                decode = self._best(self._decodes, self._load_d)
            self.begin(other, None, decode)
        else:
            self._route(other)

    def forget(self, server: Server) -> None:
        """A server has lost all that was in its memory, and its host's."""
        self._prefixes.clear(server)
        self.hosts.forget(server)

    def _sample(self, every_ms: float) -> None:
        self.samples.append(
            Sample(
                self.clock.now_ms,
                int(self.admission_queue.level),
                int(self.prefill_queue.level),
                int(self.handoff_queue.level),
                int(self.slots.level),
                self._link_bytes(),
            )
        )
        if self._ended < len(self.traffic):
            self.clock.after(every_ms, self._sample, every_ms)

    def _link_bytes(self) -> float:
        now = self.clock.now_ms
        total = 0.0
        for server in self._decodes:
            nic = server.receives
            total += nic.moved + sum(flow.rate * (now - flow.settled_ms) for flow in nic.flows)
        return total
