"""Admission in virtual time: `kvxfer.admission`, which the proxy runs, decides who may start and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvxfer.admission import Admission, Admitted, Config, Decision, Decode, Expired, Prefill, Queued
from kvxfer.admission import Request as Asked
from kvxfer.simulate.request import Request
from kvxfer.simulate.server import Server

if TYPE_CHECKING:
    from kvxfer.simulate.cluster import Cluster

__all__ = ["Gate"]


class Gate:
    """Holds requests back until what they need is reserved.

    Answers' lengths are told as they will be, as `max_tokens` tells them. What the SLO of the
    first token leaves beside the prompt itself and its hand-off may be waited: a third each in the queue, at
    the prefill server and on the links.
    """

    def __init__(self, cluster: Cluster) -> None:
        setup, costs = cluster.setup, cluster.costs
        engine = costs.engine(setup.tp)
        prompt = int(np.median(cluster.traffic.prompts))
        per_s = prompt / engine.prompt_ms(prompt, setup.chunk) * 1e3
        gbytes_per_s = engine.link_bytes_ms * 1e3 / 1e9
        own_s = prompt / per_s
        move_s = (costs.post_ms(prompt) + costs.kv_bytes(prompt) / engine.link_bytes_ms) / 1e3
        slo_s = setup.slo_ttft_ms / 1e3
        # What a prompt of the usual length leaves of the time, for all that it may have to wait for.
        spare_s = max(slo_s - own_s - move_s, slo_s / 10)
        self._cluster = cluster
        self._admission = Admission(
            Config(
                kv_bytes_per_token=int(costs.kv_bytes_per_token),
                handoff_ms=costs.post_fixed_ms + 2 * costs.control_ms,
                link_backlog_s=move_s + spare_s / 3,
                prefill_backlog_s=own_s + spare_s / 3,
                queue_wait_s=spare_s / 3,
                route="requests" if setup.route == "requests" else "load",
                time_per_token_ms=engine.step_ms(1, prompt),
            )
        )
        prefills, decodes = cluster.servers
        self._servers = {server.name: server for server in [*prefills, *decodes]}
        for server in prefills:
            self._admission.add_prefill(Prefill(server.name, tokens_per_s=per_s, gbytes_per_s=gbytes_per_s))
        for server in decodes:
            self._admission.add_decode(
                Decode(
                    server.name,
                    pages=engine.tokens // setup.page_tokens,
                    page_tokens=setup.page_tokens,
                    slots=setup.slots,
                    gbytes_per_s=gbytes_per_s,
                    prefill_tokens_per_s=per_s,
                )
            )
        self._asking: dict[int, Request] = {}
        self._alarm_ms = float("inf")

    def offer(self, request: Request) -> None:
        """A request has come."""
        self._asking[request.number] = request
        asked = Asked(request.number, request.prompt, request.answer)
        self._decided(self._admission.handle_request(self._now_s(), asked))
        self._set_alarm()

    def offer_again(self, request: Request, *, local: bool) -> None:
        """One that was in has lost a server: it comes before all that wait."""
        self._admission.handle_failed(request.number)
        self._asking[request.number] = request
        asked = Asked(request.number, request.prompt, request.answer, local=local)
        self._decided(self._admission.handle_request(self._now_s(), asked, first=True))
        self._poll()
        self._set_alarm()

    def down(self, server: Server) -> None:
        """A server has crashed."""
        self._admission.handle_down(server.name)

    def up(self, server: Server) -> None:
        """And is there again."""
        self._admission.handle_up(server.name)
        self._poll()

    def choose(self, request: Request) -> Server:
        """The decode server of a request whose prompt is computed: the one that is best by now."""
        found = self._admission.handle_choice(self._now_s(), request.number)
        assert found is not None
        self._poll()
        return self._servers[found.decode]

    def prefilled(self, request: Request) -> None:
        """Its prompt is computed."""
        self._admission.handle_prefilled(self._now_s(), request.number)
        self._poll()

    def moved(self, request: Request) -> None:
        """Its bytes are off the links."""
        self._admission.handle_moved(request.number)
        self._poll()

    def answered(self, request: Request) -> None:
        """It has a slot, and is being answered."""
        self._admission.handle_first_token(self._now_s(), request.number)
        self._poll()

    def ended(self, request: Request) -> None:
        """It has ended, well or not."""
        if request.failed:
            self._admission.handle_failed(request.number)
        else:
            self._admission.handle_finished(self._now_s(), request.number, answer_tokens=request.answer)
        self._poll()

    def _now_s(self) -> float:
        return self._cluster.clock.now_ms / 1e3

    def _decided(self, decision: Decision) -> None:
        if isinstance(decision, Queued):
            return
        assert isinstance(decision.id, int)
        request = self._asking.pop(decision.id)
        if not isinstance(decision, Admitted):
            self._cluster.reject(request, 1e3 * (decision.retry_after_s or 0.0))
        elif decision.prefill is None:
            self._cluster.begin(request, None, self._servers[decision.decode])
        else:
            self._cluster.begin(request, self._servers[decision.prefill], self._servers[decision.decode])

    def _poll(self) -> None:
        while (decision := self._admission.poll(self._now_s())) is not None:
            assert isinstance(decision, (Admitted, Expired))
            self._decided(decision)

    def _set_alarm(self) -> None:
        """Those who wait too long are told so in time."""
        due_s = self._admission.poll_timeout()
        if due_s is not None and due_s * 1e3 < self._alarm_ms:
            # A moment later, so that rounding does not make it too early.
            self._alarm_ms = due_s * 1e3 + 1e-3
            self._cluster.clock.at(self._alarm_ms, self._rung)

    def _rung(self, _: object) -> None:
        self._alarm_ms = float("inf")
        self._poll()
        self._set_alarm()
