"""Answers a prompt with two vLLM servers behind `kvxfer proxy`, as a user would start them: one server
computes the prompt, the other the answer.

Run it with `make demo-vllm`; `ARGS="--prompt ..."` asks something else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "target" / "engines" / "smollm2"
START_S = 600.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One vLLM server."""

    def __init__(self, name: str, role: str | None, folder: Path, directory: str, secret: Path) -> None:
        self.name, self.port, self.log = name, free_port(), folder / f"{name}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
        command += ["--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--max-model-len", "2048", "--enforce-eager", "--block-size", "32", "--dtype", "bfloat16"]
        if role is not None:
            config: dict[str, Any] = {
                "kv_connector": "KvxferConnector",
                "kv_connector_module_path": "kvxfer.vllm",
                "kv_role": role,
            }
            if role == "kv_producer":
                config["kv_connector_extra_config"] = {"directory": directory}
            command += ["--kv-transfer-config", json.dumps(config)]
        env = {
            **os.environ,
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "KVXFER_SECRET_FILE": str(secret),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )

    def ready(self) -> None:
        """Waits until it answers."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        raise SystemExit(f"kvxfer: the {self.name} server did not start:\n{self.log.read_text()[-3000:]}")

    def metrics(self) -> dict[str, float]:
        """kvxfer's counters on its Prometheus endpoint."""
        return metrics(self.port)

    def stop(self) -> None:
        """Ends it and what it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)


class Proxy:
    """`kvxfer proxy` before a prefill and a decode server."""

    def __init__(self, prefill: Server, decode: Server, directory: str, log: Path) -> None:
        self.command = ["kvxfer", "proxy", "--listen", "127.0.0.1:0"]
        self.command += ["--prefill", f"http://127.0.0.1:{prefill.port},source={directory}"]
        self.command += ["--decode", f"http://127.0.0.1:{decode.port}"]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.command, "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        assert self.process.stdout is not None
        said = ""
        while not said.endswith("\n}\n"):
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"kvxfer: the proxy did not start:\n{log.read_text()[-3000:]}")
            said += line
        self.url = str(json.loads(said)["listening"])
        self.port = int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        """Ends it, when what it serves is over."""
        self.process.terminate()
        self.process.wait(30)


def metrics(port: int) -> dict[str, float]:
    """What begins with kvxfer_ on a Prometheus endpoint, without vLLM's labels, which differ each time."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("kvxfer_"):
            name, _, value = line.rpartition(" ")
            found[name.split("{")[0] if "engine=" in name else name] = float(value)
    return found


def ask(port: int, body: dict[str, Any]) -> tuple[str, list[int], float, float]:
    """Streams one completion: its text and tokens, seconds to the first token and to the end."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    began, first, done = time.monotonic(), 0.0, False
    text, tokens = "", []
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            done = line[6:].strip() == b"[DONE]"
            if done:
                break
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"kvxfer: the answer broke off: {event['error']}")
            first = first or time.monotonic() - began
            text += event["choices"][0]["text"]
            tokens += event["choices"][0]["token_ids"]
    if not done:
        raise SystemExit("kvxfer: the answer broke off, and nothing says why")
    return text, tokens, first, time.monotonic() - began


def counted(decode: Server) -> dict[str, float]:
    """The decode server's counters, with the one hand-off. They follow its steps."""
    until = time.monotonic() + 30
    while (seen := decode.metrics()).get("kvxfer_rooms_received_total") != 1 and time.monotonic() < until:
        time.sleep(0.2)
    return seen


def say(text: str) -> None:
    """Prints one line, at once."""
    print(f"kvxfer: {text}", flush=True)


def main() -> int:
    """Starts, asks, compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt", default="The capital of France is", help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens of the answer")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    args = parser.parse_args()
    tell = (lambda text: print(f"kvxfer: {text}", file=sys.stderr, flush=True)) if args.json else say
    with tempfile.TemporaryDirectory(prefix="kvxfer-vllm-") as scratch:
        folder = Path(scratch)
        secret = folder / "secret"
        secret.write_text(secrets.token_hex(32))
        directory = f"127.0.0.1:{free_port()}"
        tell("starting three vLLM servers: one alone, one for prompts, one for answers (about a minute) ...")
        began = time.monotonic()
        servers = [
            Server(name, role, folder, directory, secret)
            for name, role in (("plain", None), ("prefill", "kv_producer"), ("decode", "kv_consumer"))
        ]
        proxy = None
        try:
            for server in servers:
                server.ready()
            tell(f"... done in {time.monotonic() - began:.0f} s")
            plain, prefill, decode = servers
            proxy = Proxy(prefill, decode, directory, folder / "proxy.log")
            tell(" ".join(proxy.command))
            body = {
                "model": "smollm2",
                "prompt": args.prompt,
                "max_tokens": args.max_tokens,
                "temperature": 0,
                "return_token_ids": True,
            }
            alone, wanted, _, _ = ask(plain.port, body)
            pair, tokens, first, whole = ask(proxy.port, body)
            seen, routed = counted(decode), metrics(proxy.port)
        finally:
            if proxy is not None:
                proxy.stop()
            for server in servers:
                server.stop()
    part = "kvxfer_proxy_first_token_part_seconds_sum"
    parts = {
        found[1]: value * 1e3
        for name, value in routed.items()
        if (found := re.fullmatch(rf'{part}\{{part="(\w+)"\}}', name)) is not None
    }
    result = {
        "prompt": args.prompt,
        "one_server": alone,
        "pair": pair,
        "same_tokens": tokens == wanted,
        "tokens": len(tokens),
        "hand_offs": int(seen["kvxfer_rooms_received_total"]),
        "kv_bytes": int(seen["kvxfer_received_bytes_total"]),
        "transfer_ms": seen["kvxfer_transfer_seconds_sum"] * 1e3,
        "first_token_ms": first * 1e3,
        "first_token_parts_ms": parts,
        "answer_ms": whole * 1e3,
    }
    well = result["same_tokens"] and result["hand_offs"] == 1
    if args.json:
        print(json.dumps(result, indent=2))
        return 0 if well else 1
    say(f"prompt       {args.prompt!r}")
    say(f"one server   {alone!r}")
    say(f"the pair     {pair!r}")
    say(
        f"handed off   {seen['kvxfer_received_bytes_total'] / 1e3:.0f} kB of KV cache from prefill to decode,"
        f" layer by layer in the {seen['kvxfer_transfer_seconds_sum'] * 1e3:.0f} ms in which prefill computed"
    )
    leg, admission = parts.get("prefill", 0.0), parts.get("admission", 0.0)
    say(f"first token  after {first * 1e3:.0f} ms, all {len(tokens)} after {whole * 1e3:.0f} ms")
    say(f"proxy        admitted it after {admission:.1f} ms; prefill's leg took {leg:.0f} ms")
    if not well:
        say("the two answers DIFFER" if not result["same_tokens"] else "decode computed the prompt itself")
        return 1
    say(f"all {len(tokens)} tokens are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
