"""Real servers behind the real proxy, each a process as a user starts it: greedy answers are those of one
plain server, and whatever breaks ends in an error or in a whole answer.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from asked import LIST, SHORT, STORY, Plain, together, whole
from proxies import Proxies, Proxy
from servers import Answer, Server, Zygote, post, question

pytestmark = pytest.mark.timeout(900)

PAIRS = [("p32", "d32"), ("p32", "d64"), ("p64", "d32"), ("p64", "d64")]


def ask(proxy: Proxy, prompt: str, tokens: int = 16, **more: Any) -> Answer:
    """One completion through the proxy; in a stream its last event has the usage."""
    return post(proxy.port, {**question(prompt, tokens), **more})


def right(proxy: Proxy, truth: Plain, prompt: str, tokens: int = 16) -> None:
    """One answer, token for token that of the plain server."""
    assert whole(ask(proxy, prompt, tokens)) == truth(prompt, tokens).tokens


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_case_05_answers_are_the_plain_servers_token_for_token(
    servers: dict[str, Server], proxied: Proxies, truth: Plain, p: str, d: str
) -> None:
    """Pages of 32 and 64 tokens, the former with prefix caches and the latter without."""
    proxy = proxied(p, d)
    for prompt in (SHORT, LIST, STORY[:700], STORY):
        before = servers[d].metric("kvxfer_rooms_received_total")
        right(proxy, truth, prompt)
        servers[d].idle()
        assert servers[d].metric("kvxfer_rooms_received_total") == before + 1
    servers[p].idle()
    proxy.idle()
    assert proxy.metric("recomputed_total") == 0


def test_case_06_three_prefill_ranks_hand_off_to_one_decode_rank(
    zygote: Zygote, servers: dict[str, Server], truth: Plain
) -> None:
    three = Server(
        zygote, "p3", "kv_producer", tp=3, args=("--num-gpu-blocks-override", "320"), extra={"timeout_s": 120}
    )
    try:
        three.start().ready()
        for d in ("d32", "d64"):
            proxy = Proxy(zygote.logs, [three], [servers[d]])
            try:
                for prompt in (SHORT, f"Three ranks to {d}. {STORY[:600]}"):
                    # Ranks add up in another order than one alone, which rounds otherwise.
                    truth(prompt).check(whole(ask(proxy, prompt)))
                three.idle()
            finally:
                assert proxy.stop() == 0
        assert three.metric("kvxfer_rooms_sent_total") == 4 * 3
    finally:
        three.stop()


def test_the_capital_of_france(proxied: Proxies) -> None:
    assert ask(proxied("p32", "d32"), SHORT, 2).text.startswith(" Paris")


def test_late_choice_prefill_first_and_decode_by_its_answer(proxied: Proxies, truth: Plain) -> None:
    proxy = proxied("p32", "d32,d64", "--decode-choice", "late")
    for prompt in (LIST, f"Late. {STORY[:500]}", f"Later. {STORY[:500]}"):
        right(proxy, truth, prompt)
    proxy.idle()


@pytest.mark.parametrize("choice", ["early", "late"])
def test_a_stream_is_the_whole_answer(proxied: Proxies, truth: Plain, choice: str) -> None:
    proxy = (
        proxied("p32", "d32") if choice == "early" else proxied("p32", "d32,d64", "--decode-choice", "late")
    )
    before = proxy.metric("first_token_seconds_count")
    prompt = f"A stream, {choice}. {STORY[:600]}"
    answer = ask(proxy, prompt, 24, stream=True)
    truth(prompt, 24).check(whole(answer))
    assert len(answer.pieces) > 5
    assert proxy.metric("first_token_seconds_count") == before + 1


def test_shared_prefixes_are_moved_once(servers: dict[str, Server], proxied: Proxies, truth: Plain) -> None:
    d, proxy = servers["d32"], proxied("p32", "d32")
    head = "In the year 1066 a battle took place on a hill in the south of England. " * 12
    moved = []
    for tail in ("Who won?", "Who lost?", "Where was it?"):
        before = d.metric("kvxfer_received_bytes_total")
        truth(head + tail).check(whole(ask(proxy, head + tail)))
        d.idle()
        moved.append(d.metric("kvxfer_received_bytes_total") - before)
    assert moved[1] < moved[0] / 3
    assert moved[2] < moved[0] / 3


def test_eight_at_once_over_two_prefill_and_two_decode_servers(
    servers: dict[str, Server], proxied: Proxies, truth: Plain
) -> None:
    proxy = proxied("p32,p64", "d32,d64")
    names = ("p32", "p64", "d32", "d64")
    kinds = {"p": "kvxfer_rooms_sent_total", "d": "kvxfer_rooms_received_total"}
    before = {name: servers[name].metric(kinds[name[0]]) for name in names}
    prompts = [f"{i}. {STORY[: 100 + 90 * i]}" for i in range(8)]
    together(lambda prompt: ask(proxy, prompt, 12), truth, prompts, 12)
    proxy.idle()
    for name in names:
        servers[name].idle()
    counts = {name: servers[name].metric(kinds[name[0]]) - before[name] for name in names}
    assert counts["p32"] + counts["p64"] == counts["d32"] + counts["d64"] == 8
    # Load decides, and with eight at once no server stays without any.
    assert min(counts.values()) > 0


def test_case_24_sixty_four_at_once_with_a_prefill_that_is_slow_and_not_one_is_aborted(
    servers: dict[str, Server], proxied: Proxies, truth: Plain
) -> None:
    """One prefill server computes 64 prompts on a core or two; those who wait, wait in the proxy's queue and
    at the servers.
    """
    proxy = proxied("p32", "d32")
    names = ("aborts_total", "refused_total", "retries_total", "server_failures_total", "recomputed_total")
    before = {name: proxy.metric(name) for name in names}
    failed = servers["d32"].metric("kvxfer_rooms_received_failed_total")
    prompts = [f"Story {i}: {STORY[: 200 + 5 * i]}" for i in range(64)]
    together(lambda prompt: ask(proxy, prompt, 4, stream=True), truth, prompts, 4)
    assert {name: proxy.metric(name) for name in names} == before
    assert servers["d32"].metric("kvxfer_rooms_received_failed_total") == failed
    for one in (servers["p32"], servers["d32"], proxy):
        one.idle()


def hang_up(port: int, body: dict[str, Any], until: Callable[[socket.socket], None]) -> None:
    """Sends a streamed request and goes away."""
    data = json.dumps({**body, "stream": True}).encode()
    with closing(socket.create_connection(("127.0.0.1", port), timeout=240)) as connection:
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""])
        connection.sendall(head.encode() + data)
        until(connection)


@pytest.mark.parametrize("when", ["at once", "in flight", "first token"])
@pytest.mark.parametrize(("p", "d"), [("p32", "d32"), ("p64", "d64")])
def test_a_client_that_hangs_up_leaves_nothing_held_at_either_server_nor_in_the_proxy(
    servers: dict[str, Server], proxied: Proxies, truth: Plain, p: str, d: str, when: str
) -> None:
    proxy = proxied(p, d)
    before = proxy.metric('aborts_total{by="client"}')

    def until(connection: socket.socket) -> None:
        if when == "in flight":
            while not proxy.metric("requests_in_flight"):
                time.sleep(0.005)
        elif when == "first token":
            got = b""
            while b"data: " not in got:
                got += connection.recv(4096)

    hang_up(proxy.port, question(f"{when} {STORY}", 400), until)
    # The proxy counts it, or never saw a whole request of it.
    limit = time.monotonic() + 60
    while proxy.metric('aborts_total{by="client"}') == before:
        assert time.monotonic() < limit, proxy.log.read_text()[-2000:]
        time.sleep(0.05)
    proxy.idle()
    for name in (p, d):
        servers[name].idle()
    right(proxy, truth, SHORT)


@pytest.mark.parametrize(
    ("settings", "slots", "reason"),
    [("", 4, "decode_slots"), (",pages=16,page-tokens=32", 64, "decode_pages")],
)
def test_when_decode_is_full_more_get_429_with_a_time_and_then_an_answer(
    zygote: Zygote, servers: dict[str, Server], truth: Plain, settings: str, slots: int, reason: str
) -> None:
    proxy = Proxy(
        zygote.logs,
        [servers["p32"]],
        [servers["d32"]],
        "--queue-requests",
        "0",
        slots=slots,
        settings=settings,
    )
    try:
        began = [threading.Event() for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            full = [
                pool.submit(
                    post, proxy.port, {**question(f"{i}. {LIST}", 100), "stream": True}, first=event.set
                )
                for i, event in enumerate(began)
            ]
            for event in began:
                assert event.wait(240)
            # Four pages each; of sixteen one is kept for answers that grow.
            answer = ask(proxy, f"3. {LIST}", 100)
            ended = [one.result() for one in full]
        for i, one in enumerate(ended):
            truth(f"{i}. {LIST}", 100).check(whole(one))
        assert answer.status == 429, answer.body
        assert int(answer.headers["Retry-After"]) >= 1
        assert proxy.metric(f'refused_total{{reason="{reason}"}}') == 1
        proxy.idle()
        right(proxy, truth, SHORT)
    finally:
        assert proxy.stop() == 0


class Storm:
    """Requests under way, every other one streamed."""

    def __init__(self, proxy: Proxy, decode: list[Server], count: int, tokens: int) -> None:
        self.tokens = tokens
        self.prompts = [f"{proxy.port}, {i} of {count}: {STORY[: 1500 + 30 * i]}" for i in range(count)]
        arrived = sum(one.metric("kvxfer_rooms_received_total") for one in decode)
        self._pool = ThreadPoolExecutor(count)
        self._ends: list[Future[Answer]] = [
            self._pool.submit(ask, proxy, prompt, tokens, stream=i % 2 == 1)
            for i, prompt in enumerate(self.prompts)
        ]
        # When the first hand-off is over, others are in the middle of theirs.
        limit = time.monotonic() + 240
        while sum(one.metric("kvxfer_rooms_received_total") for one in decode) == arrived:
            assert time.monotonic() < limit
            time.sleep(0.02)
        assert not all(one.done() for one in self._ends)

    def ended(self, truth: Plain) -> int:
        """Each has ended in an explicit error or in the whole right answer; how many in the latter."""
        answers = [end.result() for end in self._ends]
        self._pool.shutdown()
        good = 0
        for prompt, answer in zip(self.prompts, answers, strict=True):
            if answer.status == 200 and not answer.error:
                truth(prompt, self.tokens).check(whole(answer))
                good += 1
            else:
                assert answer.error, "an answer was cut off, and nothing says so"
                assert answer.status in (200, 500, 502, 503), (answer.status, answer.error)
        return good


def test_case_17_decode_is_killed_and_comes_back_and_another_one_answers_what_had_not_begun(
    servers: dict[str, Server], proxied: Proxies, truth: Plain
) -> None:
    p, d, other = servers["p32"], servers["d64"], servers["d32"]
    alone, two = proxied("p32", "d64"), proxied("p32", "d32,d64")
    storms = [Storm(alone, [d], 4, 24), Storm(two, [d, other], 6, 24)]
    d.kill()
    storms[0].ended(truth)
    # Half are not streamed: nothing of them has reached a client, and the other server answers them.
    assert storms[1].ended(truth) >= 3
    for one in (p, other, alone, two):
        one.idle()
    d.start().ready()
    for proxy in (alone, two):
        proxy.up(d)
        right(proxy, truth, LIST)
    for one in (p, d, other, alone, two):
        one.idle()


def test_case_17_prefill_is_killed_and_comes_back(
    servers: dict[str, Server], proxied: Proxies, truth: Plain
) -> None:
    p, d, proxy = servers["p64"], servers["d32"], proxied("p64", "d32")
    before = d.metric("kvxfer_rooms_received_total")
    storm = Storm(proxy, [d], 6, 24)
    p.kill()
    # Prefill has done its part for those whose hand-off was over.
    assert storm.ended(truth) <= d.metric("kvxfer_rooms_received_total") - before
    d.idle()
    proxy.idle()
    p.start().ready()
    proxy.up(p)
    right(proxy, truth, LIST)
    for one in (p, d, proxy):
        one.idle()


def test_after_the_storm_no_page_is_held_and_the_log_line_says_what_was_moved(
    servers: dict[str, Server], proxied: Proxies
) -> None:
    for proxy in proxied.made:
        proxy.idle()
    for name, server in servers.items():
        server.idle()
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        if name != "plain":
            assert server.metric("kvxfer_refused_requests_total") == 0
    assert "KV Transfer metrics: " in servers["d32"].log.read_text()
    assert "rooms_in" in servers["d32"].log.read_text()
