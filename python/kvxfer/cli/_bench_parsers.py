"""The arguments of the benchmarks that move bytes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["add"]

PEERS = ["nixl", "nixl-tuned", "mooncake", "ucxx"]


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _each(
    parser: Any, kind: Callable[[Any], Any], rows: Sequence[tuple[str, Any, Any, str]], metavar: str = "N"
) -> None:
    """Options of one number each: name, what `kind` makes its type of, default and meaning."""
    for name, least, default, meaning in rows:
        parser.add_argument(
            f"--{name}",
            type=kind(least),
            default=default,
            metavar=metavar,
            help=f"{meaning} (default: %(default)s)",
        )


def _python(parser: Any, has: str) -> None:
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="FILE",
        help=f"the interpreter that has {has} (default: this one)",
    )


def _transfer(benches: Any, at_least: Callable[[int], Any]) -> Any:
    parser = benches.add_parser(
        "transfer",
        help="whole hand-offs beside a plain copy of the same bytes in the same pieces",
        description=(
            "Measures whole hand-offs between two processes on the geometry of one of eight ranks of "
            "Qwen3-32B (64 layers, 1 KV head of 128, bfloat16: 32 KiB a token), over each fabric and kind "
            "of memory, each in turns with a plain memcpy of as many bytes in the same pieces; what many "
            "rooms at once move; what a small room pays behind large ones; and how long the smallest "
            "hand-offs take. Takes minutes."
        ),
    )
    counts = (
        ("tokens", [1000, 2000, 8000, 32_000], "sizes of one hand-off"),
        ("page-tokens", [16, 64], "tokens of a page; many rooms are measured with the first only"),
        ("rooms", [1, 4, 16, 64], "hand-offs at once"),
    )
    for name, default, meaning in counts:
        shown = " ".join(map(str, default))
        parser.add_argument(
            f"--{name}",
            type=at_least(1),
            nargs="+",
            default=default,
            metavar="N",
            help=f"{meaning} (default: {shown})",
        )
    singles = (
        ("rooms-tokens", 1, 1000, "tokens of each of several hand-offs at once"),
        ("rounds", 3, 15, "hand-offs of each size that count, a third of it above 512 MiB"),
        ("small-tokens", 16, 1000, "the small room beside large ones"),
        ("large-tokens", 16, 128_000, "each of the four large ones"),
        ("in-flight", 1, 1000, "rooms granted and not pushed, for the memory that they take"),
        ("latency-rooms", 10, 300, "hand-offs of a piece, and of a page, to take times of"),
    )
    _each(parser, at_least, singles)
    choices = (
        ("fabric", ["shm", "ucx"], "what carries the bytes"),
        ("memory", ["kvxfer", "engine"], "from kvxfer.alloc, or as an engine's allocator gives it"),
    )
    for name, both, meaning in choices:
        parser.add_argument(
            f"--{name}", nargs="+", choices=both, default=both, help=f"{meaning} (default: both)"
        )
    parser.add_argument(
        "--order",
        choices=("HND", "NHD"),
        default="HND",
        help="order of a page's axes; with one KV head both are the same bytes (default: %(default)s)",
    )
    parser.set_defaults(module="kvxfer.cli.bench_transfer")
    return parser


def _peers(benches: Any, at_least: Callable[[int], Any]) -> Any:
    parser = benches.add_parser(
        "peers",
        help="the same page lists by NIXL, Mooncake and ucxx, in turns with kvxfer",
        description=(
            "Hands off the same page lists (one of eight ranks of Qwen3-32B, pages of 16 tokens) by kvxfer, "
            "NIXL, Mooncake and ucxx, in turns, each between two processes: what the caller's thread spends "
            "on a request, the whole, and CPU time, with the receiving process idle and busy. `make "
            "bench-peers` installs the other libraries in a venv of their own and runs this."
        ),
    )
    _python(parser, "the other libraries")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=PEERS,
        help="which of them (default: all)",
    )
    rows = [
        ("tokens", 16, 2000, "tokens of each hand-off, in whole pages"),
        ("rounds", 3, 9, "hand-offs of each that count"),
    ]
    _each(parser, at_least, rows)
    parser.set_defaults(module="kvxfer.cli.bench_peers")
    return parser


def _loop(benches: Any, at_least: Callable[[int], Any]) -> Any:
    parser = benches.add_parser(
        "loop",
        help="what hand-offs cost a decode loop that runs in the receiving process",
        description=(
            "Runs a decode loop (numpy, 5.5 ms a step) in the process that receives hand-offs, and measures "
            "its time per token with none, beside a process that only copies as many bytes, with kvxfer, "
            "and with NIXL posting reads on the loop's thread, in blocks that take turns in an order by "
            "chance. Takes minutes."
        ),
    )
    whole = [("tokens", 16, 2000, "tokens of each hand-off"), ("blocks", 3, 20, "blocks of each kind")]
    _each(parser, at_least, whole)
    amounts = [
        ("step-ms", 0, 5.5, "time of a step without hand-offs, to which the work is fitted"),
        ("block-seconds", 0, 1.0, "length of a block"),
    ]
    _each(parser, lambda _: _positive, amounts, metavar="X")
    parser.add_argument(
        "--per-second",
        type=at_least(1),
        nargs="+",
        default=[1, 2, 4, 8, 16],
        metavar="N",
        help="hand-offs a second (default: 1 2 4 8 16)",
    )
    parser.add_argument(
        "--fabric",
        choices=("shm", "ucx"),
        default="shm",
        help="what carries kvxfer's bytes (default: %(default)s)",
    )
    parser.add_argument("--no-nixl", dest="nixl", action="store_false", help="leave NIXL out")
    _python(parser, "NIXL, see `bench peers`")
    parser.add_argument("--plot", metavar="FILE", help="draw the table as SVG into this file")
    parser.set_defaults(module="kvxfer.cli.bench_loop")
    return parser


def add(benches: Any, at_least: Callable[[int], Any], add_json: Callable[[Any], None]) -> None:
    """Adds them to `kvxfer bench`."""
    for make in (_transfer, _peers, _loop):
        add_json(make(benches, at_least))
