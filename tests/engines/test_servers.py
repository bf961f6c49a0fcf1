"""Real servers, asked without the proxy: what it cannot ask, and legs that do not belong together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asked import LIST, SHORT, Plain
from servers import Answer, Server, post, question

import kvxfer as kx

pytestmark = pytest.mark.timeout(900)


def prefill_leg(server: Server, body: dict[str, Any], room: int) -> Answer:
    """The leg that computes the prompt."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "room": room}
    return post(server.port, {**body, "max_tokens": 1, "kv_transfer_params": params})


def decode_leg(server: Server, body: dict[str, Any], room: int | str, source: str) -> Answer:
    """The other one."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "room": room, "source": source}
    return post(server.port, {**body, "kv_transfer_params": params})


def test_a_room_may_be_text_as_where_json_knows_no_numbers_of_63_bits(
    servers: dict[str, Server], truth: Plain
) -> None:
    p, d, room = servers["p32"], servers["d32"], 2**63 - 1
    with ThreadPoolExecutor(1) as pool:
        leg = pool.submit(prefill_leg, p, question(SHORT), room)
        answer = decode_leg(d, question(SHORT), str(room), p.directory)
        assert leg.result().status == 200
    assert answer.tokens == truth(SHORT).tokens
    for server in (p, d):
        server.idle()


def test_a_request_without_a_room_is_computed_and_counted(servers: dict[str, Server], truth: Plain) -> None:
    d = servers["d32"]
    before = d.metric("kvxfer_missing_rooms_total")
    truth(LIST).check(post(d.port, question(LIST)).tokens)
    d.idle()
    assert d.metric("kvxfer_missing_rooms_total") == before + 1
    assert "is computed here alone" in d.log.read_text()


def test_case_18_a_request_in_the_wrong_place_ends_in_an_error(
    servers: dict[str, Server], truth: Plain
) -> None:
    p, d = servers["p32"], servers["d32"]
    before = {server.name: server.metric("kvxfer_refused_requests_total") for server in (p, d)}
    wrong = prefill_leg(d, question(SHORT), kx.new_room())
    assert wrong.status == 500, wrong.body
    there = decode_leg(p, question(SHORT), kx.new_room(), d.directory)
    assert there.status == 500, there.body
    for server in (p, d):
        server.idle()
        assert server.metric("kvxfer_refused_requests_total") == before[server.name] + 1
        assert f"this server is a {server.role}" in server.log.read_text()
    # They go on.
    truth(LIST).check(post(d.port, question(LIST)).tokens)
