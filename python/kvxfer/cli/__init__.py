"""The command `kvxfer`.

Each subcommand lives in a module of its own that is imported when the subcommand runs, so that `kvxfer
--help` is quick and a command needs only what it uses. A command's `run(options)` returns the exit status;
what the user should know of a failure is a `CommandError`, printed as one line.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import kvxfer
from kvxfer.cli import _bench_parsers, _plan_parsers, _proxy_parser, _sim_parsers
from kvxfer.cli._errors import CommandError

__all__ = ["main"]

# 128 + SIGINT, as shells have it.
_INTERRUPTED = 130


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    # argparse names the function in the message about what is no number at all.
    number.__name__ = "number"
    return number


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text for people"
    )


def _add_fabric(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fabric",
        choices=("shm", "ucx"),
        default="shm",
        help="what carries the bytes: shared memory on one host, or UCX (default: %(default)s)",
    )


def _demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="run the main job: prefill and decode processes hand off a real model's KV cache",
        description=(
            "Runs a small language model (SmolLM2-135M in plain numpy) disaggregated: prefill processes read "
            "the prompt and push its KV pages layer by layer while they compute, decode processes get them "
            "and write the answer. The answer is compared token for token with one process that does it all."
        ),
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="what the user says (default: a short passage to sum up)"
    )
    _add_fabric(parser)
    for side in ("prefill", "decode"):
        parser.add_argument(
            f"--{side}-tp",
            type=int,
            choices=(1, 3),
            default=1,
            help=f"tensor-parallel {side} ranks, one process each; the model has 3 KV heads (default: "
            "%(default)s)",
        )
        parser.add_argument(
            f"--{side}-page-tokens",
            type=_at_least(1),
            default=16,
            metavar="N",
            help=f"tokens of a {side} page (default: %(default)s)",
        )
        parser.add_argument(
            f"--{side}-order",
            choices=("HND", "NHD"),
            default="HND",
            help=f"order of a {side} page's axes (default: %(default)s)",
        )
    parser.add_argument(
        "--max-tokens",
        type=_at_least(1),
        default=48,
        metavar="N",
        help="length of the answer at most (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk",
        type=_at_least(1),
        default=64,
        metavar="N",
        help="tokens that prefill computes, and pushes layer by layer, at a time (default: %(default)s)",
    )
    _add_json(parser)
    parser.set_defaults(module="kvxfer.cli.demo")


def _doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this host can do, and what to do about what it cannot",
        description=(
            "Reports the UCX that is loaded and its transports, the rules and limits of this host, and its "
            "GPUs, and tests each fabric over two processes: how fast it is, and for each UCX transport "
            "whether writes are one-sided (the receiver does nothing, and yet the bytes are there). The exit "
            "status is 0 unless shared memory itself fails."
        ),
    )
    _add_json(parser)
    parser.set_defaults(module="kvxfer.cli.doctor")


def _bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure", description="Measures what kvxfer costs.")
    benches = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    post = benches.add_parser(
        "post",
        help="what push, expect and poll cost the thread that calls them",
        description=(
            "Measures what push, expect and poll cost the calling thread, on the geometry of one of eight "
            "ranks of Qwen3-32B (64 layers, 1 KV head of 128, bfloat16, pages of 16 tokens, shuffled). Two "
            "agents in two processes hand off real bytes."
        ),
    )
    post.add_argument(
        "--tokens",
        type=_at_least(1),
        default=2000,
        metavar="N",
        help="tokens of each hand-off (default: %(default)s)",
    )
    post.add_argument(
        "--rooms",
        type=_at_least(10),
        default=150,
        metavar="N",
        help="hand-offs to measure over, four at a time (default: %(default)s)",
    )
    post.add_argument(
        "--by-tokens",
        type=_at_least(1),
        nargs="+",
        default=[1000, 2000, 8000, 32_000, 128_000],
        metavar="N",
        help="sizes of single calls that move nothing (default: 1000 2000 8000 32000 128000)",
    )
    _add_fabric(post)
    _add_json(post)
    post.set_defaults(module="kvxfer.cli.bench_post")
    plan = benches.add_parser(
        "plan",
        help="what planning a push takes on the transfer thread",
        description=(
            "Measures how long it takes to turn page lists into writes: one TP8 rank of Qwen3-32B (64 "
            "layers, 8 KV heads of 128, bfloat16, pages of 16 tokens) to one TP4 rank, HND and NHD, shuffled "
            "and contiguous pages, in one process that moves no bytes."
        ),
    )
    plan.add_argument(
        "--tokens",
        type=_at_least(1),
        nargs="+",
        default=[2000, 32_000],
        metavar="N",
        help="tokens of the pushes (default: 2000 32000)",
    )
    plan.add_argument(
        "--repeats",
        type=_at_least(3),
        default=25,
        metavar="N",
        help="how often each is planned (default: %(default)s)",
    )
    _add_json(plan)
    plan.set_defaults(module="kvxfer.cli.bench_plan")
    _bench_parsers.add(benches, _at_least, _add_json)


# Rules of the safety contract that can be broken on purpose: `Flaw` in rust/kvxfer-proto says what each does.
_FLAWS = (
    "release-on-timeout",
    "release-at-eof",
    "success-before-flush",
    "drained-while-writing",
    "no-tombstone",
    "no-session-check",
    "staging-slot-freed-early",
    "unpack-after-release",
    "old-credits-count",
)


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _soak(commands: Any) -> None:
    parser = commands.add_parser(
        "soak",
        help="hand off a great many small rooms, and see whether anything grows",
        description=(
            "Two processes hand off rooms of one page, some of which either side cancels. Memory, file "
            "descriptors, threads and table sizes of both are taken after a tenth of the rooms and at the "
            "end. The exit status is 1 if anything has grown by more than the limit."
        ),
    )
    parser.add_argument(
        "--rooms",
        type=_at_least(1000),
        default=1_000_000,
        metavar="N",
        help="hand-offs in all (default: %(default)s)",
    )
    parser.add_argument(
        "--cancel-every",
        type=_at_least(0),
        default=5,
        metavar="N",
        help="every so many rooms one is cancelled, by either side in turn; 0 for none (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=_fraction,
        default=0.02,
        metavar="FRACTION",
        help="growth that is allowed (default: %(default)s)",
    )
    _add_fabric(parser)
    _add_json(parser)
    parser.set_defaults(module="kvxfer.cli.soak")


def _stress(commands: Any) -> None:
    parser = commands.add_parser(
        "stress",
        help="many hand-offs at once, cancelled and killed in mid-write: no byte may land in a reused page",
        description=(
            "Hands off many rooms at once between a decode process and three prefill processes (two of them "
            "ranks of one engine), cancels some from either side, kills prefill processes in mid-write and "
            "restarts them on their port. Released pages are filled anew at once, and granted again or "
            "watched; every byte of every page is compared. `--fabric sim` does the same in one process, in "
            "virtual time, and a seed there replays exactly."
        ),
        epilog=(
            "exit status: 0 if every figure that must be zero is, 1 if not, 2 for wrong arguments, 3 if the "
            "run could not be carried out. With --break: 1 if the flaw was caught, 0 if it was not."
        ),
    )
    parser.add_argument(
        "--fabric",
        choices=("shm", "ucx", "sim"),
        default="shm",
        help="what carries the bytes: shared memory, UCX, or a simulation (default: %(default)s)",
    )
    for name, default, meaning in (
        ("rooms", 1000, "hand-offs in all"),
        ("concurrent", 256, "hand-offs at a time"),
    ):
        parser.add_argument(
            f"--{name}",
            type=_at_least(1),
            default=default,
            metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )
    parser.add_argument(
        "--cancel",
        type=_fraction,
        default=0.2,
        metavar="PART",
        help="part of the rooms that one of the sides cancels (default: %(default)s)",
    )
    parser.add_argument(
        "--kill",
        type=_at_least(0),
        default=3,
        metavar="N",
        help="prefill processes that are killed (SIGKILL) and restarted (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=_at_least(0),
        metavar="N",
        help="decides sizes, cancels and kills, but the timing is the machine's (default: drawn)",
    )
    parser.add_argument(
        "--break",
        dest="flaw",
        choices=_FLAWS,
        metavar="FLAW",
        help="break a rule in every agent, to see that it is noticed: " + ", ".join(_FLAWS),
    )
    parser.add_argument(
        "--ucx-tls",
        metavar="LIST",
        help="UCX's transports for every process (default: kvxfer's choice; for one engine `tcp,self`)",
    )
    for name, default, meaning in (
        ("stop", 3, "processes that are stopped for a while"),
        ("cut", 6, "lost sessions, cut networks and broken endpoints"),
    ):
        parser.add_argument(
            f"--{name}",
            type=_at_least(0),
            default=default,
            metavar="N",
            help=f"sim only: {meaning} (default: %(default)s)",
        )
    parser.add_argument(
        "--mover",
        choices=("sender", "receiver"),
        default="sender",
        help="sim only: who moves the bytes, as over ucx or as over shm (default: %(default)s)",
    )
    parser.add_argument(
        "--fence",
        choices=("completes", "impossible"),
        default="completes",
        help="sim only: whether a sender that does not answer can be fenced (default: %(default)s)",
    )
    parser.add_argument(
        "--log", metavar="FILE", help="write what happened, a line for each thing, to this file"
    )
    _add_json(parser)
    parser.set_defaults(module="kvxfer.cli.stress")


def _plan(commands: Any) -> None:
    _plan_parsers.add(commands, _at_least, _add_json)


def _sim(commands: Any) -> None:
    _sim_parsers.add(commands, _at_least, _add_json)


def _top(commands: Any) -> None:
    _plan_parsers.add_top(commands, _add_json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvxfer",
        description="Hands a request's paged KV cache from a prefill engine to a decode engine.",
    )
    parser.add_argument("--version", action="version", version=f"kvxfer {kvxfer.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_demo, _doctor, _bench, _stress, _soak, _plan, _sim, _top):
        add(commands)
    _proxy_parser.add(commands, _at_least, _fraction, _add_json)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0 well, 1 failed, 2 wrong arguments, 130 interrupted."""
    options = _parser().parse_args(arguments)
    command: Any = importlib.import_module(options.module)
    try:
        status: int = command.run(options)
        sys.stdout.flush()
    except CommandError as error:
        print(f"kvxfer: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("kvxfer: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone. Without this the interpreter's own flush at its end complains.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        return 1
    return status
