"""The OpenAI API as far as a router reads it: requests, the legs' bodies, streams of events. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = [
    "COMPLETION_PATHS",
    "BadRequest",
    "Events",
    "Incoming",
    "Seen",
    "decode_params",
    "error_body",
    "error_event",
    "give_up_body",
    "leg_body",
    "local_params",
    "parse",
    "prefill_body",
    "seen_in_body",
    "seen_in_event",
]

COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")

# What a part of a message that is no text counts for, in characters; usage in the answer corrects it.
_OTHER_PART_CHARS = 2000
# The template around a message.
_MESSAGE_CHARS = 16


class BadRequest(Exception):
    """The request cannot be understood; the message says why."""


@dataclass(frozen=True)
class Incoming:
    """A request of a client.

    `prompt_tokens` is exact where the prompt came as tokens, else None and `chars` is its length. `local`
    says why no hand-off can serve it, or is empty.
    """

    path: str
    body: dict[str, Any]
    stream: bool
    chars: int
    prompt_tokens: int | None
    max_tokens: int | None
    local: str


def parse(path: str, raw: bytes) -> Incoming:
    """Reads a request; `BadRequest` says what is wrong with it."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the request is a JSON {type(body).__name__}; it must be an object")
    local = ""
    tokens: int | None = None
    if path.endswith("/chat/completions"):
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("'messages' is missing; it is a list of at least one message")
        chars = sum(_message_chars(one) for one in messages)
        if body.get("tools"):
            chars += len(json.dumps(body["tools"]))
    else:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            # One room names one hand-off, so a batch cannot share it.
            local = "several_prompts" if len(prompt) > 1 else ""
            prompts = prompt
        else:
            prompts = [prompt]
        chars = 0
        for one in prompts:
            if isinstance(one, str):
                chars += len(one)
            elif isinstance(one, list) and all(isinstance(token, int) for token in one):
                tokens = (tokens or 0) + len(one)
            else:
                raise BadRequest("'prompt' must be a text or a list of tokens, or a list of these")
        if chars and tokens is not None:
            chars, tokens = chars + 4 * tokens, None
    if any(isinstance(body.get(key), int) and body[key] > 1 for key in ("n", "best_of")) or body.get(
        "use_beam_search"
    ):
        local = local or "several_answers"
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None):
        # They need the prompt computed where they are reported.
        local = local or "prompt_logprobs"
    most = None
    for key in ("max_completion_tokens", "max_tokens"):
        value = body.get(key)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise BadRequest(f"'{key}' is {value!r}; it must be a whole number, 0 or more")
            most = value
            break
    stream = body.get("stream", False)
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest(f"'stream' is {stream!r}; it must be true or false")
    return Incoming(path, body, bool(stream), chars, tokens, most, local)


def _message_chars(message: Any) -> int:
    if not isinstance(message, dict):
        raise BadRequest("each of 'messages' must be an object")
    content = message.get("content")
    chars = _MESSAGE_CHARS
    if isinstance(content, str):
        chars += len(content)
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            chars += len(text) if isinstance(text, str) else _OTHER_PART_CHARS
    if message.get("tool_calls"):
        chars += len(json.dumps(message["tool_calls"]))
    return chars


def prefill_body(incoming: Incoming, room: int, source: str | None = None) -> bytes:
    """The prefill leg: the same prompt, and one token, which nobody reads. `source` is what the decode leg is
    told, if that one is sent at the same time.
    """
    body = dict(incoming.body)
    # They say things about an answer of which this leg makes one token.
    for key in ("stream_options", "best_of", "min_tokens"):
        body.pop(key, None)
    body["max_tokens"] = 1
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    if "n" in body:
        body["n"] = 1
    body["stream"] = False
    params = {"do_remote_decode": True, "do_remote_prefill": False, "room": room}
    body["kv_transfer_params"] = params if source is None else {**params, "source": source}
    return json.dumps(body).encode()


def give_up_body(incoming: Incoming, room: int) -> bytes:
    """Tells a prefill server that nobody will come for a room: its leg may have ended there by then, so that
    closing it aborts nothing. This is a completion of one token, since servers know no other request.
    """
    body = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": {"give_up": room}}
    if "model" in incoming.body:
        body["model"] = incoming.body["model"]
    return json.dumps(body).encode()


def decode_params(room: int, source: str) -> dict[str, Any]:
    """What tells the decode leg where its KV comes from."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "room": room, "source": source}


def local_params() -> dict[str, Any]:
    """What tells a decode server to compute the prompt itself, on purpose."""
    return {"do_remote_prefill": False, "do_remote_decode": False}


def leg_body(incoming: Incoming, params: dict[str, Any]) -> bytes:
    """The decode leg: the request as it came. What the client said of hand-offs is not for it to say."""
    return json.dumps({**incoming.body, "kv_transfer_params": params}).encode()


def error_body(message: str, kind: str, code: int) -> bytes:
    """An error as OpenAI's clients read it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def error_event(message: str, kind: str, code: int) -> bytes:
    """The same as the last event of a stream."""
    return b"data: " + error_body(message, kind, code) + b"\n\n"


class Events:
    """Cuts a stream of server-sent events where they end, whatever pieces it comes in.

    >>> events = Events()
    >>> events.feed(b'data: {"a": 1}\\n\\nda'), events.feed(b"ta: [DO"), events.feed(b"NE]\\r\\n\\r\\n")
    ([b'data: {"a": 1}\\n\\n'], [], [b'data: [DONE]\\r\\n\\r\\n'])
    """

    _END = re.compile(rb"\n\n|\r\n\r\n|\r\r")

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole now, byte for byte."""
        data = self.rest + data
        found = []
        start = 0
        for end in self._END.finditer(data):
            found.append(data[start : end.end()])
            start = end.end()
        self.rest = data[start:]
        return found


@dataclass
class Seen:
    """What a piece of an answer says: how it stands, and what it cost."""

    done: bool = False
    error: str = ""
    status: int = 500
    tokens: int = 0
    usage_prompt: int | None = None
    usage_answer: int | None = None
    loaded_ms: float | None = None


# Reasons for an end that is none: the engine gave the request up.
_GIVEN_UP = ("abort", "error")
_WORTH_READING = re.compile(
    rb'"error"\s*:|"usage"\s*:\s*\{|"kv_transfer_params"\s*:\s*\{|"finish_reason"\s*:\s*"(?:abort|error)"'
)


_DATA = re.compile(rb"^data:(.*)$", re.M)


def seen_in_event(event: bytes) -> Seen:
    """Looks at one event. Most are only counted: parsing each would cost more than passing it on."""
    found = _DATA.search(event)
    if found is None:
        return Seen()
    data = found[1].strip()
    if data == b"[DONE]":
        return Seen(done=True)
    seen = Seen(tokens=1) if b'"choices":[]' not in data.replace(b" ", b"") else Seen()
    if _WORTH_READING.search(data):
        try:
            value = json.loads(data)
        except ValueError:
            return seen
        _read(value, seen)
    return seen


def seen_in_body(data: bytes) -> Seen:
    """Looks at an answer that was not streamed. One that is no JSON object is an error."""
    seen = Seen()
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        seen.error = "the answer is no JSON object"
        return seen
    _read(value, seen)
    seen.done = not seen.error
    return seen


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _read(value: Any, seen: Seen) -> None:
    if not isinstance(value, dict):
        return
    error = value.get("error")
    if error:
        found = error if isinstance(error, dict) else {"message": error}
        seen.error = str(found.get("message") or "the server reports an error")
        code = found.get("code")
        seen.status = code if isinstance(code, int) and 400 <= code < 600 else 500
    for choice in value.get("choices") or ():
        if isinstance(choice, dict) and choice.get("finish_reason") in _GIVEN_UP:
            seen.error = seen.error or f"the server gave the request up ({choice['finish_reason']})"
    usage = value.get("usage")
    if isinstance(usage, dict):
        seen.usage_prompt = _whole(usage.get("prompt_tokens"))
        seen.usage_answer = _whole(usage.get("completion_tokens"))
    params = value.get("kv_transfer_params")
    if isinstance(params, dict):
        loaded = params.get("loaded_ms")
        if isinstance(loaded, int | float) and loaded >= 0:
            seen.loaded_ms = float(loaded)
