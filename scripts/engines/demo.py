"""Answers a prompt with two vLLM servers, as a user would start them: one computes the prompt, the other the
answer.

Run it with `make demo-vllm`; `--prompt` asks something else.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import kvxfer as kx

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

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """One completion."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def metrics(self) -> dict[str, float]:
        """kvxfer's counters on its Prometheus endpoint."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("kvxfer_")
        }

    def stop(self) -> None:
        """Ends it and what it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)


def say(text: str) -> None:
    """Prints one line, at once."""
    print(f"kvxfer: {text}", flush=True)


def main() -> int:
    """Starts, asks, compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="The capital of France is", help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens of the answer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvxfer-vllm-") as scratch:
        folder = Path(scratch)
        secret = folder / "secret"
        secret.write_text(secrets.token_hex(32))
        directory = f"127.0.0.1:{free_port()}"
        say("starting three vLLM servers: one alone, one for prompts, one for answers (about a minute) ...")
        began = time.monotonic()
        servers = [
            Server(name, role, folder, directory, secret)
            for name, role in (("plain", None), ("prefill", "kv_producer"), ("decode", "kv_consumer"))
        ]
        try:
            for server in servers:
                server.ready()
            say(f"... done in {time.monotonic() - began:.0f} s")
            plain, prefill, decode = servers
            body = {
                "model": "smollm2",
                "prompt": args.prompt,
                "max_tokens": args.max_tokens,
                "temperature": 0,
                "return_token_ids": True,
            }
            alone = plain.ask(body)["choices"][0]
            room = kx.new_room()
            first = {"do_remote_decode": True, "do_remote_prefill": False, "room": room}
            second = {"do_remote_prefill": True, "do_remote_decode": False, "room": room, "source": directory}
            leg = threading.Thread(
                target=prefill.ask, args=({**body, "max_tokens": 1, "kv_transfer_params": first},)
            )
            began = time.monotonic()
            leg.start()
            pair = decode.ask({**body, "kv_transfer_params": second})["choices"][0]
            took = time.monotonic() - began
            leg.join()
            say(f"prompt      {args.prompt!r}")
            say(f"one server  {alone['text']!r}")
            say(f"the pair    {pair['text']!r}   ({took:.2f} s)")
            until = time.monotonic() + 30
            while (seen := decode.metrics()).get(
                "kvxfer_rooms_received_total"
            ) != 1 and time.monotonic() < until:
                time.sleep(0.2)
            say(
                f"handed off  {seen['kvxfer_received_bytes_total'] / 1e3:.0f} kB of KV cache"
                f" in {seen['kvxfer_transfer_seconds_sum'] * 1e3:.0f} ms, layer by layer as prefill computed"
            )
            if alone["token_ids"] != pair["token_ids"]:
                say("the two answers DIFFER")
                return 1
            say(f"all {len(pair['token_ids'])} tokens are the same")
            return 0
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    sys.exit(main())
