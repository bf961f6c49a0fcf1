"""A real Prometheus scrapes real agents and a real proxy, evaluates the alert rules and answers every query
of the dashboard, with nothing wired by hand between them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_openai import never
from pair import Pair, pair
from proxied import Scene, in_background
from two import events, eventually, released

from kvxfer import prometheus
from kvxfer.admission import Config

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
SECONDS = 60
PAGE_BYTES = 4 * 2 * 2 * 2 * 16 * 2

pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no prometheus; `apt-get install prometheus` has it"
    ),
    pytest.mark.timeout(180),
]


class Prometheus:
    """A server that is up; everything is asked over its API."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        url = f"{self.base}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {query}: {error.read().decode()}") from None

    def ask(self, expr: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Labels to the value now."""
        data = self.get("/api/v1/query", query=expr)["data"]
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in data["result"]}

    def wait_for(self, expr: str, good: Callable[[list[float]], bool]) -> list[float]:
        """The values, once they are good: Prometheus scrapes several times a second."""
        found: list[float] = []

        def look() -> bool:
            nonlocal found
            found = list(self.ask(expr).values())
            return good(found)

        try:
            eventually(look, expr, seconds=SECONDS, pause=0.05)
        except AssertionError:
            raise AssertionError(f"not within {SECONDS} s: {expr}; last: {found}") from None
        return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def server(folder: Path, *targets: str) -> Iterator[Prometheus]:
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}\n"
        f"rule_files: ['{MONITORING / 'kvxfer-alerts.yml'}']\n"
        "scrape_configs:\n"
        f"  - {{job_name: kvxfer, static_configs: [{{targets: {list(targets)}}}]}}\n"
    )
    port = free_port()
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        up = Prometheus(port)

        def ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                with urllib.request.urlopen(f"{up.base}/-/ready", timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        eventually(ready, "Prometheus is ready", seconds=SECONDS, pause=0.05)
        yield up
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


HELD, WAITING = 9, 3


async def _busy(s: Scene) -> list[asyncio.Future[Any]]:
    """Nine requests that do not end, and three for which no slot is left."""
    s.decode[0].behave = never
    asking = [asyncio.ensure_future(s.ask()) for _ in range(HELD + WAITING)]
    while s.router.admission.stats().queued != WAITING:
        await asyncio.sleep(0.001)
    return asking


async def _leave(asking: list[asyncio.Future[Any]]) -> None:
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Scene, Prometheus]]:
    settings = {"decode_settings": ",pages=4000,slots=10", "admission": Config(slots_share=0.9)}
    with (
        pair() as both,
        prometheus.serve(both.prefill, both.decode, port=0) as served,
        in_background(**settings) as (proxy, call),
        server(
            tmp_path_factory.mktemp("prometheus"),
            f"127.0.0.1:{served.port}",
            proxy.url.removeprefix("http://"),
        ) as up,
    ):
        up.wait_for("up{job='kvxfer'}", lambda values: values == [1.0, 1.0])
        first = up.wait_for("kvxfer_proxy_first_token_seconds_count", lambda values: len(values) == 1)
        for _ in range(4):
            call(proxy.stream())
        up.wait_for("kvxfer_proxy_first_token_seconds_count", lambda values: values == [first[0] + 4])
        asking = call(_busy(proxy))
        try:
            yield both, proxy, up
        finally:
            call(_leave(asking))


def test_prometheus_has_what_happened(scraped: tuple[Pair, Scene, Prometheus]) -> None:
    both, _, up = scraped
    name = "kvxfer_rooms_succeeded_total"
    before = sum(up.wait_for(name, lambda values: len(values) == 2))
    moved = sum(up.wait_for("kvxfer_moved_bytes_total", lambda values: len(values) == 2))
    for _ in range(5):
        both.hand_off(pages=8)
    up.wait_for(f"sum({name})", lambda values: values == [before + 2 * 5])
    up.wait_for("sum(kvxfer_moved_bytes_total)", lambda values: values == [moved + 5 * 8 * PAGE_BYTES])
    # What Prometheus kept are counters and histograms by their types.
    kinds = {key: value[0]["type"] for key, value in up.get("/api/v1/metadata")["data"].items()}
    assert kinds["kvxfer_moved_bytes"] == "counter"
    assert kinds["kvxfer_room_stage_seconds"] == "histogram"
    assert kinds["kvxfer_rooms"] == "gauge"


def test_prometheus_sees_a_rate_of_bytes_and_quantiles(scraped: tuple[Pair, Scene, Prometheus]) -> None:
    both, _, up = scraped

    def busy() -> bool:
        both.hand_off(pages=16)
        return bool(up.ask("kvxfer:moved_bytes:rate1m{agent='decode-0'} > 0"))

    eventually(busy, "bytes move", seconds=SECONDS)
    quantile = "histogram_quantile(0.99, sum by (le, stage) (rate(kvxfer_room_stage_seconds_bucket[1m]))) > 0"
    up.wait_for(quantile, lambda values: len(values) == 3)


def test_alerts_fire_on_what_really_happens(scraped: tuple[Pair, Scene, Prometheus]) -> None:
    both, proxy, up = scraped
    decode = proxy.decode[0].name
    rules = [r for g in up.get("/api/v1/rules")["data"]["groups"] for r in g["rules"]]
    assert len(rules) >= 12
    eventually(
        lambda: all(
            r["health"] == "ok" for g in up.get("/api/v1/rules")["data"]["groups"] for r in g["rules"]
        ),
        "every rule has been evaluated without an error",
        seconds=SECONDS,
        pause=0.1,
    )
    # 9 of 10 slots are held, all that the proxy gives away: pending until it has lasted for 5 minutes.
    up.wait_for(
        f"ALERTS{{alertname='KvxferSlotsNearlyAllHeld', agent='{decode}'}}", lambda values: values == [1.0]
    )
    up.wait_for(
        f"ALERTS{{alertname='KvxferProxySlotsAllHeld', server='{decode}'}}", lambda values: values == [1.0]
    )
    up.wait_for("kvxfer_requests_waiting{cause='memory', agent='proxy'}", lambda values: values == [WAITING])
    up.wait_for("kvxfer_requests_waiting{cause='transfer'}", lambda values: len(values) == 3)
    failing = both.expect([99])
    events(both.decode, released(failing))
    up.wait_for(
        "ALERTS{alertname='KvxferRoomsFail', alertstate='firing', reason='page_error', "
        "stage='bootstrapping'}",
        lambda values: values == [1.0],
    )


def test_every_query_of_the_dashboard_is_answered(scraped: tuple[Pair, Scene, Prometheus]) -> None:
    both, _, up = scraped
    board = json.loads((MONITORING / "kvxfer-dashboard.json").read_text())
    began = time.monotonic()
    while time.monotonic() - began < 1:
        both.hand_off(pages=16)
    room = both.expect([1])
    both.is_waiting(room)
    both.decode.cancel(room)
    events(both.decode, released(room))
    up.wait_for("rate(kvxfer_drain_seconds_count{agent='decode-0'}[2m]) > 0", lambda values: len(values) == 1)
    queries = []
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", "2m")
            for variable in ("job", "instance", "agent"):
                expr = expr.replace(f"${variable}", ".*")
            assert "$" not in expr, expr
            queries.append(expr)
    assert len(queries) >= 20
    for expr in queries:
        # A scrape that came too late on a busy machine leaves a gap of half a second.
        up.wait_for(expr, lambda values: len(values) >= 1)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            series = re.sub(
                r"\$\w+", ".*", re.search(r"label_values\((.*), \w+\)", variable["definition"])[1]
            )  # type: ignore[index]
            assert up.get("/api/v1/series", **{"match[]": series})["data"]
