"""Arguments of `kvxfer sim`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["add"]


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def _part(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


# argparse names the function in the message about what is no number at all.
_above_zero.__name__ = _not_negative.__name__ = _part.__name__ = "number"


def _crash(text: str) -> tuple[str, int, float, float | None]:
    """`90:decode-0:30`: at 90 s decode server 0 crashes, and is away for 30 s."""
    try:
        at, name, *repair = text.split(":")
        kind, number = name.rsplit("-", 1)
        if kind not in ("prefill", "decode") or len(repair) > 1:
            raise ValueError
        return kind, int(number), float(at), float(repair[0]) if repair else None
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is no crash: write AT:SERVER[:REPAIR] in seconds, for example 90:decode-0:30"
        ) from None


def _listed(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def numbers(text: str) -> list[Any]:
        return [one(part) for part in text.split(",")]

    return numbers


def add(
    commands: Any, at_least: Callable[[int], Any], add_json: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "sim",
        help="simulate a cluster, split or not: queues, slots, links, and what users get",
        description=(
            "Simulates, in virtual time and on equal GPUs and traffic, plain servers beside prefill and "
            "decode servers that hand off by pull, push or late-bound push: queues, decode slots, KV pages, "
            "shared links, posting on the loop or on a thread, admission, failures. Modes differ in which "
            "steps wait for which and in where posting runs, and in no number. Costs are stated defaults "
            "(--costs prints them with their sources) or measured ones (--calibrate)."
        ),
        epilog=(
            "modes: unified (plain servers), pull, push, late. With + each takes options of its own: "
            "pull+thread posts on a thread, push+admission admits by kvxfer.admission, as `kvxfer "
            "proxy` does. docs/when-to-split.md reads such results."
        ),
    )
    parser.add_argument(
        "--compare",
        type=_listed(str),
        default=["unified", "pull", "push", "late"],
        metavar="MODE,...",
        help="what to simulate side by side (default: unified,pull,push,late)",
    )
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--qps",
        type=_listed(_above_zero),
        default=[1.0, 2.0, 4.0, 8.0],
        metavar="X,...",
        help="requests a second, Poisson (default: 1,2,4,8)",
    )
    traffic.add_argument(
        "--prompt",
        type=_listed(at_least(1)),
        default=[1024, 16_384],
        metavar="N,...",
        help="tokens of a prompt (default: 1024,16384)",
    )
    traffic.add_argument(
        "--answer",
        type=at_least(1),
        default=128,
        metavar="N",
        help="tokens of an answer (default: %(default)s)",
    )
    for name, what in (("spread", "prompts"), ("answer-spread", "answers")):
        traffic.add_argument(
            f"--{name}",
            type=_not_negative,
            default=0.0,
            metavar="SIGMA",
            help=f"sigma of a lognormal for the lengths of {what}, with the same mean (default: all are as "
            f"long)",
        )
    traffic.add_argument(
        "--shared-prefix",
        type=at_least(0),
        default=0,
        metavar="N",
        help="tokens at the front of each prompt with which others begin too; servers that have them need no "
        "copy (default: none)",
    )
    traffic.add_argument(
        "--prefixes",
        type=at_least(1),
        default=1,
        metavar="N",
        help="how many such fronts there are (default: %(default)s)",
    )
    traffic.add_argument(
        "--requests",
        type=at_least(1),
        metavar="N",
        help="requests of each simulation; where something cannot keep up, waits grow with it (default: "
        "200, or a whole trace)",
    )
    traffic.add_argument(
        "--users",
        type=_listed(at_least(1)),
        metavar="N,...",
        help="instead of --qps: so many requests under way at any time",
    )
    traffic.add_argument(
        "--burst-factor", type=_above_zero, metavar="X", help="the rate within bursts, as a multiple of --qps"
    )
    for name, default, meaning in (
        ("burst-s", 10.0, "length of a burst, in seconds"),
        ("burst-every-s", 60.0, "time from the end of a burst to that of the next, in seconds"),
    ):
        traffic.add_argument(
            f"--{name}",
            type=_above_zero,
            default=default,
            metavar="X",
            help=f"{meaning} (default: %(default)s)",
        )
    traffic.add_argument(
        "--trace",
        metavar="FILE",
        help="instead of all that: a public trace, Mooncake's (.jsonl: timestamp, input_length, "
        "output_length, hash_ids) or "
        "Azure's (.csv: TIMESTAMP, ContextTokens, GeneratedTokens)",
    )
    traffic.add_argument(
        "--speed",
        type=_listed(_above_zero),
        default=[1.0],
        metavar="X,...",
        help="how many times as fast as the trace (default: 1)",
    )
    cluster = parser.add_argument_group("cluster")
    for name, default, meaning in (
        ("prefill", 4, "prefill servers"),
        ("decode", 1, "decode servers; plain servers are as many as both together"),
        ("tp", 8, "GPUs of each server"),
        ("slots", 256, "answers that a server writes at a time"),
        ("chunk", 8192, "tokens of a step; prompts are computed in pieces of that"),
        ("page-tokens", 16, "tokens of a page"),
    ):
        cluster.add_argument(
            f"--{name}",
            type=at_least(1),
            default=default,
            metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )
    cluster.add_argument(
        "--unified-chunk",
        type=at_least(1),
        metavar="N",
        help="tokens of a step of plain servers (default: as --chunk)",
    )
    cluster.add_argument(
        "--admission",
        action="store_true",
        help="reserve pages for prompt and answer and a slot before prefill starts, by kvxfer.admission",
    )
    cluster.add_argument(
        "--route",
        choices=("requests", "bytes"),
        default="requests",
        help="choose servers by requests or by bytes under way (default: %(default)s)",
    )
    cluster.add_argument(
        "--posting",
        choices=("loop", "thread"),
        help="where posting runs (default: pull on the loop, others on a thread)",
    )
    cluster.add_argument(
        "--failures",
        type=_part,
        default=0.0,
        metavar="PART",
        help="part of the hand-offs that break (default: none)",
    )
    cluster.add_argument(
        "--mtbf-s",
        type=_above_zero,
        metavar="S",
        help="mean time between two crashes of a server, in seconds (default: they do not crash)",
    )
    cluster.add_argument(
        "--repair-s",
        type=_above_zero,
        default=60.0,
        metavar="S",
        help="how long a server that crashed is away, in seconds (default: %(default)g)",
    )
    cluster.add_argument(
        "--crash",
        type=_crash,
        action="append",
        default=[],
        metavar="AT:SERVER[:REPAIR]",
        help="a crash at a time, as 90:prefill-0 or 90:decode-1:30, in seconds; may be given several times. "
        "Of plain servers, which have no parts, one at the same place of the list crashes",
    )
    cluster.add_argument(
        "--on-failure",
        choices=("fail", "recompute"),
        default="fail",
        help="requests whose hand-off breaks or whose server crashes fail, or are computed again: by decode, "
        "or from the start where decode crashed. Answers that have begun fail in any case (default: "
        "%(default)s)",
    )
    cluster.add_argument(
        "--offload",
        action="store_true",
        help="where prefill lacks room, move caches that wait for their hand-off to the host's memory",
    )
    cluster.add_argument(
        "--no-prefix-cache", action="store_true", help="compute and move every prompt in full"
    )
    for name, default, meaning in (
        ("slo-ttft-ms", 2000.0, "first tokens later than this are not good; admission aims for it"),
        ("slo-tpot-ms", 50.0, "requests with more ms a token than this are not good"),
    ):
        cluster.add_argument(
            f"--{name}",
            type=_above_zero,
            default=default,
            metavar="MS",
            help=f"{meaning} (default: %(default)g)",
        )
    costs = parser.add_argument_group("costs")
    costs.add_argument(
        "--model",
        metavar="NAME",
        help="a model that kvxfer plan knows, or a config.json (default: qwen3-32b)",
    )
    costs.add_argument(
        "--params-b",
        type=_above_zero,
        metavar="X",
        help="10^9 weights of the model, where its name does not say",
    )
    costs.add_argument(
        "--active-params-b",
        type=_above_zero,
        metavar="X",
        help="those that a token is multiplied with (default: all)",
    )
    costs.add_argument(
        "--link-gbit-s", type=_above_zero, metavar="X", help="Gbit/s of a GPU's link, each way (default: 400)"
    )
    costs.add_argument(
        "--calibrate",
        action="append",
        default=[],
        metavar="FILE",
        help="take costs from what kvxfer bench post|plan|transfer|loop|peers --json printed; may be given "
        "several times",
    )
    costs.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="COST=X",
        help="set a cost by its name; may be given several times",
    )
    costs.add_argument(
        "--costs", action="store_true", help="print every cost with its unit and source, and stop"
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="decides all draws (default: %(default)s)"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the results into this file (.png, .svg, .pdf); needs kvxfer[plot]",
    )
    add_json(parser)
    parser.set_defaults(module="kvxfer.cli.sim")
