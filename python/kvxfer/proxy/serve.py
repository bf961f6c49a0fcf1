"""Listens, and stops when told to."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable

from aiohttp import web

from kvxfer.errors import ListenError
from kvxfer.proxy.router import Router
from kvxfer.proxy.settings import Settings

__all__ = ["serve"]

log = logging.getLogger("kvxfer.proxy")

_BACKLOG = 4096
# A client and two servers, and some for connections that are being made and closed.
_DESCRIPTORS_A_REQUEST = 4


def _raise_descriptors() -> int:
    """As many descriptors as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            log.debug("RLIMIT_NOFILE stays at %d", soft)
    return soft


async def serve(settings: Settings, host: str, port: int, ready: Callable[[Router, str], None]) -> None:
    """Runs the proxy until SIGTERM or SIGINT, and then until the requests in flight are over; a second
    signal, or `drain_timeout_s`, ends them with an error.

    `ready` is called with the router and the URL once it listens. Raises `ListenError` if it cannot.
    """
    descriptors = _raise_descriptors()
    if descriptors != resource.RLIM_INFINITY and descriptors < 1000 * _DESCRIPTORS_A_REQUEST:
        log.warning(
            "%d file descriptors do for about %d requests at a time: raise `ulimit -n`",
            *(descriptors, descriptors // _DESCRIPTORS_A_REQUEST),
        )
    router = Router(settings)
    told = asyncio.Event()
    again = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if told.is_set():
            again.set()
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    # First the port: who finds it taken need not wait for the servers.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        hint = ": another process listens there, take another port" if error.errno == errno.EADDRINUSE else ""
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from error
    runner = web.AppRunner(router.app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await router.start()
        await web.SockSite(runner, listening, backlog=_BACKLOG).start()
        bound = runner.addresses[0]
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        ready(router, f"http://{shown}:{bound[1]}")
        await told.wait()
        log.info("stopping: %d requests in flight", router.in_flight)
        drained = asyncio.create_task(router.drain(settings.drain_timeout_s))
        hurry = asyncio.create_task(again.wait())
        await asyncio.wait({drained, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, hurry):
            task.cancel()
        if router.in_flight:
            log.warning("%d requests in flight are ended", router.in_flight)
            await router.halt()
    finally:
        if hasattr(router, "upstream"):
            await router.stop()
        await runner.cleanup()
        listening.close()
