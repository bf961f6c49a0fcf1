"""What clients are told when something went wrong."""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp import web

from kvxfer.proxy.openai import COMPLETION_PATHS, error_body, error_event
from kvxfer.proxy.upstream import Failure

__all__ = ["ClientGone", "Told", "error", "failed", "failure_event", "json_errors", "passed"]

# What of a server's headers the client gets.
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
