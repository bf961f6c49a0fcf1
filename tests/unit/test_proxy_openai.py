"""What the proxy reads of requests, answers and its own arguments, without a server."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvxfer as kx
from kvxfer.proxy import parse_decode, parse_prefill
from kvxfer.proxy.openai import (
    BadRequest,
    Events,
    error_event,
    leg_body,
    local_params,
    parse,
    prefill_body,
    seen_in_body,
    seen_in_event,
)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1),
            st.sampled_from(["\n\n", "\r\n\r\n"]),
        )
    ),
    cuts=st.lists(st.integers(0, 400)),
    rest=st.text(st.characters(codec="utf-8", exclude_characters="\r\n")),
)
def test_events_come_whole_and_byte_for_byte_however_they_are_cut(
    parts: list[tuple[str, str]], cuts: list[int], rest: str
) -> None:
    wanted = [(text + end).encode() for text, end in parts]
    raw = b"".join(wanted) + rest.encode()
    events = Events()
    found = []
    at = 0
    for cut in sorted({*cuts, len(raw)}):
        found += events.feed(raw[at:cut])
        at = max(at, min(cut, len(raw)))
    # Where a cut falls within \r\n\r\n nothing is lost either.
    assert found == wanted
    assert events.rest == rest.encode()


@pytest.mark.parametrize(
    ("event", "tokens", "done", "error"),
    [
        (b'data: {"choices": [{"text": "a"}]}\n\n', 1, False, ""),
        (b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n', 0, False, ""),
        (b"data: [DONE]\n\n", 0, True, ""),
        (b"data:[DONE]\r\n\r\n", 0, True, ""),
        (b": ping\n\n", 0, False, ""),
        (b'event: error\ndata: {"error": {"message": "boom", "code": 503}}\n\n', 1, False, "boom"),
        (b'data: {"error": "plain"}\n\n', 1, False, "plain"),
        # A model that writes about errors has made none.
        (b'data: {"choices": [{"text": "{\\"error\\": 1}"}]}\n\n', 1, False, ""),
        (b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n', 1, False, ""),
        (
            b'data: {"choices":[{"finish_reason":"abort"}]}\n\n',
            1,
            False,
            "the server gave the request up (abort)",
        ),
    ],
)
def test_what_an_event_says(event: bytes, tokens: int, done: bool, error: str) -> None:
    seen = seen_in_event(event)
    assert (seen.tokens, seen.done, seen.error) == (tokens, done, error)


def test_usage_and_the_time_of_the_hand_off_are_read() -> None:
    body = {
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
        "kv_transfer_params": {"loaded_ms": 12.5},
    }
    seen = seen_in_event(b"data: " + json.dumps(body).encode() + b"\n\n")
    assert (seen.usage_prompt, seen.usage_answer, seen.loaded_ms) == (3, 4, 12.5)
    for wrong in ({"usage": {"prompt_tokens": True, "completion_tokens": -1}}, {"usage": []}):
        seen = seen_in_body(json.dumps(wrong).encode())
        assert (seen.usage_prompt, seen.usage_answer, seen.error) == (None, None, "")
    assert seen_in_body(b"[]").error == seen_in_body(b"x").error == "the answer is no JSON object"
    assert seen_in_body(b'{"error": {"message": "m", "code": "x"}}').status == 500


def test_prompts_are_counted_or_measured() -> None:
    def incoming(path: str = "/v1/completions", **body: object) -> tuple[int, int | None]:
        found = parse(path, json.dumps(body).encode())
        return found.chars, found.prompt_tokens

    assert incoming(prompt="four") == (4, None)
    assert incoming(prompt=[1, 2, 3]) == (0, 3)
    assert incoming(prompt=["four"]) == (4, None)
    assert incoming(prompt=[[1, 2], [3]]) == (0, 3)
    chat = "/v1/chat/completions"
    assert incoming(chat, messages=[{"role": "user", "content": "four"}]) == (20, None)
    parts = [{"type": "text", "text": "four"}, {"type": "image_url", "image_url": {"url": "x" * 10**6}}]
    assert incoming(chat, messages=[{"role": "user", "content": parts}]) == (2020, None)
    assert incoming(chat, messages=[{"role": "assistant", "content": None}])[0] == 16


def test_the_legs_keep_what_the_client_said_but_for_hand_offs() -> None:
    body = {
        "prompt": "Hi",
        "max_tokens": 9,
        "seed": 2**60,
        "stream": True,
        "stream_options": {},
        "n": 1,
        "kv_transfer_params": {"source": "evil:1", "room": 3},
        "top_p": 0.1,
        "best_of": 1,
        "min_tokens": 3,
    }
    incoming = parse("/v1/completions", json.dumps(body).encode())
    prefill = json.loads(prefill_body(incoming, 77))
    assert prefill == {
        "prompt": "Hi",
        "max_tokens": 1,
        "seed": 2**60,
        "stream": False,
        "n": 1,
        "top_p": 0.1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "room": 77},
    }
    both = json.loads(prefill_body(incoming, 77, "10.0.0.1:9000"))["kv_transfer_params"]
    assert both == {**prefill["kv_transfer_params"], "source": "10.0.0.1:9000"}
    decode = json.loads(leg_body(incoming, local_params()))
    assert decode == {**body, "kv_transfer_params": local_params()}
    assert incoming.body == body, "the request itself is left alone: it may be sent again"


def test_deep_nesting_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="no JSON"):
        parse("/v1/completions", b"[" * 10**6)


def test_an_error_event_is_one_event() -> None:
    (event,) = Events().feed(error_event("line\nbreak", "server_error", 502))
    assert json.loads(event[6:])["error"] == {
        "message": "line\nbreak",
        "type": "server_error",
        "param": None,
        "code": 502,
    }


def test_servers_are_named_with_their_settings() -> None:
    prefill = parse_prefill("http://h:8100,source=x:9,tokens-per-s=100.5,link-gb-s=50,link=rack")
    assert (prefill.url, prefill.source) == ("http://h:8100", "x:9")
    assert (prefill.spec.name, prefill.spec.tokens_per_s) == ("h:8100", 100.5)
    assert (prefill.spec.gbytes_per_s, prefill.spec.link) == (50, "rack")
    assert parse_prefill("http://[::1]:8100").source == "[::1]:8998"
    assert parse_prefill("https://h/").spec.name == "h:443"
    decode = parse_decode("http://h:8200,pages=10,page-tokens=32,slots=3,prefill-tokens-per-s=7").spec
    assert (decode.pages, decode.page_tokens, decode.slots, decode.prefill_tokens_per_s) == (10, 32, 3, 7.0)
    assert parse_decode("http://h:8200").spec.pages is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h:8100", "'h:8100' is not a server's address; write it as http://HOST:PORT"),
        ("http://h:port", "is not a server's address"),
        ("http://h:1/v1", "give the address alone, http://h:1; the proxy adds paths"),
        ("http://h:1,pages", "'pages' is not name=value"),
        ("http://h:1,pages=1.5,page-tokens=16", "pages is '1.5'; it must be a whole number"),
        ("http://h:1,pages=0,page-tokens=16", "decode server h:1: pages is 0; it must be above 0"),
        ("http://h:1,source=x:1", "there is no setting 'source'; there are pages, page-tokens, slots"),
    ],
)
def test_a_wrong_server_is_told_what_is_right(text: str, said: str) -> None:
    with pytest.raises(kx.BadArgument, match=re.escape(said)):
        parse_decode(text)
