"""Small runs over UCX, packed through staging slots and as single writes: a decode rank and its two sources.

    python benches/staging_cost.py [--rounds 7] [--tokens 2000] [--layers 16] [--tls tcp,self]

Times each way in turn, in one run, from the first `push` to `Success`, with pages of which no two are
neighbours: NHD as single writes (`never`), packed (`always`), as the sender chooses (`auto`), and HND as
single writes beside them. Prints one JSON object, by UCX's transports: the median and the least time in
milliseconds, GB/s at the median, what was chosen, and how many times the better way's time that takes, both
as it was forced and as `auto` took it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

import numpy as np
from two import Rank, events, released

import kvxfer as kx

# Of Qwen3-32B the two heads that a rank of TP4 holds: 256 bytes a token of each head.
LAYOUT = {"kv_heads": 2, "head_dim": 128, "page_tokens": 16, "dtype": "bfloat16"}
WAYS = {
    "single": ("NHD", "never"),
    "packed": ("NHD", "always"),
    "auto": ("NHD", "auto"),
    "hnd": ("HND", "never"),
}


class Way:
    """A decode rank in this process, and its two sources."""

    def __init__(self, stack: ExitStack, name: str, layers: int, pages: int, tls: str) -> None:
        order, staging = WAYS[name]
        layout: dict[str, Any] = {**LAYOUT, "layers": layers, "order": order}
        options: dict[str, Any] = {"fabric": "ucx", "ucx_tls": tls, "staging": staging}
        self.sources: list[Rank] = []
        for rank in range(2):
            near: dict[str, Any] = {"directory": self.sources[0].address} if rank else {}
            child = Rank(
                layout,
                {"tp_rank": rank, "tp_size": 2},
                pages=pages,
                alloc="ucx",
                name=f"p{rank}",
                engine="p",
                seed=rank + 1,
                **options,
                **near,
            )
            self.sources.append(stack.enter_context(child))
        form = kx.PageLayout(**layout)
        pool = kx.alloc(form, kx.Shard(), pages=pages, fabric="ucx", ucx_tls=tls)
        self.decode = stack.enter_context(kx.Agent("decode", form, kx.Shard(), memory=pool, **options))

    def hand_off(self, src: Any, dst: Any, tokens: int) -> float:
        """Milliseconds."""
        room = kx.new_room()
        self.decode.expect(room, dst, tokens=tokens, source=self.sources[0].address)
        while self.decode.state(room) == "Bootstrapping":
            time.sleep(0.001)
        begun = time.perf_counter()
        for rank in self.sources:
            rank.push(room, src, tokens=tokens)
        found = events(self.decode, released(room), seconds=300)
        took = (time.perf_counter() - begun) * 1e3
        if found[-1].state != "Success":
            raise SystemExit(f"{found[-1].error}")
        for rank in self.sources:
            rank.end(room)
        return took


def measure(args: argparse.Namespace, tls: str) -> dict[str, Any]:
    pages = -(-args.tokens // 16)
    rng = np.random.default_rng(1)
    src, dst = (rng.permutation(pages) * 2 for _ in range(2))
    took: dict[str, list[float]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        ways = {name: Way(stack, name, args.layers, 2 * pages, tls) for name in WAYS}
        for n in range(args.rounds + 1):
            for name, way in ways.items():
                ms = way.hand_off(src, dst, args.tokens)
                if n:
                    took[name].append(ms)
        time.sleep(0.1)  # statistics are published every few milliseconds
        stats = [rank.stats() for rank in ways["auto"].sources]
    size = args.layers * 2 * 2 * 256 * args.tokens
    out: dict[str, Any] = {
        name: {
            "median_ms": round(statistics.median(times), 2),
            "least_ms": round(min(times), 2),
            "gbytes_per_s": round(size / statistics.median(times) / 1e6, 2),
        }
        for name, times in took.items()
    }
    packed, single = (sum(s[key] for s in stats) for key in ("packed_deliveries", "direct_deliveries"))
    out["chosen"] = "packed" if packed > single else "single"
    for key in ("median_ms", "least_ms"):
        better = min(out["single"][key], out["packed"][key])
        out[f"chosen_over_better_{key}"] = round(out[out["chosen"]][key] / better, 3)
        out[f"auto_over_better_{key}"] = round(out["auto"][key] / better, 3)
    out["bytes"] = size
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tls", action="append", help="UCX's transports; again for more")
    args = parser.parse_args()
    print(
        json.dumps({tls: measure(args, tls) for tls in args.tls or ("posix,self,tcp", "tcp,self")}, indent=2)
    )


if __name__ == "__main__":
    main()
