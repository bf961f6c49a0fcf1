"""The proxy's side towards the servers: connections, one leg of a request, health."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvxfer.proxy.openai import Events, Seen, seen_in_body, seen_in_event
from kvxfer.proxy.settings import DecodeServer, PrefillServer, Settings

__all__ = ["Failure", "Opened", "Upstream", "Watch"]

log = logging.getLogger("kvxfer.proxy")

# A host that vanished is noticed in half a minute, however long an answer may take.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
# Below the 5 s after which uvicorn closes an idle connection: one that it closes just then fails a request.
_IDLE_S = 3.0
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.M)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Failure(Exception):
    """A request cannot go on.

    Args:
        text: for the client: what failed and where.
        status: HTTP status.
        by: who gave up: "server", "timeout", or "request" where the server says that the request is wrong.
        server: where it failed, if at a server.
        retry: whether another try may help.
        body: the server's own words, to be passed on as they are.
    """

    def __init__(
        self,
        text: str,
        *,
        status: int = 502,
        by: str = "server",
        server: str = "",
        retry: bool = True,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.by = by
        self.server = server
        self.retry = retry
        self.body = body
        self.headers = headers or {}
        # The servers that it ran on, set when it ends.
        self.places: frozenset[str] = frozenset()


def _words(error: BaseException) -> str:
    """What went wrong, without the library's own details."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return str(error) or type(error).__name__


def _socket(address: Any) -> socket.socket:
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    if family in (socket.AF_INET, socket.AF_INET6):
        for level, option, value in _KEEPALIVE:
            made.setsockopt(level, option, value)
    return made


@dataclass
class Opened:
    """A decode leg that has begun to answer: its first events, or all of an answer that is not streamed."""

    server: str
    response: aiohttp.ClientResponse
    events: list[bytes] = field(default_factory=list)
    cutter: Events = field(default_factory=Events)
    body: bytes | None = None
    seen: Seen = field(default_factory=Seen)


class Upstream:
    """Connections to all servers. `nudge` is called with a server's name when it did not answer."""

    def __init__(self, settings: Settings, nudge: Callable[[str], None]) -> None:
        self._settings = settings
        self._nudge = nudge
        # No limit of connections: admission decides how much is in flight.
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, limit_per_host=0, keepalive_timeout=_IDLE_S, socket_factory=_socket
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.silence_timeout_s
            ),
            # What a client gets are the server's own bytes.
            headers={"Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            read_bufsize=2**18,
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self.session.close()

    def failure(self, server: str, role: str, error: BaseException, when: str) -> Failure:
        """What a failed connection means."""
        self._nudge(server)
        if isinstance(error, aiohttp.SocketTimeoutError):
            text = f"{role} server {server} sent nothing for {self._settings.silence_timeout_s:g} s {when}"
            return Failure(text, status=504, by="timeout", server=server, retry=False)
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            text = f"no connection to {role} server {server} in {self._settings.connect_timeout_s:g} s"
            return Failure(text, status=504, by="timeout", server=server)
        return Failure(f"{role} server {server} failed {when}: {_words(error)}", server=server)

    def _refused(self, server: str, role: str, response: aiohttp.ClientResponse, body: bytes) -> Failure:
        status = response.status
        headers = {"Content-Type": response.headers.get("Content-Type", "application/json")}
        if "Retry-After" in response.headers:
            headers["Retry-After"] = response.headers["Retry-After"]
        text = f"{role} server {server} answered {status}: {body[:500].decode(errors='replace')}"
        wrong = 400 <= status < 500
        if not wrong:
            self._nudge(server)
        return Failure(
            text,
            status=status if status >= 400 else 502,
            by="request" if wrong else "server",
            server=server,
            # One that is busy may have a neighbour that is not.
            retry=not wrong or status == 429,
            body=body if wrong else None,
            headers=headers if wrong else None,
        )

    async def prefill(self, server: PrefillServer, path: str, body: bytes, headers: dict[str, str]) -> Any:
        """The prefill leg; the answer, or `Failure`."""
        name = server.spec.name
        try:
            async with self.session.post(
                server.url + path, data=body, headers=headers, allow_redirects=False
            ) as response:
                data = await response.read()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise self.failure(name, "prefill", error, "before the prompt was computed") from error
        if response.status != 200:
            raise self._refused(name, "prefill", response, data)
        seen = seen_in_body(data)
        if seen.error:
            raise Failure(f"prefill server {name}: {seen.error}", status=502, server=name)
        return json.loads(data)

    async def give_up(self, server: PrefillServer, body: bytes, headers: dict[str, str]) -> None:
        """Says that nobody comes for a room. Where that cannot be said, prefill's own timeout ends it."""
        limit = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        try:
            async with self.session.post(
                server.url + "/v1/completions",
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=limit,
            ) as response:
                await response.read()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            log.debug("prefill server %s was not told to give a room up: %s", server.spec.name, _words(error))

    async def decode(self, server: DecodeServer, path: str, body: bytes, headers: dict[str, str]) -> Opened:
        """The decode leg until its first event, or to its end if it is not streamed."""
        name = server.spec.name
        try:
            response = await self.session.post(
                server.url + path, data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise self.failure(name, "decode", error, "before it answered") from error
        opened = Opened(name, response)
        try:
            if response.status != 200:
                raise self._refused(name, "decode", response, await response.read())
            if not response.content_type.startswith("text/event-stream"):
                opened.body = await response.read()
                opened.seen = seen_in_body(opened.body)
            else:
                # A comment keeps a connection alive and says nothing.
                while not opened.events or all(one.startswith(b":") for one in opened.events):
                    data = await response.content.readany()
                    if not data:
                        raise Failure(
                            f"decode server {name} ended its answer before the first token", server=name
                        )
                    opened.events += opened.cutter.feed(data)
                opened.seen = next(seen_in_event(one) for one in opened.events if not one.startswith(b":"))
            if opened.seen.error:
                raise Failure(
                    f"decode server {name}: {opened.seen.error}",
                    status=opened.seen.status,
                    by="server" if opened.seen.status >= 500 else "request",
                    server=name,
                    retry=opened.seen.status >= 500,
                )
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            response.close()
            raise self.failure(name, "decode", error, "before the first token") from error
        except BaseException:
            response.close()
            raise
        return opened

    async def health(self, url: str) -> tuple[bool | None, str]:
        """Whether the server is well; None where it did not say in time. And why."""
        limit = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        try:
            async with self.session.get(url + "/health", timeout=limit) as response:
                await response.read()
                return response.status == 200, f"/health answered {response.status}"
        except asyncio.TimeoutError:
            return None, f"/health did not answer in {self._settings.health_timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return False, _words(error)

    async def capacity(self, url: str) -> tuple[int, int] | None:
        """Pages and tokens of a page, as vLLM's `/metrics` has them; None where it has not."""
        limit = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        try:
            async with self.session.get(url + "/metrics", timeout=limit) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, UnicodeDecodeError):
            return None
        found = _CACHE_CONFIG.search(text)
        labels = dict(_LABEL.findall(found.group(1))) if found else {}
        try:
            pages, page_tokens = int(labels["num_gpu_blocks"]), int(labels["block_size"])
        except (KeyError, ValueError):
            return None
        return (pages, page_tokens) if pages > 0 and page_tokens > 0 else None


class Watch:
    """Asks one server for its health again and again, and says so when it changes."""

    def __init__(
        self,
        name: str,
        url: str,
        upstream: Upstream,
        settings: Settings,
        changed: Callable[[str, bool, str], Any],
    ) -> None:
        self.up = False
        self.why = "not asked yet"
        self.first = asyncio.Event()
        self._name = name
        self._url = url
        self._upstream = upstream
        self._settings = settings
        self._changed = changed
        self._sooner = asyncio.Event()
        self._nudged = False
        self._silent = 0
        self.task = asyncio.create_task(self._run())

    def nudge(self) -> None:
        """Something failed there: ask now."""
        self._nudged = True
        self._sooner.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            well, why = await self._upstream.health(self._url)
            self._silent = self._silent + 1 if well is None else 0
            if well is None and self.up:
                # Servers under load are slow to answer: one silence is no death.
                well = self._silent < self._settings.health_failures
            now_up = bool(well)
            self.why = why
            if now_up != self.up:
                self.up = now_up
                found = self._changed(self._name, now_up, why)
                if asyncio.iscoroutine(found):
                    await found
            self.first.set()
            # Not `wait_for`: up to Python 3.11 that forgets a cancel which comes with the event.
            timer = loop.call_later(self._settings.health_interval_s, self._sooner.set)
            try:
                await self._sooner.wait()
            finally:
                timer.cancel()
            if self._nudged:
                self._nudged = False
                # Many requests fail at once where a server dies.
                await asyncio.sleep(min(0.05, self._settings.health_interval_s))
            self._sooner.clear()
