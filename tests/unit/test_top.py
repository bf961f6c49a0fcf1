"""`kvxfer top`: what it reads, what it makes of two looks, and what it shows."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pair import pair
from two import events, eventually, released

from kvxfer import prometheus
from kvxfer.cli import main
from kvxfer.cli import top as command
from kvxfer.cli._top_data import AgentView, Fleet
from kvxfer.prometheus import Load


@contextmanager
def endpoint(answer: Callable[[], str]) -> Iterator[str]:
    """A metrics endpoint that says whatever it is told to."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer().encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def top(*arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["top", *arguments]) == 0
    return out.getvalue()


def view(now: str, before: str | None, seconds: float = 1.0) -> AgentView:
    """One agent `a`, from two texts."""
    from prometheus_client.parser import text_string_to_metric_families

    def read(text: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return found

    return AgentView("u", "a", read(now), None if before is None else read(before), seconds)


def test_four_overlapping_transfers_of_1_gb_in_a_second_are_4_gb_per_s() -> None:
    text = 'kvxfer_moved_bytes_total{{agent="a"}} {}\nkvxfer_link_busy_seconds_total{{agent="a"}} {}\n'
    found = view(text.format(5_000_000_000, 1.5), text.format(1_000_000_000, 0.5)).as_dict()
    assert found["gbytes_per_s"] == 4.0
    assert found["link_busy_fraction"] == 1.0


def test_a_restarted_agents_counters_begin_at_zero() -> None:
    text = 'kvxfer_moved_bytes_total{{agent="a"}} {}\n'
    assert view(text.format(3_000_000_000), text.format(50_000_000_000)).as_dict()["gbytes_per_s"] == 3.0


def test_quantiles_are_of_what_came_between_two_looks() -> None:
    def text(*counts: int) -> str:
        les = ("0.001", "0.01", "0.1", "+Inf")
        return "".join(
            f'kvxfer_room_stage_seconds_bucket{{agent="a",stage="waiting",le="{le}"}} {n}\n'
            for le, n in zip(les, counts, strict=True)
        )

    name = "kvxfer_room_stage_seconds"
    first = view(text(50, 99, 100, 100), None)
    assert first.quantile_s(0.5, name, stage="waiting") == 0.001
    assert first.quantile_s(0.99, name, stage="waiting") == 0.01
    later = view(text(50, 99, 110, 111), text(50, 99, 100, 100))
    assert later.quantile_s(0.5, name, stage="waiting") == 0.1
    assert later.quantile_s(0.99, name, stage="waiting") == float("inf")
    assert view(text(5, 5, 5, 5), text(5, 5, 5, 5)).quantile_s(0.5, name, stage="waiting") is None
    assert first.quantile_s(0.5, name, stage="nowhere") is None


def test_a_real_agent_once_and_as_json() -> None:
    with (
        pair() as both,
        prometheus.serve(
            both.decode,
            both.prefill,
            port=0,
            load=lambda: Load(slots=8, slots_held=7, waiting_for_memory=2),
        ) as server,
    ):
        for _ in range(4):
            both.hand_off()
        failing = both.expect([99])
        events(both.decode, released(failing))
        eventually(lambda: both.decode.stats()["failed"] == 1, "published")
        where = f"127.0.0.1:{server.port}"
        found = json.loads(top(where, "--json", "--interval", "0.05"))
        assert [a["agent"] for a in found["agents"]] == ["decode-0", "prefill-0"]
        decode = found["agents"][0]
        assert decode["succeeded"] == 4
        assert decode["failed"] == 1
        assert decode["failed_now"] == 0
        assert decode["failures"] == {"bootstrapping: page_error": 1.0}
        assert (decode["slots"], decode["slots_held"], decode["waiting_for_memory"]) == (8, 7, 2)
        assert decode["gbytes_per_s"] == 0
        assert decode["rooms"]["decode"] == dict.fromkeys(
            ("bootstrapping", "waiting", "transferring", "draining"), 0
        )
        assert found["silent"] == {}
        text = top(f"http://{where}/metrics", "--once", "--interval", "0.05")
    for part in (
        "decode-0",
        "prefill-0",
        "7/8",
        "GB/s",
        "decode-0 failed 1 x bootstrapping: page_error",
        "2 agents",
    ):
        assert part in text, text
    # Whoever has a small terminal, or pipes it, sees all of it.
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_fleet_in_which_one_is_silent() -> None:
    with (
        pair() as both,
        prometheus.serve(both.decode, port=0) as server,
        endpoint(lambda: "up 1\n") as stranger,
    ):
        where = f"127.0.0.1:{server.port}"
        found = json.loads(
            top(where, stranger, "127.0.0.1:9", "--json", "--interval", "0.01", "--timeout", "1")
        )
        assert [a["agent"] for a in found["agents"]] == ["decode-0"]
        assert (
            found["silent"][f"http://{stranger}/metrics"]
            == "neither an agent nor a proxy there: no metric begins with kvxfer_"
        )
        assert "refused" in found["silent"]["http://127.0.0.1:9/metrics"]
        text = top(where, "127.0.0.1:9", "--once", "--interval", "0.01")
        assert "http://127.0.0.1:9/metrics does not answer" in text


def test_a_proxy_tells_of_its_decode_servers() -> None:
    text = (
        'kvxfer_slots{agent="h:8200"} 256\nkvxfer_slots_held{agent="h:8200"} 230\n'
        'kvxfer_requests_waiting{agent="proxy",cause="memory"} 12\n'
        'kvxfer_requests_waiting{agent="proxy",cause="transfer"} 0\n'
    )
    with endpoint(lambda: text) as proxy:
        found = json.loads(top(proxy, "--json", "--interval", "0.01"))
        assert {one["agent"]: (one["slots_held"], one["waiting_for_memory"]) for one in found["agents"]} == {
            "h:8200": (230, None),
            "proxy": (None, 12),
        }
        shown = top(proxy, "--once", "--interval", "0.01")
    assert "230/256" in shown
    assert "0 agents, 0.00 GB/s in all" in shown
    # It has no rooms and no stages to tell of.
    assert shown.count("h:8200") == shown.count("proxy") == 1
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_nobody_there_says_what_to_do() -> None:
    with endpoint(lambda: 'kvxfer_x{agent="} 1') as broken, redirect_stderr(io.StringIO()) as out:
        assert main(["top", "--once", "127.0.0.1:9", broken]) == 1
    assert "refused" in out.getvalue()
    assert "no metrics" in out.getvalue()
    assert "kvxfer.prometheus.serve(agent, port=9464)" in out.getvalue()


def test_the_live_view_looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends as the user ends it: by an interrupt."""
    looks = []
    with pair() as both, prometheus.serve(both.decode, port=0) as server:
        real = Fleet.look

        def look(self: Fleet) -> None:
            looks.append(1)
            if len(looks) == 4:
                raise KeyboardInterrupt
            both.hand_off()
            real(self)

        monkeypatch.setattr(Fleet, "look", look)
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            assert main(["top", f"127.0.0.1:{server.port}", "--interval", "0.01"]) == 130
    assert len(looks) == 4
    assert "decode-0" in out.getvalue()


def test_colours_say_what_is_wrong() -> None:
    base = (
        'kvxfer_pages{{agent="a",state="quarantined"}} {}\n'
        'kvxfer_slots{{agent="a"}} 10\n'
        'kvxfer_slots_held{{agent="a"}} {}\n'
    )
    assert command._style(view(base.format(0, 5), None).as_dict()) == ""
    assert command._style(view(base.format(0, 9), None).as_dict()) == "yellow"
    assert command._style(view(base.format(3, 9), None).as_dict()) == "bold red"
    failed = 'kvxfer_rooms_failed_total{{agent="a",stage="waiting",reason="peer_lost"}} {}\n'
    assert command._style(view(failed.format(2), failed.format(1)).as_dict()) == "bold red"
    assert command._style(view(failed.format(2), failed.format(2)).as_dict()) == ""
