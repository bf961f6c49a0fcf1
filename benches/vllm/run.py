"""Measures vLLM servers with and without hand-offs: `make bench-vllm`.

Requests come at random times at several rates, with two lengths of prompts and 128 tokens to answer, to

* `plain`: one server;
* `two`: two servers behind `kvxfer proxy`, each of which computes prompts and answers;
* `pair`: a prefill and a decode server with KvxferConnector behind `kvxfer proxy`, both legs at once;
* `nixl`: the same two with vLLM's own NixlPushConnector, both legs at once, without a proxy.

Answers are compared with the plain server's before anything is measured. Then, for each: the first token, the
time for each further token, and the most requests that waited; and what a step of the pair's engines spends
in the connector's hooks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "engines"))

from proxies import Proxy
from servers import Server, Zygote, free_port, question

WORDS = (
    "time",
    "river",
    "house",
    "green",
    "seven",
    "under",
    "stone",
    "music",
    "early",
    "paper",
    "ocean",
    "bread",
)
BLOCKS = ("--num-gpu-blocks-override", "400")
NIXL_ENGINE = "bench-prefill"


def prompt_of(words: int, seed: int) -> str:
    """A prompt of about that many tokens that shares no prefix with others."""
    dice = random.Random(seed)
    return " ".join(dice.choice(WORDS) for _ in range(words))


class Plan:
    """Servers, and where requests to them go."""

    def __init__(self, name: str, servers: list[Server]) -> None:
        self.name, self.servers = name, servers
        self.proxy: Proxy | None = None

    def open(self, logs: Path) -> None:
        """Starts the proxy, if there is one; the servers run."""
        if self.name == "two":
            # Prompts are computed where they are answered.
            settings = ",prefill-tokens-per-s=1000000"
            self.proxy = Proxy(logs, [], self.servers, settings=settings)
        elif self.name == "pair":
            self.proxy = Proxy(logs, self.servers[:1], self.servers[1:])

    def send(self, body: dict[str, Any]) -> tuple[float, list[float], list[int]]:
        """Streams one answer: seconds to the first token, between tokens, and the tokens."""
        if self.name != "nixl":
            return _stream(self.proxy.port if self.proxy else self.servers[0].port, body)
        # Its two legs find each other by the request's id.
        prefill, decode = self.servers
        headers = {"X-Request-Id": f"bench-{uuid.uuid4()}"}
        first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": NIXL_ENGINE,
            "remote_host": "127.0.0.1",
            "remote_port": int(prefill.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
            "remote_request_id": headers["X-Request-Id"],
            "tp_size": 1,
        }
        leg = threading.Thread(target=_post, args=(prefill.port, first, headers))
        leg.start()
        seen = _stream(decode.port, {**body, "kv_transfer_params": params}, headers)
        leg.join()
        return seen

    def close(self) -> None:
        """Ends the proxy."""
        if self.proxy is not None:
            self.proxy.stop()


def nixl(zygote: Zygote, name: str, role: str, engine: str) -> Server:
    """A server with vLLM's own connector that pushes."""
    config = {
        "kv_connector": "NixlPushConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "engine_id": engine,
    }
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return Server(zygote, name, None, prefix_cache=False, args=BLOCKS, config=config, env=env)


def _post(port: int, body: dict[str, Any], headers: dict[str, str]) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", **headers}
    )
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"HTTP {answer.status}: {data[:300]!r}")


def _stream(
    port: int, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[float, list[float], list[int]]:
    began = time.perf_counter()
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({**body, "stream": True}),
        {"Content-Type": "application/json", **(headers or {})},
    )
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"HTTP {answer.status}: {answer.read()[:300]!r}")
    times, tokens = [], []
    for line in answer:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"the answer broke off: {event}")
            times.append(time.perf_counter())
            for choice in event["choices"]:
                tokens += choice["token_ids"]
    connection.close()
    return times[0] - began, [b - a for a, b in pairwise(times)], tokens


def quantile(values: list[float], q: float) -> float:
    """The value below which `q` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def sweep(plan: Plan, rate: float, words: int, count: int, tokens: int) -> dict[str, Any]:
    """Requests at random times, at a mean rate."""
    dice = random.Random(int(rate * 1000) + words)
    waiting, stop = [0.0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            waiting.append(sum(server.metric("vllm:num_requests_waiting") for server in plan.servers))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(count) as pool:
        ends = []
        for i in range(count):
            prompt = prompt_of(words, hash((rate, words, i)))
            ends.append(pool.submit(plan.send, question(prompt, tokens)))
            time.sleep(dice.expovariate(rate))
        seen = [end.result() for end in ends]
    stop.set()
    watcher.join()
    for server in plan.servers:
        server.idle(300)
    firsts = [first for first, _, _ in seen]
    gaps = [gap for _, rest, _ in seen for gap in rest]
    return {
        "plan": plan.name,
        "rate": rate,
        "words": words,
        "requests": count,
        "first_token_p50_s": quantile(firsts, 0.5),
        "first_token_p99_s": quantile(firsts, 0.99),
        "token_p50_s": quantile(gaps, 0.5),
        "token_p99_s": quantile(gaps, 0.99),
        "waiting_max": max(waiting),
    }


def hooks(server: Server) -> dict[str, dict[str, float]]:
    """Time in each hook a step, from the histogram: the upper bounds of the buckets with the median and
    the 99th.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[float, float]]] = {}
    for labels, value in re.findall(r"^kvxfer_hook_seconds_bucket\{([^}]*)\} (\S+)$", text, re.MULTILINE):
        hook, bound = (re.search(rf'{key}="([^"]*)"', labels) for key in ("hook", "le"))
        if hook and bound:
            found.setdefault(hook[1], []).append((float(bound[1]), float(value)))
    out = {}
    for hook_name, buckets in found.items():
        steps = max(value for _, value in buckets)
        out[hook_name] = {
            "steps": steps,
            **{
                name: min((bound for bound, value in buckets if value >= q * steps), default=float("inf"))
                for name, q in (("p50_at_most_s", 0.5), ("p99_at_most_s", 0.99))
            },
        }
    return out


def compare(plan: Plan, words: int, truth: dict[tuple[int, int], list[int]]) -> None:
    """A plan gives the plain server's answers, before it is measured; the plain server comes first."""
    for seed in range(2):
        got = plan.send(question(prompt_of(words, seed), 16))[2]
        wanted = truth.setdefault((words, seed), got)
        if got != wanted:
            raise SystemExit(f"kvxfer: {plan.name} answers otherwise: {got}, wanted {wanted}")


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="vLLM servers with and without hand-offs")
    parser.add_argument("--rates", default="0.5,1", help="requests a second")
    parser.add_argument("--words", default="60,400", help="lengths of prompts, in words of one or two tokens")
    parser.add_argument("--requests", type=int, default=8, help="requests of each measurement")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--plans", default="plain,two,pair,nixl", help="what to measure")
    parser.add_argument("--json", help="also write the numbers to this file")
    args = parser.parse_args()
    wanted = args.plans.split(",")
    results: list[dict[str, Any]] = []
    # Where scripts/engines_env.sh --peers puts NIXL.
    os.environ["PYTHONPATH"] = str(Path(sys.prefix) / "peers")
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-vllm-") as logs:
        zygote = Zygote(Path(logs))
        try:
            prefill, decode = (
                Server(zygote, name, role, prefix_cache=False, args=BLOCKS)
                for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
            )
            plain, *two = (
                Server(zygote, name, None, prefix_cache=False, args=BLOCKS)
                for name in ("plain", "two-a", "two-b")
            )
            others = [
                nixl(zygote, "nixl-prefill", "kv_producer", NIXL_ENGINE),
                nixl(zygote, "nixl-decode", "kv_consumer", "bench-decode"),
            ]
            plans = [
                Plan(name, servers)
                for name, servers in (
                    ("plain", [plain]),
                    ("two", two),
                    ("pair", [prefill, decode]),
                    ("nixl", others),
                )
                if name in wanted or name == "plain"
            ]
            truth: dict[tuple[int, int], list[int]] = {}
            costs: dict[str, Any] = {}
            print("plan   rate/s  words  first p50   p99 s   token p50   p99 ms  waiting", flush=True)
            for plan in plans:
                # Only the servers that are measured run, so that no others take their cores.
                for server in plan.servers:
                    server.start().ready()
                plan.open(Path(logs))
                for words in map(int, args.words.split(",")):
                    compare(plan, words, truth)
                    for rate in map(float, args.rates.split(",")):
                        if plan.name not in wanted:
                            continue
                        seen = sweep(plan, rate, words, args.requests, args.tokens)
                        results.append(seen)
                        print(
                            f"{plan.name:6} {rate:6.2f} {words:6d} {seen['first_token_p50_s']:10.2f}"
                            f" {seen['first_token_p99_s']:7.2f} {seen['token_p50_s'] * 1e3:10.0f}"
                            f" {seen['token_p99_s'] * 1e3:8.0f} {seen['waiting_max']:7.0f}",
                            flush=True,
                        )
                if plan.name == "pair":
                    costs = {server.name: hooks(server) for server in plan.servers}
                plan.close()
                for server in plan.servers:
                    server.stop()
            for name, found in costs.items():
                for hook, cost in found.items():
                    half, most = cost["p50_at_most_s"] * 1e6, cost["p99_at_most_s"] * 1e6
                    print(
                        f"{name:8} {hook:5} {cost['steps']:6.0f} steps:"
                        f" half at most {half:.0f} us, 99 % at most {most:.0f} us"
                    )
            if args.json:
                Path(args.json).write_text(json.dumps({"sweep": results, "hooks": costs}, indent=1))
        finally:
            zygote.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
