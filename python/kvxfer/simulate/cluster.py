"""A cluster of engines behind a router, and the way of each request through it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvxfer.simulate.costs import Costs
from kvxfer.simulate.events import Clock
from kvxfer.simulate.gate import Gate
from kvxfer.simulate.link import Links
from kvxfer.simulate.metrics import Gaps, Gauge
from kvxfer.simulate.modes import Mode
from kvxfer.simulate.server import Request, Server, Work
from kvxfer.simulate.traffic import Traffic

__all__ = ["Cluster", "Mark", "Sample", "Setup"]

# Mooncake's traces name blocks of this many tokens.
_BLOCK = 512
_SAMPLES = 240


@dataclass(frozen=True)
class Setup:
    """A cluster to simulate.

    Args:
        mode: how caches are handed off, or `UNIFIED`.
        prefill: servers that compute prompts.
        decode: servers that write answers. A unified cluster has as many servers as both together.
        tp: GPUs of each server.
        slots: answers that a server writes at a time (vLLM's `max_num_seqs`).
        chunk: tokens of a step at most (vLLM's `max_num_batched_tokens`); a chunk as long as the longest
            prompt is prefill without chunks.
        page_tokens: tokens of a page.
        admission: admit by `kvxfer.admission`: decode's pages for prompt and answer and a slot are reserved
            before prefill starts. Plain servers reserve pages for the answer as well, and take all.
        route: choose the server with the fewest requests under way, or with the fewest bytes of them.
        posting: where posting runs, if not where the mode says.
        failure_rate: part of the hand-offs that break on their way.
        on_failure: what becomes of those: the request fails, or decode computes the prompt again.
        offload: where prefill has no room, move caches that wait for their hand-off to the host's memory.
        prefix_cache: find blocks that a prefill server has computed before, where the traffic names them.
        slo_ttft_ms: first tokens later than this are not good, and what admission aims for.
        slo_tpot_ms: requests with more time per token than this are not good.
    """

    mode: Mode
    prefill: int = 1
    decode: int = 1
    tp: int = 8
    slots: int = 256
    chunk: int = 8192
    page_tokens: int = 16
    admission: bool = False
    route: Literal["requests", "bytes"] = "requests"
    posting: Literal["loop", "thread"] | None = None
    failure_rate: float = 0.0
    on_failure: Literal["fail", "recompute"] = "fail"
    offload: bool = False
    prefix_cache: bool = True
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 50.0

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "tp", "slots", "chunk", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if not 0 <= self.failure_rate <= 1:
            raise ValueError(f"failure_rate is {self.failure_rate}: it must be from 0 to 1")
        if self.slo_ttft_ms <= 0 or self.slo_tpot_ms <= 0:
            raise ValueError(f"SLOs are {self.slo_ttft_ms} and {self.slo_tpot_ms} ms: they must be above 0")

    @property
    def gpus(self) -> int:
        """GPUs of all servers."""
        return self.tp * (self.prefill + self.decode)


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
        self.refused = self.rejected = self.failed = self.recomputed = self.prefix_tokens = 0
        self.moved_bytes = self.spilled_bytes = 0.0
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
        self._parked: dict[Server, OrderedDict[Request, None]] = {s: OrderedDict() for s in self._prefills}
        self._pcie_ms: dict[Server, float] = {}
        self._blocks: dict[Server, OrderedDict[int, None]] = {s: OrderedDict() for s in self._index}
        self._gate = Gate(self) if setup.admission and self._split else None

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
        if len(traffic) < _FEW:
            self.mark = self._marked()

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
        if self._gate is not None:
            self.admission_queue.add(self.clock.now_ms, 1)
            self._gate.offer(request)
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
        if self._gate is not None:
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
        server = request.prefill or request.decode
        assert server is not None
        server.compute(Work(request, request.prompt, local=request.local, base=self._cached(server, request)))
        self._spill(server)

    def _best(self, pool: list[Server], load: Any) -> Server:
        return pool[int(load.argmin())]

    def _count(self, load: Any, server: Server, request: Request, sign: int) -> None:
        weight = (
            1
            if self.setup.route == "requests"
            else request.prompt + (request.answer if load is self._load_d else 0)
        )
        load[self._index[server]] += sign * weight

    def _cached(self, server: Server, request: Request) -> int:
        """Tokens at the front of a prompt that this server has computed before, and remembers those of this
        one.
        """
        blocks = self.traffic.blocks
        if blocks is None or not self.setup.prefix_cache:
            return 0
        cache, names = self._blocks[server], blocks[request.number]
        hits = 0
        for name in names:
            if name not in cache:
                break
            cache.move_to_end(name)
            hits += 1
        for name in names[hits:]:
            cache[name] = None
        while len(cache) * _BLOCK > self._engine.tokens:
            cache.popitem(last=False)
        # The last token has to be computed for there to be a next one.
        tokens = min(hits * _BLOCK, request.prompt - 1)
        self.prefix_tokens += tokens
        return tokens

    def _bind(self, request: Request) -> None:
        """Chooses decode's server, and tells it."""
        if request.decode is None:
            request.decode = self._best(self._decodes, self._load_d)
            self._count(self._load_d, request.decode, request, 1)
        elif self._gate is not None and self.setup.mode.bind == "prefilled":
            self._count(self._load_d, request.decode, request, -1)
            request.decode = self._gate.choose(request)
            self._count(self._load_d, request.decode, request, 1)
        request.pages = request.decode.need(request.prompt, request.answer)
        self.clock.after(self.costs.control_ms, self._ask, request)

    def _ask(self, request: Request) -> None:
        """Decode hears of a request: it queues it for a slot to read with, or grants pages."""
        decode = request.decode
        assert decode is not None
        request.asked_ms = self.clock.now_ms
        if self.setup.mode.reads:
            decode.pull(request)
        else:
            decode.grant(request, self._granted)

    def _granted(self, request: Request) -> None:
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
        if work.request.started_ms < 0:
            work.request.started_ms = self.clock.now_ms

    def on_chunk(self, work: Work, tokens: int) -> None:
        """A chunk is computed: it is pushed if it may be, and after the last the hand-off is due."""
        request = work.request
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
        request.prefilled_ms = now
        self._count(self._load_p, server, request, -1)
        self.prefill_queue.add(now, -1)
        if self._gate is not None:
            self._gate.prefilled(request)
        if request.broken:
            if request.noticed:
                self._release_source(request)
            return
        self.handoff_queue.add(now, 1)
        request.handing = True
        if not request.granted:
            self._parked[server][request] = None
        if self.setup.mode.bind == "prefilled":
            self.clock.after(self.costs.control_ms, self._bind, request)
        self._spill(server)

    def on_pull(self, request: Request) -> None:
        """Decode has a slot and pages: it posts its reads."""
        request.granted_ms = self.clock.now_ms
        assert request.decode is not None
        on_loop = self._posting == "loop"
        request.pending = 0
        request.decode.post(
            self.costs.post_ms(request.prompt), self._posted, (request, request.prompt), on_loop=on_loop
        )

    def on_joined(self, request: Request) -> None:
        """It is being answered."""
        if request.handing:
            request.handing = False
            self.handoff_queue.add(self.clock.now_ms, -1)
        elif request.local and request.prefilled_ms < 0:
            request.prefilled_ms = self.clock.now_ms
            self.prefill_queue.add(self.clock.now_ms, -1)
        if self._gate is not None:
            self._gate.answered(request)

    def on_done(self, request: Request) -> None:
        """Its last token is written."""
        if request.local and request.prefilled_ms < 0:
            request.prefilled_ms = self.clock.now_ms
            self.prefill_queue.add(self.clock.now_ms, -1)
        assert request.decode is not None
        self._count(self._load_d, request.decode, request, -1)
        self._over(request)

    def _over(self, request: Request) -> None:
        self.ended_ms = self.clock.now_ms
        self._ended += 1
        if self._gate is not None and request.decode is not None:
            self._gate.ended(request)
        if self.traffic.users and self._issued < len(self.traffic):
            self.clock.after(0.0, self._arrive, self._issued)
            self._issued += 1

    def reject(self, request: Request) -> None:
        """Admission says no: the client gets 429."""
        self.admission_queue.add(self.clock.now_ms, -1)
        self.rejected += 1
        request.failed = True
        self._over(request)

    # The hand-off.

    def _push(self, request: Request, tokens: int) -> None:
        assert request.prefill is not None
        if not request.broken:
            cost = self.costs.post_ms(tokens)
            request.prefill.post(cost, self._posted, (request, tokens), on_loop=self._posting == "loop")

    def _posted(self, what: tuple[Request, int]) -> None:
        request, tokens = what
        source = request.prefill
        assert source is not None
        self._parked[source].pop(request, None)
        if not request.spilled:
            self._move(what)
            return
        # From the host's memory it first comes back over PCIe.
        nbytes = self.costs.kv_bytes(tokens)
        self.spilled_bytes += nbytes
        self.clock.at(self._copy(source, nbytes), self._move, what)

    def _move(self, what: tuple[Request, int]) -> None:
        request, tokens = what
        if request.broken:
            return
        if not request.limit:
            whole = self.costs.kv_bytes(request.prompt)
            request.limit = whole * min(1.0, request.fails_at)
        nbytes = min(self.costs.kv_bytes(tokens), max(0.0, request.limit - request.sent))
        request.sent += self.costs.kv_bytes(tokens)
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
        if request.sent < self.costs.kv_bytes(request.prompt) * (1 - 1e-9):
            return
        self.moved_bytes += request.limit
        if self._gate is not None:
            self._gate.moved(request)
        if self.setup.mode.reads:
            self._landed(request)
            self.clock.after(self.costs.control_ms, self._release_source, request)
        else:
            self._release_source(request)
            self.clock.after(self.costs.control_ms, self._landed, request)

    def _landed(self, request: Request) -> None:
        request.landed_ms = self.clock.now_ms
        assert request.decode is not None
        request.decode.ready(request)

    def _release_source(self, request: Request) -> None:
        server = request.prefill
        assert server is not None
        self._parked[server].pop(request, None)
        if not request.spilled:
            server.give_back(-(-request.prompt // self.setup.page_tokens) * self.setup.page_tokens)
        self._spill(server)

    def _break(self, request: Request) -> None:
        """A hand-off is known to have failed, and nothing of it can land any more."""
        decode = request.decode
        assert decode is not None
        self.moved_bytes += request.limit
        request.noticed = True
        if request.handing:
            request.handing = False
            self.handoff_queue.add(self.clock.now_ms, -1)
        if request.prefilled_ms >= 0:
            self._release_source(request)
        if self.setup.on_failure == "recompute":
            self.recomputed += 1
            decode.compute(Work(request, request.prompt, local=True, holds_pages=True))
            return
        self.failed += 1
        request.failed = True
        if request.holds_slot:
            request.holds_slot = False
            decode.give_slot()
        decode.give_back(request.pages)
        self._count(self._load_d, decode, request, -1)
        self._over(request)

    # Host memory.

    def _copy(self, server: Server, nbytes: float) -> float:
        """When a copy over this server's PCIe that begins now is over."""
        begin = max(self.clock.now_ms, self._pcie_ms.get(server, 0.0))
        self._pcie_ms[server] = begin + nbytes / self._engine.pcie_bytes_ms
        return self._pcie_ms[server]

    def _spill(self, server: Server) -> None:
        """Makes room for the next prompt by moving out the caches that have waited longest."""
        if not self.setup.offload or not server.works or server not in self._parked:
            return
        wanted = server.need(server.works[0].tokens, 0) - server.pool.free
        for request in list(self._parked[server]):
            if wanted <= 0:
                return
            del self._parked[server][request]
            request.spilled = True
            nbytes = self.costs.kv_bytes(request.prompt)
            self.spilled_bytes += nbytes
            self.clock.at(self._copy(server, nbytes), self._spilled, request)
            wanted -= server.need(request.prompt, 0)

    def _spilled(self, request: Request) -> None:
        assert request.prefill is not None
        request.prefill.give_back(request.prefill.need(request.prompt, 0))

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
