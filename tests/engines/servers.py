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
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
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


def metric(port: int, name: str) -> float:
    """A metric of whoever listens there, over all labels that the name leaves open; 0 if it is not there,
    as with labels that have not been seen yet.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    labels = "" if "{" in name else r"(?:\{[^}]*\})?"
    found = re.findall(rf"^{re.escape(name)}{labels} (\S+)$", text, re.MULTILINE)
    if not found and name.partition("{")[0] not in text:
        raise KeyError(name)
    return sum(map(float, found))


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
    # Another connector than kvxfer's, as its --kv-transfer-config, and what it wants in the environment.
    config: dict[str, Any] | None = None
    env: dict[str, str] = field(default_factory=dict)
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
        config = self.config
        if self.role is not None:
            config = {
                "kv_connector": "KvxferConnector",
                "kv_connector_module_path": "kvxfer.vllm",
                "kv_role": self.role,
                "kv_load_failure_policy": self.policy,
                "kv_connector_extra_config": {
                    **({} if self.role == "kv_consumer" else {"directory": self.directory}),
                    **self.extra,
                },
            }
        if config is not None:
            args += ["--kv-transfer-config", json.dumps(config)]
        order = {"args": args, "env": {**ENV, **self.env}, "log": str(self.log)}
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
        return metric(self.port, name)

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
    """What came back: of an answer that is not streamed as it was, of a stream put together."""

    status: int
    body: dict[str, Any]
    # It ended as answers do: with its last byte, and a stream with [DONE].
    whole: bool = True
    # A streamed answer's pieces.
    pieces: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The completion."""
        return str(self.body["choices"][0]["text"])

    @property
    def tokens(self) -> list[int]:
        """The completion's tokens."""
        return list(self.body["choices"][0]["token_ids"])

    @property
    def error(self) -> str:
        """What went wrong, in the server's words; empty if nothing did."""
        found = self.body.get("error")
        return json.dumps(found) if found else ""


def post(
    port: int, body: dict[str, Any], *, timeout: float = ANSWER_S, first: Callable[[], None] | None = None
) -> Answer:
    """One completion, streamed if `body` says so; `first` is called when a stream's first token is there. A
    connection that breaks before there is a status raises OSError.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        headers = dict(answer.getheaders())
        try:
            if headers.get("Content-Type", headers.get("content-type", "")).startswith("text/event-stream"):
                found = _stream(answer, first)
                found.headers = headers
                return found
            data = answer.read()
            return Answer(answer.status, json.loads(data), headers=headers)
        except (HTTPException, ValueError) as error:
            return Answer(answer.status, {"error": repr(error)}, whole=False, headers=headers)
    finally:
        connection.close()


def _stream(answer: HTTPResponse, first: Callable[[], None] | None) -> Answer:
    pieces: list[str] = []
    tokens: list[int] = []
    reason = None
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            choice = {"text": "".join(pieces), "token_ids": tokens, "finish_reason": reason}
            return Answer(answer.status, {"choices": [choice]}, pieces=pieces)
        event = json.loads(data)
        if "error" in event:
            # What follows counts for nothing; an event that says it is done would make it a whole answer.
            rest = answer.read()
            assert b"[DONE]" not in rest, rest
            return Answer(answer.status, event, whole=False, pieces=pieces)
        for choice in event["choices"]:
            pieces.append(choice["text"])
            tokens += choice.get("token_ids") or ()
            reason = choice["finish_reason"] or reason
        if first is not None and pieces:
            first()
            first = None
    return Answer(answer.status, {}, whole=False, pieces=pieces)


def question(prompt: str | list[int], tokens: int = 16) -> dict[str, Any]:
    """A greedy completion of so many tokens, which come back, too."""
    return {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def close_all(servers: Iterable[Server]) -> None:
    """Ends servers that run."""
    for server in servers:
        server.stop()
