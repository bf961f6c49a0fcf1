"""What the proxy answers beside completions: which models, how it is, and its metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from kvxfer.proxy.replies import TO_SERVER, error, passed

if TYPE_CHECKING:
    from kvxfer.proxy.router import Router

__all__ = ["health", "metrics", "models"]


async def models(router: Router, request: web.Request) -> web.StreamResponse:
    """What decode serves, in the words of the first server that answers."""
    headers = {key: request.headers[key] for key in TO_SERVER if key in request.headers}
    last = "no decode server is up"
    for name, server in router.decode.items():
        if not router.watches[name].up:
            continue
        try:
            async with router.upstream.session.get(
                server.url + "/v1/models",
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=router.settings.health_timeout_s),
            ) as found:
                body = await found.read()
                return web.Response(body=body, status=found.status, headers=passed(found))
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as broken:
            last = str(router.upstream.failure(name, "decode", broken, "at /v1/models"))
    return error(last, 503, {"Retry-After": "5"})


async def health(router: Router, _: web.Request) -> web.Response:
    """Whether requests can be served now, and how each server is."""
    up = {name: watch.up for name, watch in router.watches.items()}
    prefill = any(up[name] for name in router.prefill) or any(
        one.spec.prefill_tokens_per_s > 0 for one in router.settings.decode
    )
    well = prefill and any(up[name] for name in router.decode) and not router.draining
    body: dict[str, Any] = {
        "status": "draining" if router.draining else "ok" if well else "down",
        "servers": {
            name: {
                "role": "prefill" if name in router.prefill else "decode",
                "up": watch.up,
                "why": watch.why,
            }
            for name, watch in router.watches.items()
        },
    }
    return web.json_response(body, status=200 if well else 503)


async def metrics(router: Router, _: web.Request) -> web.Response:
    """For Prometheus."""
    return web.Response(
        body=router.metrics.render(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )
