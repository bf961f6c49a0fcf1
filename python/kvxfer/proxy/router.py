"""The router: one request in, two legs out."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

import kvxfer
from kvxfer.admission import Admission, Admitted, AnswerLengths, Expired, Queued, Refused, Request
from kvxfer.proxy.metrics import Metrics
from kvxfer.proxy.openai import (
    COMPLETION_PATHS,
    BadRequest,
    Incoming,
    Seen,
    decode_params,
    give_up_body,
    leg_body,
    local_params,
    parse,
    prefill_body,
    seen_in_event,
)
from kvxfer.proxy.other_paths import health, metrics, models
from kvxfer.proxy.replies import (
    TO_SERVER,
    ClientGone,
    Told,
    deliver,
    error,
    failed,
    failure_event,
    json_errors,
    not_admitted,
    passed,
)
from kvxfer.proxy.settings import Settings
from kvxfer.proxy.upstream import Failure, Opened, Upstream, Watch

__all__ = ["Router"]

log = logging.getLogger("kvxfer.proxy")

_MEAN = 0.05
# No text has more or fewer characters a token; what says so is a miscount.
_LEAST_CHARS, _MOST_CHARS = 0.25, 16.0


class _Flow:
    """One request on its way through the proxy, over all its tries."""

    __slots__ = (
        *("admitted_s", "began_s", "first_s", "headers", "incoming", "opened"),
        *("prefill", "prefilled_s", "reached", "sent_s", "web"),
    )

    def __init__(self, request: web.Request, incoming: Incoming, now_s: float) -> None:
        self.web = request
        self.incoming = incoming
        self.headers = {key: request.headers[key] for key in TO_SERVER if key in request.headers}
        self.headers["Content-Type"] = "application/json"
        self.began_s = now_s
        # Whether anything has reached the client.
        self.reached = False
        self.opened: Opened | None = None
        self.admitted_s = now_s
        self.sent_s = now_s
        # The prefill server of this try, from when it got its leg.
        self.prefill: str | None = None
        self.prefilled_s: float | None = None
        self.first_s: float | None = None


class Router:
    """Sends each request to a prefill and a decode server. `start` and `stop` it; `app` is the web
    application.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.admission = Admission(settings.admission)
        self.prefill = {one.spec.name: one for one in settings.prefill}
        self.decode = {one.spec.name: one for one in settings.decode}
        for prefill in settings.prefill:
            self.admission.add_prefill(prefill.spec)
            self.admission.handle_down(prefill.spec.name)
        for decode in settings.decode:
            self.admission.add_decode(decode.spec)
            self.admission.handle_down(decode.spec.name)
        self.metrics = Metrics(self.admission.stats, time.monotonic)
        self.lengths = AnswerLengths(start=settings.answer_tokens)
        self.chars_per_token = settings.chars_per_token
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False
        self.stopping = False
        self._waiting: dict[int, asyncio.Future[Admitted | Expired]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._flows: dict[asyncio.Task[Any], _Flow] = {}
        # Of those, the ones whose answer is complete here and is taken by the client still.
        self._delivering: set[_Flow | None] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._warned: set[str] = set()
        self.watches: dict[str, Watch] = {}
        self.upstream: Upstream
        self.app = web.Application(client_max_size=settings.max_body_mib << 20, middlewares=[json_errors])
        for path in COMPLETION_PATHS:
            self.app.router.add_post(path, self._complete)
        for path, answer in (("/v1/models", models), ("/health", health), ("/metrics", metrics)):
            self.app.router.add_get(path, partial(answer, self))

    async def start(self) -> None:
        """Connects, and asks every server once how it is."""
        self.upstream = Upstream(self.settings, self._nudge)
        urls = {one.spec.name: one.url for one in self.settings.prefill}
        urls |= {one.spec.name: one.url for one in self.settings.decode}
        for name, url in urls.items():
            self.watches[name] = Watch(name, url, self.upstream, self.settings, self._changed)
        await asyncio.gather(*(watch.first.wait() for watch in self.watches.values()))

    async def drain(self, timeout_s: float) -> bool:
        """Takes no more requests and waits for those in flight; whether all have ended."""
        self.draining = True
        try:
            await asyncio.wait_for(self.idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def halt(self) -> None:
        """Ends all requests in flight, each with an error that its client sees."""
        self.draining = self.stopping = True
        for task, flow in list(self._flows.items()):
            if flow in self._delivering:
                # Nobody can tell the client more in an answer whose length it knows: the connection breaks.
                if flow.web.transport is not None:
                    flow.web.transport.abort()
            elif flow.opened is not None and flow.reached:
                # The stream itself then tells its client.
                flow.opened.response.close()
            else:
                task.cancel()
        await self.drain(5.0)

    async def stop(self) -> None:
        """Closes all connections."""
        self.draining = self.stopping = True
        tasks = [*self._background, *(watch.task for watch in self.watches.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        await self.upstream.close()

    # Servers that come and go.

    def _nudge(self, name: str) -> None:
        if name in self.watches:
            self.watches[name].nudge()

    async def _changed(self, name: str, up: bool, why: str) -> None:
        role = "prefill" if name in self.prefill else "decode"
        if not up:
            self.admission.handle_down(name)
            log.warning("%s server %s is out: %s", role, name, why)
            return
        server = self.decode.get(name)
        if server is not None and server.spec.pages is None:
            found = await self.upstream.capacity(server.url)
            if found is not None:
                self.admission.handle_capacity(name, pages=found[0], page_tokens=found[1])
                log.info("decode server %s has %d pages of %d tokens", name, *found)
            else:
                self._warn(
                    name,
                    f"decode server {name} does not say how many pages it has, so they limit nothing: add "
                    "pages=N,page-tokens=N to its --decode",
                )
        self.admission.handle_up(name)
        log.info("%s server %s is in", role, name)
        self._pump()

    def _warn(self, key: str, text: str) -> None:
        """Says something once."""
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s", text)

    # Admission.

    def _pump(self) -> None:
        """Lets those in that can get in now."""
        now_s = time.monotonic()
        while (found := self.admission.poll(now_s)) is not None:
            waiting = self._waiting.pop(found.id, None)  # type: ignore[call-overload]
            if waiting is not None and not waiting.done():
                waiting.set_result(found)
            elif isinstance(found, Admitted):
                self.admission.handle_failed(found.id)
        due = self.admission.poll_timeout()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due - now_s) + 0.001, self._pump)

    def _tokens(self, incoming: Incoming) -> tuple[int, int]:
        """Tokens of the prompt and of the answer to reserve for.

        An estimate never exceeds what the largest decode server has: whether a request does is for it to say.
        """
        most = self.admission.most_tokens or sys.maxsize
        if incoming.prompt_tokens is not None:
            prompt = max(1, incoming.prompt_tokens)
        else:
            prompt = max(1, min(most, math.ceil(incoming.chars / self.chars_per_token)))
        return prompt, max(0, min(most - prompt, self.lengths.expected(incoming.max_tokens)))

    async def _admit(self, flow: _Flow, room: int, avoid: frozenset[str], again: bool) -> Admitted:
        incoming = flow.incoming
        prompt_tokens, answer_tokens = self._tokens(incoming)
        request = Request(
            room,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            local=bool(incoming.local),
            avoid=avoid,
        )
        found = self.admission.handle_request(time.monotonic(), request, first=again)
        if isinstance(found, Queued):
            waiting: asyncio.Future[Admitted | Expired] = asyncio.get_running_loop().create_future()
            self._waiting[room] = waiting
            self._pump()
            try:
                found = await waiting
            finally:
                self._waiting.pop(room, None)
        if isinstance(found, Refused | Expired):
            expired = isinstance(found, Expired)
            self.metrics.refused.labels("queue_wait" if expired else found.reason.value).inc()
            raise not_admitted(found, request, self.settings.admission.queue_wait_s)
        assert isinstance(found, Admitted)
        self.metrics.admitted()
        if found.prefill is None:
            up = any(self.watches[name].up for name in self.prefill)
            self.metrics.recomputed.labels(incoming.local or ("sooner" if up else "no_prefill")).inc()
        return found

    # A request.

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if self.draining:
            return error("the proxy is about to stop and takes no more requests", 503, {"Retry-After": "1"})
        self.in_flight += 1
        self.idle.clear()
        began_s = time.monotonic()
        outcome = "failed"
        flow: _Flow | None = None
        try:
            try:
                incoming = parse(path, await request.read())
            except BadRequest as broken:
                outcome = "bad_request"
                return error(str(broken), 400)
            except web.HTTPException:
                outcome = "bad_request"
                raise
            flow = _Flow(request, incoming, began_s)
            task = asyncio.current_task()
            assert task is not None
            self._flows[task] = flow
            try:
                response = await self._tries(flow)
                outcome = "answered"
                return await self._deliver(flow, response)
            except Failure as failure:
                outcome = {"request": "bad_request", "refused": "refused"}.get(failure.by, "failed")
                if failure.by in ("server", "timeout"):
                    self.metrics.aborts.labels(failure.by).inc()
                return await self._deliver(flow, failed(failure))
            except Told as told:
                outcome = "failed"
                self.metrics.aborts.labels(told.by).inc()
                return await self._deliver(flow, told.response)
        except (asyncio.CancelledError, ConnectionResetError):
            # Who leaves when all is on its way may well have got it.
            if self.stopping or flow not in self._delivering:
                outcome = "aborted"
                self.metrics.aborts.labels("shutdown" if self.stopping else "client").inc()
            if not self.stopping or flow is None or flow.reached:
                raise
            return error("the proxy was told to stop before the request was over", 503)
        finally:
            self.metrics.requests.labels(path, outcome).inc()
            self.metrics.request.observe(time.monotonic() - began_s)
            me = asyncio.current_task()
            if me is not None and (gone := self._flows.pop(me, None)) is not None:
                self._delivering.discard(gone)
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    async def _deliver(self, flow: _Flow, response: web.StreamResponse) -> web.StreamResponse:
        flow.reached = True
        self._delivering.add(flow)
        return await deliver(flow.web, response)

    async def _tries(self, flow: _Flow) -> web.StreamResponse:
        avoid: frozenset[str] = frozenset()
        attempt = 0
        while True:
            room = kvxfer.new_room()
            try:
                return await self._try(flow, room, avoid, attempt > 0)
            except Failure as failure:
                if failure.by in ("server", "timeout"):
                    role = "prefill" if failure.server in self.prefill else "decode"
                    self.metrics.failures.labels(failure.server, role).inc()
                    log.warning("room %d: %s", room, failure)
                attempt += 1
                if not failure.retry or flow.reached or attempt > self.settings.retries or self.stopping:
                    raise
                # Where a hand-off breaks, either side may be the cause.
                avoid |= failure.places | {failure.server}
                self.metrics.retries.inc()

    async def _try(self, flow: _Flow, room: int, avoid: frozenset[str], again: bool) -> web.StreamResponse:
        tasks: list[asyncio.Task[Any]] = []
        places = frozenset[str]()
        flow.prefill = None
        flow.prefilled_s = flow.first_s = None
        answer_tokens: int | None = None
        finished = False
        try:
            admitted = await self._admit(flow, room, avoid, again)
            places = frozenset(one for one in (admitted.prefill, admitted.decode) if one)
            flow.admitted_s = time.monotonic()
            opened = flow.opened = await self._legs(flow, room, admitted, tasks)
            response: web.StreamResponse
            try:
                if opened.body is not None:
                    seen = opened.seen
                    response = web.Response(body=opened.body, status=200, headers=passed(opened.response))
                else:
                    response, seen = await self._stream(flow, room, opened)
            finally:
                opened.response.close()
            answer_tokens = seen.usage_answer if seen.usage_answer is not None else seen.tokens or None
            self._learn(flow, seen, answer_tokens)
            finished = True
            return response
        except Failure as failure:
            failure.places = places
            raise
        finally:
            # The prefill leg of an answer that is complete may end in its own time.
            for task in tasks:
                if finished:
                    self._keep(task)
                else:
                    task.cancel()
            if finished:
                self.admission.handle_finished(time.monotonic(), room, answer_tokens=answer_tokens)
            else:
                self.admission.handle_failed(room)
                for ended in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(ended, Opened):
                        ended.response.close()
                self._give_up(flow, room, tasks)
            self._pump()

    def _give_up(self, flow: _Flow, room: int, tasks: list[asyncio.Task[Any]]) -> None:
        """Tells prefill that nobody comes for a prompt, unless prefill itself failed or decode has it."""
        leg = tasks[0] if tasks else None
        if leg is None or flow.prefill is None or flow.first_s is not None or self.stopping:
            return
        if not leg.cancelled() and leg.exception() is not None:
            return
        server = self.prefill[flow.prefill]
        self._keep(
            asyncio.create_task(
                self.upstream.give_up(server, give_up_body(flow.incoming, room), flow.headers)
            )
        )

    def _keep(self, task: asyncio.Task[Any]) -> None:
        if not task.done():
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        # Its failure is of no interest any more, and asyncio shall not complain that nobody looked.
        task.add_done_callback(lambda one: one.cancelled() or one.exception())

    async def _legs(
        self, flow: _Flow, room: int, admitted: Admitted, tasks: list[asyncio.Task[Any]]
    ) -> Opened:
        """Both legs, until decode has begun to answer."""
        incoming, path = flow.incoming, flow.incoming.path
        headers = flow.headers
        if "X-Request-Id" not in headers:
            headers = {**headers, "X-Request-Id": f"kvxfer-{room:x}"}
        decode = self.decode[admitted.decode]
        flow.sent_s = time.monotonic()
        if admitted.prefill is None:
            body = leg_body(incoming, local_params())
            tasks.append(asyncio.create_task(self.upstream.decode(decode, path, body, headers)))
            opened: Opened = await tasks[0]
            self._first_token(flow, room)
            return opened
        flow.prefill = admitted.prefill
        source = self.prefill[admitted.prefill].source
        prefill = asyncio.create_task(self._prefill_leg(flow, room, admitted, headers))
        tasks.append(prefill)
        params = decode_params(room, source)
        if self.settings.decode_choice == "late":
            given = self._handed_off(await prefill, admitted.prefill)
            params = {**params, **given, "do_remote_prefill": True, "do_remote_decode": False}
            chosen = self.admission.handle_choice(time.monotonic(), room)
            decode = self.decode[chosen.decode if chosen else admitted.decode]
            flow.sent_s = time.monotonic()
        body = leg_body(incoming, params)
        answer = asyncio.create_task(self.upstream.decode(decode, path, body, headers))
        tasks.append(answer)
        pending: set[asyncio.Task[Any]] = {answer} if prefill.done() else {prefill, answer}
        while answer in pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if prefill in done and (answer not in done or answer.exception() is not None):
                # Raises what went wrong there: decode only suffers from it, and would wait in vain.
                self._handed_off(prefill.result(), admitted.prefill)
        opened = answer.result()
        if opened.body is None:
            self._first_token(flow, room)
        return opened

    def _handed_off(self, answer: Any, server: str) -> dict[str, Any]:
        """What a prefill server says of the hand-off; `Failure` if it has computed the prompt for itself."""
        given = answer.get("kv_transfer_params")
        if not isinstance(given, dict) or "room" not in given:
            raise Failure(
                f"prefill server {server} answered without kv_transfer_params, so it hands nothing off: "
                "start it with kvxfer's connector, as kv_producer or kv_both",
                server=server,
                retry=False,
            )
        return given

    async def _prefill_leg(self, flow: _Flow, room: int, admitted: Admitted, headers: dict[str, str]) -> Any:
        assert admitted.prefill is not None
        server = self.prefill[admitted.prefill]
        early = self.settings.decode_choice == "early"
        body = prefill_body(flow.incoming, room, server.source if early else None)
        answer = await self.upstream.prefill(server, flow.incoming.path, body, headers)
        now_s = time.monotonic()
        flow.prefilled_s = now_s
        usage = answer.get("usage")
        counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if isinstance(counted, int) and counted > 0:
            self._count(flow.incoming, counted)
        else:
            counted = None
        self.admission.handle_prefilled(now_s, room, prompt_tokens=counted)
        # When the bytes are over cannot be seen from here; the first token says so at the latest.
        asyncio.get_running_loop().call_later(admitted.move_s, self._moved, room)
        self.metrics.part.labels("admission").observe(flow.admitted_s - flow.began_s)
        self.metrics.part.labels("prefill").observe(now_s - flow.admitted_s)
        self._pump()
        return answer

    def _moved(self, room: int) -> None:
        if self.admission.handle_moved(room):
            self._pump()

    def _count(self, incoming: Incoming, tokens: int) -> None:
        """What a prompt of so many characters came to."""
        if incoming.prompt_tokens is None and incoming.chars >= 16:
            found = min(_MOST_CHARS, max(_LEAST_CHARS, incoming.chars / tokens))
            self.chars_per_token += _MEAN * (found - self.chars_per_token)

    def _first_token(self, flow: _Flow, room: int) -> None:
        flow.first_s = time.monotonic()
        self.admission.handle_first_token(flow.first_s, room)
        self.metrics.first_token.observe(flow.first_s - flow.began_s)
        self._pump()

    def _learn(self, flow: _Flow, seen: Seen, answer_tokens: int | None) -> None:
        """What a complete answer teaches."""
        if seen.usage_prompt:
            if flow.prefilled_s is None:
                self._count(flow.incoming, seen.usage_prompt)
            self.metrics.prompt_tokens.inc(seen.usage_prompt)
        if answer_tokens:
            self.metrics.answer_tokens.inc(answer_tokens)
            self.lengths.add(answer_tokens)
        if flow.first_s is None:
            return
        now_s = time.monotonic()
        if answer_tokens and answer_tokens > 1:
            self.metrics.per_token.observe((now_s - flow.first_s) / (answer_tokens - 1))
        if flow.prefilled_s is None:
            return
        rest = max(0.0, flow.first_s - flow.prefilled_s)
        if seen.loaded_ms is None:
            self.metrics.part.labels("handoff_and_slot").observe(rest)
        else:
            loaded_s = flow.sent_s + seen.loaded_ms / 1e3
            handoff = min(rest, max(0.0, loaded_s - flow.prefilled_s))
            self.metrics.part.labels("handoff").observe(handoff)
            self.metrics.part.labels("slot").observe(rest - handoff)

    async def _stream(self, flow: _Flow, room: int, opened: Opened) -> tuple[web.StreamResponse, Seen]:
        """Passes events on as they come, each as it is, and never a part of one."""
        response = web.StreamResponse(status=200, headers=passed(opened.response))
        total = Seen()
        events = opened.events
        flow.reached = True
        try:
            await response.prepare(flow.web)
        except ConnectionResetError as broken:
            raise ClientGone from broken
        while True:
            out: list[bytes] = []
            for event in events:
                seen = seen_in_event(event)
                if seen.error:
                    # The words are the server's; the [DONE] that some send after them is not passed on.
                    await self._end_badly(response, out, event)
                    raise Told(response, "server")
                out.append(event)
                total.done |= seen.done
                total.tokens += seen.tokens
                for name in ("usage_prompt", "usage_answer", "loaded_ms"):
                    if (value := getattr(seen, name)) is not None:
                        setattr(total, name, value)
            if out:
                try:
                    await response.write(b"".join(out))
                except ConnectionResetError as broken:
                    raise ClientGone from broken
                self.admission.handle_answer(room, total.tokens)
            try:
                data = await opened.response.content.readany()
                failure = (
                    None
                    if data or total.done
                    else Failure(
                        f"decode server {opened.server} ended the answer before it was complete",
                        server=opened.server,
                    )
                )
            except asyncio.CancelledError:
                if not total.done or self.stopping:
                    raise
                # The client has the whole answer, and hangs up before the server's connection ends.
                break
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as broken:
                data = b""
                # After the last event nothing is missing.
                failure = (
                    None
                    if total.done
                    else self.upstream.failure(opened.server, "decode", broken, "in the middle of the answer")
                )
            if failure is not None:
                self.metrics.failures.labels(opened.server, "decode").inc()
                log.warning("room %d: %s", room, failure)
                await self._end_badly(response, [], failure_event(failure))
                raise Told(response, "shutdown" if self.stopping else failure.by)
            if not data:
                break
            events = opened.cutter.feed(data)
        try:
            await response.write_eof(opened.cutter.rest)
        except ConnectionResetError:
            # It has had the last event, or has gone: nothing is left to do either way.
            pass
        return response, total

    async def _end_badly(self, response: web.StreamResponse, before: list[bytes], event: bytes) -> None:
        try:
            await response.write(b"".join([*before, event]))
            await response.write_eof()
        except ConnectionResetError as broken:
            raise ClientGone from broken
