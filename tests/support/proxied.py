"""A proxy in this process, before fake servers."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import aiohttp
from aiohttp import web
from fake_openai import Exchange, Fake

from kvxfer.admission import Config
from kvxfer.proxy import Router, Settings, parse_decode, parse_prefill

LIMIT_S = 60.0


class Scene:
    """Fakes, the router before them, and a client."""

    def __init__(self, prefill: list[Fake], decode: list[Fake], router: Router, url: str) -> None:
        self.prefill, self.decode, self.router, self.url = prefill, decode, router, url
        self.client: aiohttp.ClientSession

    async def post(self, path: str = "/v1/completions", **body: Any) -> tuple[int, Any, Any]:
        """Status, headers and body of an answer that is not streamed."""
        async with self.client.post(self.url + path, json=body) as response:
            return response.status, response.headers, await response.json()

    async def ask(self, prompt: str = "Say something.", **more: Any) -> tuple[int, Any, Any]:
        return await self.post(prompt=prompt, **more)

    async def stream(self, **more: Any) -> bytes:
        """The bytes of a streamed answer."""
        body = {"prompt": "Say something.", "stream": True, **more}
        async with self.client.post(self.url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return await response.read()

    async def metrics(self) -> dict[str, float]:
        async with self.client.get(self.url + "/metrics") as response:
            text = await response.text()
        found = re.findall(r"^([a-z_]+(?:\{.*\})?) (\S+)$", text, re.M)
        return {name: float(value) for name, value in found}

    async def health_is(self, name: str, up: bool) -> None:
        """Waits until the router has noticed."""
        while self.router.watches[name].up != up:
            await asyncio.sleep(0.005)

    def nothing_is_held(self) -> None:
        stats = self.router.admission.stats()
        assert stats.queued == 0
        for one in (*stats.prefill, *stats.decode):
            held = (
                one.requests,
                one.tokens_in_flight,
                one.bytes_in_flight,
                one.pages_reserved,
                one.slots_held,
            )
            assert held == (0, 0, 0, 0, 0), one


@asynccontextmanager
async def scene(
    prefills: int = 1,
    decodes: int = 1,
    *,
    decode_settings: str = ",pages=4000,slots=256",
    prefill_settings: str = "",
    admission: Config | None = None,
    **settings: Any,
) -> AsyncIterator[Scene]:
    if ",pages=" in decode_settings and ",page-tokens=" not in decode_settings:
        decode_settings += ",page-tokens=16"
    exchange = Exchange()
    prefill = [await Fake("prefill", exchange).start() for _ in range(prefills)]
    decode = [await Fake("decode", exchange).start() for _ in range(decodes)]
    base = Settings(
        prefill=tuple(parse_prefill(one.url + prefill_settings) for one in prefill),
        decode=tuple(parse_decode(one.url + decode_settings) for one in decode),
        admission=admission or Config(),
        health_interval_s=0.05,
    )
    router = Router(replace(base, **settings))
    await router.start()
    runner = web.AppRunner(router.app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    made = Scene(prefill, decode, router, f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as made.client:
            yield made
    finally:
        await router.halt()
        await router.stop()
        await runner.cleanup()
        for one in (*prefill, *decode):
            await one.stop()


@contextmanager
def in_background(**settings: Any) -> Iterator[tuple[Scene, Callable[[Coroutine[Any, Any, Any]], Any]]]:
    """A scene on a loop of its own thread, and what runs a coroutine there and waits for its result."""
    ready: Future[tuple[Scene, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        over = asyncio.Event()
        async with scene(**settings) as made:
            ready.set_result((made, asyncio.get_running_loop(), over))
            await over.wait()

    def body() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=body, name="scene")
    thread.start()
    made, loop, over = ready.result(LIMIT_S)
    try:
        yield made, lambda asked: asyncio.run_coroutine_threadsafe(asked, loop).result(LIMIT_S)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


async def _limited(test: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(test)
    done, _ = await asyncio.wait({task}, timeout=LIMIT_S)
    if not done:
        for one in asyncio.all_tasks():
            one.print_stack()
        task.cancel()
    await task


def run(test: Coroutine[Any, Any, None]) -> None:
    """Runs a test; where it hangs, it says where."""
    asyncio.run(_limited(test))
