"""vLLM servers on this machine, and requests to them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "target" / "engines" / "smollm2"
HERE = Path(__file__).resolve().parent

# Other work may load the machine: a start takes ten seconds of a core, and everything here waits for events.
START_S = 400.0
ANSWER_S = 240.0

ENV = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOG_STATS_INTERVAL": "2",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
}


def free_port() -> int:
    """A port that nobody listens on now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Zygote:
    """The process that forks servers; see zygote.py."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._log = (logs / "zygote.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **ENV},
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # vLLM may print as it is imported.
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the zygote died: {(self.logs / 'zygote.log').read_text()[-2000:]}")

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """One order and its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends all servers."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()


@dataclass
class Server:
    """One vLLM server: its address, its kvxfer directory, its process."""

    zygote: Zygote
    name: str
    role: str | None
    block: int = 32
    prefix_cache: bool = True
    policy: str = "fail"
    tp: int = 1
    args: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    directory_port: int = field(default_factory=free_port)
    pid: int = 0

    @property
    def directory(self) -> str:
        """The address of its kvxfer directory."""
        return f"127.0.0.1:{self.directory_port}"

    @property
    def log(self) -> Path:
        """Its output, of all of its lives."""
        return self.zygote.logs / f"{self.name}.log"

    def start(self) -> Server:
        """Starts it; see `ready`."""
        args = ["--model", str(MODEL), "--served-model-name", "smollm2", "--host", "127.0.0.1"]
        args += [
            "--port",
            str(self.port),
            "--max-model-len",
            "2048",
            "--enforce-eager",
            "--max-num-seqs",
            "64",
        ]
        args += ["--block-size", str(self.block), "--dtype", "bfloat16", "--disable-uvicorn-access-log"]
        args += ["--tensor-parallel-size", str(self.tp)]
        args += ["--distributed-executor-backend", "uni" if self.tp == 1 else "mp", *self.args]
        args.append("--enable-prefix-caching" if self.prefix_cache else "--no-enable-prefix-caching")
        if self.role is not None:
            config = {
                "kv_connector": "KvxferConnector",
                "kv_connector_module_path": "kvxfer.vllm",
                "kv_role": self.role,
                "kv_load_failure_policy": self.policy,
                "kv_connector_extra_config": {"directory": self.directory, **self.extra},
            }
            args += ["--kv-transfer-config", json.dumps(config)]
        order = {"args": args, "env": ENV, "log": str(self.log)}
        self.pid = self.zygote.ask(order)["pid"]
        return self

    def ready(self) -> Server:
        """Waits until it answers."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if not _alive(self.pid):
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return self
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        raise RuntimeError(f"{self.name} did not start:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """As a crash does: it and all that it forked, at once."""
        os.killpg(self.pid, signal.SIGKILL)
        self.zygote.ask({"reap": self.pid})
        self.pid = 0

    def stop(self) -> None:
        """Ends it, if it runs."""
        if self.pid:
            self.kill()

    def metric(self, name: str) -> float:
        """A metric, over all labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if not found:
            raise KeyError(name)
        return sum(map(float, found))

    def idle(self, seconds: float = 120.0) -> None:
        """Waits until no page is held and nothing runs or waits; fails if that does not come."""
        until = time.monotonic() + seconds
        names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
        while True:
            held = {name: self.metric(name) for name in names}
            if not any(held.values()):
                return
            if time.monotonic() > until:
                raise AssertionError(f"{self.name} still holds {held}:\n{self.log.read_text()[-3000:]}")
            # The gauges follow the engine's steps: an idle engine needs one to say that it is.
            time.sleep(0.5)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie has ended.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@dataclass
class Answer:
    """What a server said."""

    status: int
    body: dict[str, Any]
    # The bytes of a stream ended as streams do.
    whole: bool = True

    @property
    def text(self) -> str:
        """The completion."""
        return str(self.body["choices"][0]["text"])

    @property
    def tokens(self) -> list[int]:
        """The completion's tokens."""
        return list(self.body["choices"][0]["token_ids"])


def post(port: int, body: dict[str, Any], *, timeout: float = ANSWER_S) -> Answer:
    """One completion. A connection that breaks raises OSError."""
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        try:
            return Answer(answer.status, json.loads(data))
        except ValueError:
            return Answer(answer.status, {"error": data.decode(errors="replace")}, whole=False)
    finally:
        connection.close()


def stream(port: int, body: dict[str, Any]) -> tuple[list[str], bool]:
    """A streamed completion's pieces, and whether it came to its end."""
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**body, "stream": True}),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        pieces = []
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                return pieces, True
            event = json.loads(data)
            if "choices" not in event:
                return pieces, False
            pieces.append(event["choices"][0]["text"])
        return pieces, False
    finally:
        connection.close()


def question(prompt: str | list[int], tokens: int = 16) -> dict[str, Any]:
    """A greedy completion whose tokens come back, too."""
    return {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
    }


def close_all(servers: Iterable[Server]) -> None:
    """Ends servers that run."""
    for server in servers:
        server.stop()
