"""`kvxfer proxy`: routes requests to prefill and decode servers. docs/proxy.md is for its users."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from typing import TYPE_CHECKING

from kvxfer.admission import Config
from kvxfer.cli._errors import CommandError
from kvxfer.cli._text import print_json, quantity, table
from kvxfer.errors import BadArgument, ListenError

if TYPE_CHECKING:
    from kvxfer.proxy import Router, Settings

__all__ = ["run"]

_WRONG_ARGUMENTS = 2


def _listen(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise CommandError(
            f"--listen {text}: write it as HOST:PORT, for example 0.0.0.0:8000 or [::]:8000", _WRONG_ARGUMENTS
        )
    return host, int(port)


def _settings(options: argparse.Namespace) -> Settings:
    try:
        from kvxfer.proxy import Settings, parse_decode, parse_prefill
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("aiohttp", "prometheus_client"):
            raise
        raise CommandError(
            f"the proxy needs {error.name}, which is not installed: pip install 'kvxfer[proxy]'"
        ) from None
    try:
        prefill = tuple(parse_prefill(one) for one in options.prefill)
        decode = tuple(parse_decode(one) for one in options.decode)
        names = [one.spec.name for one in prefill] + [one.spec.name for one in decode]
        for name in names:
            if names.count(name) > 1:
                raise BadArgument(f"{name} is named twice: each server is one --prefill or one --decode")
        return Settings(
            prefill=prefill,
            decode=decode,
            decode_choice=options.decode_choice,
            admission=Config(
                kv_bytes_per_token=options.kv_bytes_per_token,
                slots_share=options.slots_share,
                route=options.route,
                link_backlog_s=options.link_backlog_s,
                prefill_backlog_s=options.prefill_backlog_s,
                queue_requests=options.queue_requests,
                queue_wait_s=options.queue_wait_s,
            ),
            connect_timeout_s=options.connect_timeout_s,
            silence_timeout_s=options.silence_timeout_s,
            health_interval_s=options.health_interval_s,
            health_timeout_s=options.health_timeout_s,
            retries=options.retries,
            drain_timeout_s=options.drain_timeout_s,
            max_body_mib=options.max_body_mib,
            answer_tokens=options.answer_tokens,
        )
    except BadArgument as error:
        raise CommandError(str(error), _WRONG_ARGUMENTS) from None


def _show(router: Router, url: str, choice: str, *, as_json: bool) -> None:
    servers = [
        {
            "role": role,
            "url": one.url,
            "source": getattr(one, "source", None),
            "up": router.watches[one.spec.name].up,
            "why": router.watches[one.spec.name].why,
        }
        for role, group in (("prefill", router.settings.prefill), ("decode", router.settings.decode))
        for one in group
    ]
    if as_json:
        print_json({"listening": url, "decode_choice": choice, "servers": servers})
    else:
        how = "both legs at once" if choice == "early" else "prefill first, then the choice of decode"
        print(f"kvxfer proxy: ready at {url}/v1 ({how}); {url}/metrics for Prometheus; Ctrl-C stops it")
        rows = []
        for one in servers:
            state = "up" if one["up"] else f"down, is asked again: {one['why']}"
            rows.append((str(one["role"]), str(one["url"]), state))
        print(table(rows))
        down = sum(not one["up"] for one in servers)
        if down:
            print(f"{quantity(down, 'server')} down; what starts now is taken in when its /health answers.")
    sys.stdout.flush()


def run(options: argparse.Namespace) -> int:
    """The command."""
    host, port = _listen(options.listen)
    settings = _settings(options)
    from kvxfer.proxy import serve

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="kvxfer proxy: %(message)s")
    try:
        asyncio.run(
            serve(
                settings,
                host,
                port,
                lambda router, url: _show(router, url, options.decode_choice, as_json=options.json),
            )
        )
    except ListenError as error:
        raise CommandError(str(error)) from None
    return 0
