"""The arguments of `kvxfer proxy`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["add"]


def _more_than_nothing(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


_more_than_nothing.__name__ = "number"


def add(commands: Any, at_least: Callable[[int], Any], fraction: Any, add_json: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "proxy",
        help="route OpenAI requests to pairs of prefill and decode servers",
        description=(
            "An HTTP router for prefill and decode servers that hand off through kvxfer. It sends both legs "
            "of a request at once, reserves decode's pages and slot before prefill starts, answers 429 with "
            "Retry-After when servers or links are full, and ends both legs when one fails or the client "
            "leaves. docs/proxy.md says what each setting and metric means."
        ),
        epilog=(
            "example: kvxfer proxy --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200,slots=256; "
            "then point your client at http://127.0.0.1:8000/v1. It stops at SIGTERM, when the requests in "
            "flight are over."
        ),
    )
    parser.add_argument(
        "--prefill",
        action="append",
        required=True,
        metavar="URL[,NAME=VALUE...]",
        help=(
            "a prefill server; again for each. Settings: source=HOST:PORT (kvxfer's directory there; "
            "default: its host, port 8998), tokens-per-s=N (measured as it goes; at first 8000), "
            "link-gb-s=N (12.5), link=NAME (servers that share one)"
        ),
    )
    parser.add_argument(
        "--decode",
        action="append",
        required=True,
        metavar="URL[,NAME=VALUE...]",
        help=(
            "a decode server; again for each. Settings: pages=N and page-tokens=N (default: asked of vLLM), "
            "slots=N (requests it runs at a time, vLLM's --max-num-seqs; default 256), link-gb-s=N (12.5), "
            "link=NAME, prefill-tokens-per-s=N (lets it compute prompts itself where that is sooner)"
        ),
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:8000",
        metavar="HOST:PORT",
        help="where clients come in; port 0 takes any (default: %(default)s)",
    )
    parser.add_argument(
        "--decode-choice",
        choices=("early", "late"),
        default="early",
        help="both legs at once, or decode chosen when prefill is over (default: %(default)s)",
    )
    parser.add_argument(
        "--route",
        choices=("load", "requests"),
        default="load",
        help="choose by bytes, tokens, pages and links, or by the number of requests (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-bytes-per-token",
        type=at_least(1),
        default=131_072,
        metavar="N",
        help="KV bytes of a token, all layers and ranks (default: %(default)s: 32 layers, 8 KV heads of 128, "
        "16 bits)",
    )
    parser.add_argument(
        "--slots-share",
        type=fraction,
        default=0.8,
        metavar="PART",
        help="part of decode's slots that is given away (default: %(default)s)",
    )
    numbers: tuple[tuple[str, float, str, str], ...] = (
        ("queue-wait-s", 600.0, "SECONDS", "longest wait for admission"),
        (
            "prefill-backlog-s",
            120.0,
            "SECONDS",
            "prompts in flight at a prefill server, in time that they take",
        ),
        ("link-backlog-s", 10.0, "SECONDS", "bytes in flight on a link, in time that they take"),
        ("connect-timeout-s", 10.0, "SECONDS", "longest time for a connection to a server"),
        ("silence-timeout-s", 3600.0, "SECONDS", "longest time without a byte of an answer"),
        ("health-interval-s", 2.0, "SECONDS", "how often servers are asked for /health"),
        ("health-timeout-s", 10.0, "SECONDS", "how long that may take; three in a row take a server out"),
        ("drain-timeout-s", 300.0, "SECONDS", "how long requests in flight may take after SIGTERM"),
    )
    for name, default, metavar, text in numbers:
        parser.add_argument(
            f"--{name}",
            type=_more_than_nothing,
            default=default,
            metavar=metavar,
            help=f"{text} (default: {default:g})",
        )
    counts = (
        ("queue-requests", 1024, "requests that may wait for admission; 0 refuses at once"),
        ("retries", 1, "tries more of a request that failed before anything reached its client"),
        ("answer-tokens", 256, "length of an answer to reserve for, until answers have been seen"),
        ("max-body-mib", 64, "largest request"),
    )
    for name, count, text in counts:
        parser.add_argument(
            f"--{name}",
            type=at_least(0 if name in ("queue-requests", "retries") else 1),
            default=count,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    add_json(parser)
    parser.set_defaults(module="kvxfer.cli.proxy")
