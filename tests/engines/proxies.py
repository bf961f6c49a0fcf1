"""`kvxfer proxy` as a user starts it, before servers of `servers.py`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servers import Server, metric

# SmolLM2-135M: 30 layers, 3 heads of 64, keys and values, bfloat16.
KV_BYTES = 30 * 3 * 64 * 2 * 2
# What the proxy holds for requests that are not over.
HELD = (
    *("requests_in_flight", "bytes_in_flight", "prompt_tokens_in_flight"),
    *("pages_reserved", "pages_short", "slots_held", "queued_requests"),
)


class Proxy:
    """The proxy's process. It is ready when it has been made."""

    def __init__(
        self,
        logs: Path,
        prefill: Sequence[Server],
        decode: Sequence[Server],
        *args: str,
        slots: int = 64,
        settings: str = "",
    ) -> None:
        name = "+".join(one.name for one in (*prefill, *decode))
        self.log = logs / f"proxy-{name}-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "kvxfer", "proxy", "--listen", "127.0.0.1:0", "--json"]
        for one in prefill:
            command += ["--prefill", f"http://127.0.0.1:{one.port},source={one.directory}"]
        if not prefill:
            # It wants one; with none that is up, decode servers compute prompts, if they may.
            command += ["--prefill", "http://127.0.0.1:9"]
        for one in decode:
            command += ["--decode", f"http://127.0.0.1:{one.port},slots={slots}{settings}"]
        command += ["--kv-bytes-per-token", str(KV_BYTES), "--health-interval-s", "0.5", *args]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.port = int(self._started()["listening"].rpartition(":")[2])

    def _started(self) -> dict[str, Any]:
        """What it says of itself once it listens."""
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            said += line
            if line.rstrip() == "}":
                found: dict[str, Any] = json.loads(said)
                if not all(one["up"] for one in found["servers"] if one["role"] == "decode"):
                    break
                return found
        raise RuntimeError(f"the proxy did not start: {said}{self.log.read_text()[-2000:]}")

    def metric(self, name: str) -> float:
        """A metric, without the `kvxfer_proxy_` that all begin with."""
        return metric(self.port, f"kvxfer_proxy_{name}")

    def idle(self, seconds: float = 120.0) -> None:
        """Waits until it holds nothing for anybody; fails if that does not come."""
        until = time.monotonic() + seconds
        while held := {name: value for name in HELD if (value := self.metric(name))}:
            assert time.monotonic() < until, (held, self.log.read_text()[-3000:])
            time.sleep(0.1)

    def up(self, server: Server, seconds: float = 60.0) -> None:
        """Waits until it has noticed that a server takes requests."""
        until = time.monotonic() + seconds
        role = "prefill" if server.role == "kv_producer" else "decode"
        while not self.metric(f'up{{role="{role}",server="127.0.0.1:{server.port}"}}'):
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def stop(self) -> int:
        """SIGTERM, upon which it ends when its requests have; its exit status."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
            raise


class Proxies:
    """Proxies before one set of servers, each started when it is first asked for, as
    `proxies("p32", "d32,d64")`.
    """

    def __init__(self, logs: Path, servers: Mapping[str, Server]) -> None:
        self._logs, self._servers = logs, servers
        self._made: dict[tuple[str, ...], Proxy] = {}

    def __call__(self, prefill: str, decode: str, *args: str) -> Proxy:
        key = (prefill, decode, *args)
        if key not in self._made:
            groups = ([self._servers[one] for one in names.split(",")] for names in (prefill, decode))
            self._made[key] = Proxy(self._logs, *groups, *args)
        return self._made[key]

    @property
    def made(self) -> list[Proxy]:
        """All so far."""
        return list(self._made.values())

    def close(self) -> None:
        """Ends them; each must end well."""
        assert [one.stop() for one in self.made] == [0] * len(self.made)
