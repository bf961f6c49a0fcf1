"""What `expect(verify=)` costs: hand-offs of 512 MiB between two processes over shared memory, of each kind.

    python benches/verify_cost.py [--rounds 9] [--tokens 2048]

Prints one JSON object, by kind: the median and the least time from `push` to `Success`, and the median CPU
time of both processes meanwhile, which other work on the machine changes less; in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

from two import Rank, events, released

import kvxfer as kx

# One rank of Qwen3-32B: 256 KiB a token at TP1.
LAYOUT = {"layers": 64, "kv_heads": 8, "head_dim": 128, "page_tokens": 16, "dtype": "bfloat16"}
TOKEN_BYTES = 64 * 2 * 8 * 128 * 2
KINDS = (None, "sample", "full")


def cpu_ms(pid: int) -> float:
    """User and system time of a process so far, in steps of the kernel's tick."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    pages = -(-args.tokens // 16)
    order = list(range(pages))
    took: dict[str, list[float]] = {str(kind): [] for kind in KINDS}
    used: dict[str, list[float]] = {str(kind): [] for kind in KINDS}
    form = kx.PageLayout(**LAYOUT)
    pool = kx.alloc(form, kx.Shard(), pages=pages, fabric="shm")
    with (
        Rank(LAYOUT, pages=pages, alloc="shm", fabric="shm") as prefill,
        kx.Agent("decode", form, kx.Shard(), memory=pool, fabric="shm") as decode,
    ):
        for n in range(args.rounds + 1):
            for kind in KINDS:
                room = kx.new_room()
                decode.expect(room, order, tokens=args.tokens, source=prefill.address, verify=kind)
                cpu, begun = cpu_ms(os.getpid()) + cpu_ms(prefill.pid), time.perf_counter()
                prefill.push(room, order, tokens=args.tokens)
                found = events(decode, released(room), seconds=120)
                if found[-1].state != "Success":
                    raise SystemExit(f"verify={kind}: {found[-1].error}")
                # The first round faults every page in.
                ended = time.perf_counter()
                prefill.end(room)
                if n:
                    took[str(kind)].append((ended - begun) * 1e3)
                    used[str(kind)].append(cpu_ms(os.getpid()) + cpu_ms(prefill.pid) - cpu)
    print(
        json.dumps(
            {
                "bytes": args.tokens * TOKEN_BYTES,
                "rounds": args.rounds,
                "median_ms": {kind: round(statistics.median(ms), 1) for kind, ms in took.items()},
                "min_ms": {kind: round(min(ms), 1) for kind, ms in took.items()},
                "median_cpu_ms": {kind: round(statistics.median(ms), 1) for kind, ms in used.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
