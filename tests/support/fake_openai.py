"""Servers that speak the OpenAI API and hand off nothing: what a router sees of an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Behaviour = Callable[["Call"], Awaitable[web.StreamResponse]]


class Exchange:
    """Stands for the fabric: decode's leg waits here until prefill's leg with the same room is over."""

    def __init__(self) -> None:
        self._pushed: dict[int, asyncio.Event] = {}

    def room(self, room: int) -> asyncio.Event:
        return self._pushed.setdefault(room, asyncio.Event())


class Call:
    """One request that a fake got."""

    def __init__(self, fake: Fake, request: web.Request, body: dict[str, Any]) -> None:
        self.fake = fake
        self.request = request
        self.body = body
        self.path = request.path
        self.headers = request.headers
        self.params: dict[str, Any] = body.get("kv_transfer_params") or {}
        self.room: int = self.params.get("room", 0)
        self.source: str = self.params.get("source", "")
        # Set when the other side closed the connection before the answer was complete.
        self.dropped = asyncio.Event()
        self.ended = asyncio.Event()


class Fake:
    """A server. `behave` decides its answers; `calls` is what it got, and `next_call` waits for one."""

    def __init__(self, role: str, exchange: Exchange) -> None:
        self.role = role
        self.exchange = exchange
        self.calls: list[Call] = []
        self.behave: Behaviour = good_prefill if role == "prefill" else good_decode
        self.healthy = 200
        self.metrics = ""
        self.port = 0
        self._arrived = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._transports: set[Any] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> Fake:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=4096)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def die(self) -> None:
        """As a process that is killed: every connection breaks at once, and nothing listens."""
        for transport in list(self._transports):
            transport.abort()
        await self.stop()

    async def next_call(self, number: int = 1) -> Call:
        """The call of this number, once it has come."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) >= number)
        return self.calls[number - 1]

    async def _health(self, request: web.Request) -> web.Response:
        self._transports.add(request.transport)
        return web.Response(status=self.healthy)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.name}], "key": request.headers.get("Authorization")})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        call = Call(self, request, json.loads(await request.read()))
        self._transports.add(request.transport)
        async with self._arrived:
            self.calls.append(call)
            self._arrived.notify_all()
        try:
            return await self.behave(call)
        except (asyncio.CancelledError, ConnectionResetError):
            call.dropped.set()
            raise
        finally:
            self._transports.discard(request.transport)
            call.ended.set()


def tokens_of(body: dict[str, Any]) -> int:
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 5)


async def good_prefill(call: Call) -> web.StreamResponse:
    call.fake.exchange.room(call.room).set()
    return web.json_response(
        {
            "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 12, "completion_tokens": 1},
            "kv_transfer_params": {"room": call.room, "source": "10.9.8.7:8998"},
        }
    )


def answer(tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "choices": [
            {"index": 0, "text": "".join(f" t{n}" for n in range(tokens)), "finish_reason": "length"}
        ],
        "usage": {"prompt_tokens": 12, "completion_tokens": tokens},
        **more,
    }


def events(tokens: int, *, done: bool = True, usage: bool = False, **last: Any) -> list[bytes]:
    found = [
        b'data: {"id": "cmpl-1", "choices": [{"index": 0, "text": " t%d", "finish_reason": null}]}\n\n' % n
        for n in range(tokens)
    ]
    if usage or last:
        end: dict[str, Any] = {"id": "cmpl-1", "choices": [], **last}
        if usage:
            end["usage"] = {"prompt_tokens": 12, "completion_tokens": tokens}
        found.append(b"data: " + json.dumps(end).encode() + b"\n\n")
    return [*found, b"data: [DONE]\n\n"] if done else found


async def arrived(call: Call) -> None:
    """Waits for the hand-off, if there is one."""
    if call.params.get("do_remote_prefill"):
        await call.fake.exchange.room(call.room).wait()


async def begin_stream(call: Call) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(call.request)
    return response


async def good_decode(call: Call) -> web.StreamResponse:
    await arrived(call)
    if not call.body.get("stream"):
        return web.json_response(answer(tokens_of(call.body)))
    response = await begin_stream(call)
    for event in events(tokens_of(call.body)):
        await response.write(event)
    await response.write_eof()
    return response


def status(code: int, text: str = "no", **headers: str) -> Behaviour:
    async def behave(call: Call) -> web.StreamResponse:
        body = {"error": {"message": text, "type": "fake", "code": code}}
        return web.json_response(body, status=code, headers=headers)

    return behave


def when(event: asyncio.Event, then: Behaviour) -> Behaviour:
    """Waits first."""

    async def behave(call: Call) -> web.StreamResponse:
        await event.wait()
        return await then(call)

    return behave


async def never(call: Call) -> web.StreamResponse:
    """Until the other side leaves."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
