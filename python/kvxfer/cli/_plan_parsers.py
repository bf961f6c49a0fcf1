"""Arguments of `kvxfer plan` and `kvxfer top`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["add", "add_top"]


def above_zero(text: str) -> float:
    """A number above zero, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


# argparse names the function in the message about what is no number at all.
above_zero.__name__ = "number"


def add(
    commands: Any, at_least: Callable[[int], Any], add_json: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "plan",
        help="say how large KV is, how long it takes, how many slots are held, and what bites first",
        description=(
            "Puts one decode server of a split deployment on a page: bytes of KV, time on the links, "
            "decode slots held "
            "(Little's law), what posting takes of the decode loop, room for the answers, and with a "
            "prefill rate "
            "whether recomputing is sooner and how to divide servers. Says which of them bites and what to "
            "change. "
            "Measure before you plan: the time per token at peak load, and the link with `kvxfer bench "
            "transfer`."
        ),
    )
    what = parser.add_argument_group("what is served")
    what.add_argument(
        "--model", metavar="NAME", help="a model known here (--list-models), or a config.json or its folder"
    )
    what.add_argument("--list-models", action="store_true", help="print the models known here, and stop")
    for name, meaning in (
        ("layers", "layers that keep KV, instead of --model"),
        ("kv-heads", "KV heads of a layer in the whole model"),
        ("head-dim", "elements of a head"),
    ):
        what.add_argument(f"--{name}", type=at_least(1), metavar="N", help=meaning)
    what.add_argument(
        "--kv-dtype", metavar="TYPE", help="type of the KV cache, for example fp8 (default: the model's)"
    )
    what.add_argument(
        "--kv-scales",
        type=at_least(0),
        default=0,
        metavar="N",
        help="scales of 4 bytes beside each key and value of a token and head (default: %(default)s: "
        "scales of whole "
        "tensors)",
    )
    load = parser.add_argument_group("load and measurements")
    for name, kind, default, meaning in (
        ("qps", above_zero, 1.0, "requests a second that one decode server gets"),
        ("prompt", at_least(1), 2000, "tokens of a prompt"),
        ("output", at_least(1), 128, "tokens of an answer, on average"),
        ("tpot-ms", above_zero, 10.0, "milliseconds a token, measured at peak load"),
        ("slots", at_least(1), 8, "requests that the decode server runs at a time, at most"),
        ("link-gbit-s", above_zero, 400.0, "Gbit/s of one rank's link"),
        ("tp", at_least(1), 1, "tensor-parallel ranks, each with a link of its own"),
        ("burst", at_least(1), 1, "hand-offs that come at once over the same links"),
    ):
        load.add_argument(
            f"--{name}", type=kind, default=default, metavar="N", help=f"{meaning} (default: %(default)s)"
        )
    load.add_argument(
        "--posting",
        choices=("loop", "thread"),
        default="loop",
        help="where the KV connector posts: on the decode loop, as pull connectors in Python do, or on a "
        "thread, as "
        "kvxfer does (default: %(default)s)",
    )
    load.add_argument(
        "--posting-ms",
        type=above_zero,
        metavar="MS",
        help="milliseconds of posting one such request, measured (default: loop: 11 ms + 1.9 us a token, "
        "fitted to what "
        "the field measured; thread: 6 us)",
    )
    load.add_argument(
        "--handoff-ms",
        type=above_zero,
        default=0.0,
        metavar="MS",
        help="milliseconds of a hand-off besides its bytes, measured (default: %(default)s)",
    )
    more = parser.add_argument_group("what else can be said, if it is known")
    for name, meaning in (
        ("kv-memory-gib", "GiB of KV memory of one decode rank"),
        ("prefill-tokens-per-s", "tokens a second that one prefill server computes at this prompt length"),
        ("slo-ttft", "milliseconds until the first token, at most"),
    ):
        more.add_argument(f"--{name}", type=above_zero, metavar="N", help=meaning)
    more.add_argument(
        "--servers", type=at_least(2), metavar="N", help="servers to be divided into prefill and decode"
    )
    for name, default, meaning in (
        ("pcie-gb-s", 31.5, "GB/s of one GPU's PCIe connection (default: %(default)s, PCIe 4.0 x16 at most)"),
        ("nvme-gb-s", 7.88, "GB/s of a server's NVMe (default: %(default)s, PCIe 4.0 x4 at most)"),
    ):
        more.add_argument(f"--{name}", type=above_zero, default=default, metavar="N", help=meaning)
    add_json(parser)
    parser.set_defaults(module="kvxfer.cli.plan")


def add_top(commands: Any, add_json: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds the other command."""
    parser = commands.add_parser(
        "top",
        help="watch one agent or a fleet: rooms, stages, GB/s, failures, slots",
        description=(
            "Asks the metrics endpoints of agents (`kvxfer.prometheus.serve`, or any that has them) again "
            "and "
            "again, and shows what became of the numbers in between: rooms by state, hand-offs a second, "
            "GB/s, "
            "how busy the link is, quantiles of each stage, pages, quarantine, slots and failures. Red: "
            "something "
            "failed just now, or is in quarantine. Yellow: more than 80 % of the slots are held."
        ),
    )
    parser.add_argument(
        "endpoints",
        nargs="*",
        default=["127.0.0.1:9464"],
        metavar="HOST:PORT",
        help="endpoints, also as URLs (default: 127.0.0.1:9464)",
    )
    for name, default, meaning in (
        ("interval", 1.0, "seconds between two looks"),
        ("timeout", 2.0, "seconds that an endpoint has to answer"),
    ):
        parser.add_argument(
            f"--{name}",
            type=above_zero,
            default=default,
            metavar="S",
            help=f"{meaning} (default: %(default)s)",
        )
    parser.add_argument("--once", action="store_true", help="print one table and stop")
    add_json(parser)
    parser.set_defaults(module="kvxfer.cli.top")
