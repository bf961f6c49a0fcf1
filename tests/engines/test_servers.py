"""Real servers, real weights: greedy answers of a prefill and a decode server are those of one plain
server.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from servers import Answer, Server, Zygote, close_all, post, question, stream

import kvxfer as kx

pytestmark = pytest.mark.timeout(900)

BLOCKS = ("--num-gpu-blocks-override", "320")
HALF_BLOCKS = ("--num-gpu-blocks-override", "160")

# In natural logarithms. Weights and KV are bfloat16, whose rounding moves the model's logits by up to about
# this.
TIE = 0.25

SHORT = "The capital of France is"
STORY = "Once upon a time there was a small dog who lived in a big house near the sea. " * 24
LIST = "Count on: one, two, three, four, five,"


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process that forks servers."""
    item = Zygote(tmp_path_factory.mktemp("servers"))
    yield item
    item.close()


@pytest.fixture(scope="session")
def servers(zygote: Zygote) -> Iterator[dict[str, Server]]:
    """One plain server, and servers of both roles with pages of 32 and of 64 tokens, started at once."""
    full: dict[str, Any] = {"verify": "full", "timeout_s": 120}
    made = {
        "plain": Server(zygote, "plain", None, args=BLOCKS),
        "p32": Server(zygote, "p32", "kv_producer", args=BLOCKS, extra={"timeout_s": 120}),
        "d32": Server(zygote, "d32", "kv_consumer", args=BLOCKS, extra=full),
        "p64": Server(
            zygote,
            "p64",
            "kv_producer",
            block=64,
            prefix_cache=False,
            args=HALF_BLOCKS,
            extra={"timeout_s": 120},
        ),
        "d64": Server(
            zygote, "d64", "kv_consumer", block=64, prefix_cache=False, args=HALF_BLOCKS, extra=full
        ),
    }
    try:
        for server in made.values():
            server.start()
        for server in made.values():
            server.ready()
        yield made
    finally:
        close_all(made.values())


@dataclass(frozen=True)
class Truth:
    """What the plain server answers when asked alone."""

    tokens: list[int]
    # How much likelier each token was than the next best, in natural logarithms.
    margins: list[float]

    def check(self, tokens: list[int]) -> bool:
        """Whether an answer is the same. It may depart from the truth only at a tie: what else a batch or a
        prefix cache holds changes how the CPU's kernels round, and a tie is what rounding decides.
        """
        assert len(tokens) == len(self.tokens)
        if tokens == self.tokens:
            return True
        first = next(i for i, (a, b) in enumerate(zip(tokens, self.tokens, strict=True)) if a != b)
        assert self.margins[first] < TIE, (tokens, self)
        return False


@pytest.fixture(scope="session")
def truth(servers: dict[str, Server]) -> Callable[..., Truth]:
    """Asks the plain server alone, once for each prompt."""
    known: dict[tuple[str, int], Truth] = {}

    def ask(prompt: str, tokens: int = 16) -> Truth:
        if (prompt, tokens) not in known:
            answer = post(servers["plain"].port, {**question(prompt, tokens), "logprobs": 2})
            assert answer.status == 200, answer.body
            best = answer.body["choices"][0]["logprobs"]["top_logprobs"]
            margins = [max(item.values()) - min(item.values()) for item in best]
            known[prompt, tokens] = Truth(answer.tokens, margins)
        return known[prompt, tokens]

    return ask


def prefill_leg(server: Server, body: dict[str, Any], room: int) -> Answer:
    """The leg that computes the prompt."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "room": room}
    return post(server.port, {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params})


def decode_params(source: str, room: int | str) -> dict[str, Any]:
    """What the other leg carries."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "room": room, "source": source}


def early(p: Server, d: Server, body: dict[str, Any]) -> tuple[Answer | OSError, Answer | OSError]:
    """Both legs at once, as the proxy sends them where decode is chosen first."""
    room = kx.new_room()
    with ThreadPoolExecutor(2) as pool:
        legs = [
            pool.submit(prefill_leg, p, body, room),
            pool.submit(post, d.port, {**body, "kv_transfer_params": decode_params(p.directory, room)}),
        ]
        ends: list[Answer | OSError] = []
        for leg in legs:
            try:
                ends.append(leg.result())
            except OSError as error:
                ends.append(error)
    return ends[0], ends[1]


def late(p: Server, d: Server, body: dict[str, Any]) -> tuple[Answer, Answer]:
    """Prefill first; what its answer names goes to decode."""
    first = prefill_leg(p, body, kx.new_room())
    return first, post(d.port, {**body, "kv_transfer_params": first.body["kv_transfer_params"]})


def whole(ends: tuple[Answer | OSError, Answer | OSError]) -> list[int]:
    """Both legs ended well; the answer."""
    for end in ends:
        assert isinstance(end, Answer), end
        assert end.status == 200, end.body
    answer = ends[1]
    assert isinstance(answer, Answer)
    return answer.tokens


def right(ends: tuple[Answer | OSError, Answer | OSError], wanted: Truth) -> None:
    """Both legs ended well, and the answer is the plain server's, token for token."""
    assert whole(ends) == wanted.tokens


PAIRS = [("p32", "d32"), ("p32", "d64"), ("p64", "d32"), ("p64", "d64")]


@pytest.mark.parametrize(("p", "d"), PAIRS)
@pytest.mark.parametrize("prompt", [SHORT, LIST, STORY[:700], STORY], ids=["short", "list", "long", "longer"])
def test_case_05_answers_are_the_plain_servers_token_for_token(
    servers: dict[str, Server], truth: Callable[..., Truth], p: str, d: str, prompt: str
) -> None:
    wanted = truth(prompt)
    before = servers[d].metric("kvxfer_rooms_received_total")
    right(early(servers[p], servers[d], question(prompt)), wanted)
    servers[d].idle()
    assert servers[d].metric("kvxfer_rooms_received_total") == before + 1
    servers[p].idle()


def test_case_06_three_prefill_ranks_hand_off_to_one_decode_rank(
    zygote: Zygote, servers: dict[str, Server], truth: Callable[..., Truth]
) -> None:
    three = Server(zygote, "p3", "kv_producer", tp=3, args=BLOCKS, extra={"timeout_s": 120}).start()
    try:
        three.ready()
        for d in ("d32", "d64"):
            for prompt in (SHORT, f"Three ranks to {d}. {STORY[:600]}"):
                # Ranks add up in another order than one alone, which rounds otherwise.
                truth(prompt).check(whole(early(three, servers[d], question(prompt))))
        three.idle()
        assert three.metric("kvxfer_rooms_sent_total") == 4 * 3
    finally:
        three.stop()


def test_the_capital_of_france(servers: dict[str, Server]) -> None:
    _, answer = early(servers["p32"], servers["d32"], question(SHORT, 2))
    assert isinstance(answer, Answer)
    assert answer.text.startswith(" Paris")


def test_late_choice_prefill_first_and_decode_by_its_answer(
    servers: dict[str, Server], truth: Callable[..., Truth]
) -> None:
    for prompt in (LIST, f"Late. {STORY[:500]}"):
        right(late(servers["p32"], servers["d32"], question(prompt)), truth(prompt))


def test_a_stream_is_the_whole_answer(servers: dict[str, Server]) -> None:
    room = kx.new_room()
    body = question(f"A stream. {STORY[:600]}", 24)
    with ThreadPoolExecutor(1) as pool:
        leg = pool.submit(prefill_leg, servers["p32"], body, room)
        params = decode_params(servers["p32"].directory, str(room))
        pieces, ended = stream(servers["d32"].port, {**body, "kv_transfer_params": params})
        assert leg.result().status == 200
    assert ended
    assert len(pieces) > 5
    assert "".join(pieces) == post(servers["plain"].port, body).text


def test_shared_prefixes_are_moved_once(servers: dict[str, Server], truth: Callable[..., Truth]) -> None:
    p, d = servers["p32"], servers["d32"]
    head = "In the year 1066 a battle took place on a hill in the south of England. " * 12
    moved = []
    for tail in ("Who won?", "Who lost?", "Where was it?"):
        before = d.metric("kvxfer_received_bytes_total")
        truth(head + tail).check(whole(early(p, d, question(head + tail))))
        d.idle()
        moved.append(d.metric("kvxfer_received_bytes_total") - before)
    assert moved[1] < moved[0] / 3
    assert moved[2] < moved[0] / 3


def together(
    servers: dict[str, Server], truth: Callable[..., Truth], p: str, d: str, prompts: list[str], tokens: int
) -> None:
    """Many at once: none fails, and each answer is the plain server's. That pages arrived whole, checksums
    say.
    """
    with ThreadPoolExecutor(len(prompts)) as pool:
        ends = list(pool.map(lambda prompt: early(servers[p], servers[d], question(prompt, tokens)), prompts))
    same = sum(truth(prompt, tokens).check(whole(end)) for prompt, end in zip(prompts, ends, strict=True))
    assert same >= 0.7 * len(prompts)
    for name in (p, d):
        servers[name].idle()


@pytest.mark.parametrize(("p", "d"), [("p32", "d32"), ("p64", "d32")])
def test_eight_at_once(servers: dict[str, Server], truth: Callable[..., Truth], p: str, d: str) -> None:
    together(servers, truth, p, d, [f"{i}. {STORY[: 100 + 90 * i]}" for i in range(8)], 12)


def test_case_24_sixty_four_at_once_with_a_prefill_that_is_slow_and_not_one_is_aborted(
    servers: dict[str, Server], truth: Callable[..., Truth]
) -> None:
    before = servers["d32"].metric("kvxfer_rooms_received_failed_total")
    together(servers, truth, "p32", "d32", [f"Story {i}: {STORY[: 200 + 5 * i]}" for i in range(64)], 4)
    assert servers["d32"].metric("kvxfer_rooms_received_failed_total") == before


def hang_up(server: Server, body: dict[str, Any], after: float) -> None:
    """Sends a request and goes away."""
    data = json.dumps({**body, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""])
        connection.sendall(head.encode() + data)
        time.sleep(after)


@pytest.mark.parametrize("after", [0.0, 0.05, 0.3, 1.0])
def test_a_client_that_hangs_up_leaves_no_page_held(
    servers: dict[str, Server], truth: Callable[..., Truth], after: float
) -> None:
    p, d = servers["p32"], servers["d32"]
    room, body = kx.new_room(), question(f"{after} {STORY}", 64)
    legs = [
        (p, {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "room": room}}),
        (d, {**body, "kv_transfer_params": decode_params(p.directory, room)}),
    ]
    threads = [threading.Thread(target=hang_up, args=(*leg, after)) for leg in legs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for server in (p, d):
        server.idle()
    right(early(p, d, question(SHORT)), truth(SHORT))


def test_requests_in_the_wrong_place_end_in_an_error_or_are_computed(
    servers: dict[str, Server], truth: Callable[..., Truth]
) -> None:
    p, d = servers["p32"], servers["d32"]
    before = d.metric("kvxfer_missing_rooms_total")
    plain = post(d.port, question(LIST))
    truth(LIST).check(plain.tokens)
    wrong = prefill_leg(d, question(SHORT), kx.new_room())
    assert wrong.status == 500, wrong.body
    there = post(p.port, {**question(SHORT), "kv_transfer_params": decode_params(d.directory, kx.new_room())})
    assert there.status == 500, there.body
    d.idle()
    assert d.metric("kvxfer_missing_rooms_total") == before + 1
    assert "kv_consumer" in d.log.read_text()
    right(early(p, d, question(SHORT)), truth(SHORT))


def in_flight(p: Server, d: Server, count: int) -> tuple[ThreadPoolExecutor, list[Any], list[str]]:
    """Requests that are under way."""
    prompts = [f"{i} of {count}: {STORY[: 900 + 30 * i]}" for i in range(count)]
    pool = ThreadPoolExecutor(count)
    return pool, [pool.submit(early, p, d, question(prompt, 12)) for prompt in prompts], prompts


def ended(ends: list[Any], prompts: list[str]) -> list[tuple[str, list[int]]]:
    """Each ended in an explicit error or in a whole answer, and none in a part of one; the whole answers."""
    answers = []
    for end, prompt in zip(ends, prompts, strict=True):
        _, answer = end.result()
        if isinstance(answer, OSError):
            continue
        assert answer.whole
        if answer.status == 200:
            assert answer.body["choices"][0]["finish_reason"] == "length"
            answers.append((prompt, answer.tokens))
        else:
            assert answer.status >= 500, answer.body
    return answers


def confirm(answers: list[tuple[str, list[int]]], truth: Callable[..., Truth]) -> None:
    """Whole answers are the plain server's."""
    for prompt, tokens in answers:
        truth(prompt, 12).check(tokens)


def test_case_17_decode_is_killed_and_comes_back(
    servers: dict[str, Server], truth: Callable[..., Truth]
) -> None:
    p, d = servers["p32"], servers["d64"]
    pool, ends, prompts = in_flight(p, d, 6)
    time.sleep(1.0)
    d.kill()
    answers = ended(ends, prompts)
    pool.shutdown()
    p.idle()
    d.start().ready()
    right(early(p, d, question(LIST)), truth(LIST))
    confirm(answers, truth)
    p.idle()
    d.idle()


def test_case_17_prefill_is_killed_and_comes_back(
    servers: dict[str, Server], truth: Callable[..., Truth]
) -> None:
    p, d = servers["p64"], servers["d32"]
    pool, ends, prompts = in_flight(p, d, 6)
    time.sleep(1.0)
    p.kill()
    answers = ended(ends, prompts)
    pool.shutdown()
    d.idle()
    p.start().ready()
    right(early(p, d, question(LIST)), truth(LIST))
    confirm(answers, truth)
    p.idle()
    d.idle()


def test_after_the_storm_no_page_is_held_and_the_log_line_says_what_was_moved(
    servers: dict[str, Server],
) -> None:
    for name, server in servers.items():
        server.idle()
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        if name != "plain":
            assert server.metric("kvxfer_refused_requests_total") <= 1
    assert "KV Transfer metrics: " in servers["d32"].log.read_text()
    assert "rooms_in" in servers["d32"].log.read_text()
