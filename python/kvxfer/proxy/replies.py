"""What clients are told when something went wrong."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import aiohttp
from aiohttp import web

from kvxfer.admission import Expired, Reason, Refused, Request
from kvxfer.proxy.openai import COMPLETION_PATHS, error_body, error_event
from kvxfer.proxy.upstream import Failure

__all__ = [
    "TO_SERVER",
    "ClientGone",
    "Told",
    "deliver",
    "error",
    "failed",
    "failure_event",
    "json_errors",
    "not_admitted",
    "passed",
]

# What of a request's headers servers get, and what of a server's headers the client gets.
TO_SERVER = ("Authorization", "X-Request-Id", "traceparent", "tracestate", "User-Agent")
_TO_CLIENT = ("Content-Type", "Cache-Control", "X-Request-Id", "openai-processing-ms")


class ClientGone(ConnectionResetError):
    """The client has left. The web library knows what to do with a connection that was reset."""


class Told(Exception):
    """The answer failed after its first bytes, and the client was told in the stream.

    Args:
        response: what it was told in.
        by: who gave the request up.
    """

    def __init__(self, response: web.StreamResponse, by: str) -> None:
        super().__init__(by)
        self.response = response
        self.by = by


_LOOK_AGAIN_S = 0.02


async def deliver(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Sends an answer, or the rest of one, until its last byte has left this process.

    The web library would do so after the handler, and what a slow client had not taken by then would be lost
    with a process that is told to stop.
    """
    try:
        await response.prepare(request)
        await response.write_eof()
    except ConnectionResetError as broken:
        raise ClientGone from broken
    while (transport := request.transport) is not None and not transport.is_closing():
        # Where the client leaves, this task is cancelled.
        if not transport.get_write_buffer_size():
            break
        await asyncio.sleep(_LOOK_AGAIN_S)
    return response


def passed(response: aiohttp.ClientResponse) -> dict[str, str]:
    """The headers of a server that the client gets."""
    return {key: response.headers[key] for key in _TO_CLIENT if key in response.headers}


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error(text: str, status: int, headers: dict[str, str] | None = None) -> web.Response:
    """An error in the form that OpenAI's clients read."""
    return web.Response(
        body=error_body(text, _kind(status), status),
        status=status,
        headers={"Content-Type": "application/json", **(headers or {})},
    )


def failed(failure: Failure) -> web.Response:
    """A failure before anything reached the client; a server's own words go through as they are."""
    if failure.body is not None:
        return web.Response(body=failure.body, status=failure.status, headers=failure.headers)
    return error(str(failure), failure.status, failure.headers)


def failure_event(failure: Failure) -> bytes:
    """A failure in the middle of a stream."""
    return error_event(str(failure), _kind(failure.status), failure.status)


_LACKING = {
    Reason.DECODE_PAGES: "no decode server has enough free KV pages",
    Reason.DECODE_SLOTS: "no decode server has a free slot",
    Reason.LINK: "the links to the decode servers are busy",
    Reason.PREFILL: "the prefill servers are busy",
    Reason.NO_DECODE: "no decode server is up",
    Reason.NO_PREFILL: "no prefill server is up",
}


def not_admitted(found: Refused | Expired, request: Request, queue_wait_s: float) -> Failure:
    """What a request that does not get in is told."""
    reason = found.reason
    if reason is Reason.TOO_LARGE:
        return Failure(
            f"the prompt ({request.prompt_tokens} tokens) needs more KV pages than any decode server has",
            status=400,
            by="refused",
            retry=False,
        )
    seconds = max(1, math.ceil(found.retry_after_s or 1.0))
    waited = f", and it waited {queue_wait_s:g} s" if isinstance(found, Expired) else ""
    return Failure(
        f"not admitted: {_LACKING[reason]}{waited}; try again in {seconds} s",
        status=503 if reason in (Reason.NO_DECODE, Reason.NO_PREFILL) else 429,
        by="refused",
        retry=False,
        headers={"Retry-After": str(seconds)},
    )


@web.middleware
async def json_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """What the web library refuses by itself, in the form that OpenAI's clients read."""
    try:
        response: web.StreamResponse = await handler(request)
    except web.HTTPException as refused:
        text = refused.reason
        if refused.status == 404:
            paths = ", ".join((*COMPLETION_PATHS, "/v1/models", "/health", "/metrics"))
            text = f"there is no {request.path}; there are {paths}"
        return error(text, refused.status)
    return response
