"""Which servers there are, and how the proxy treats them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from kvxfer.admission import Config, Decode, Prefill
from kvxfer.errors import BadArgument

__all__ = [
    "DEFAULT_DIRECTORY_PORT",
    "DecodeServer",
    "PrefillServer",
    "Settings",
    "parse_decode",
    "parse_prefill",
]

DEFAULT_DIRECTORY_PORT = 8998


@dataclass(frozen=True)
class PrefillServer:
    """A prefill server: its URL, kvxfer's directory there (`host:port`), and what admission is told."""

    url: str
    source: str
    spec: Prefill


@dataclass(frozen=True)
class DecodeServer:
    """A decode server: its URL and what admission is told. Without `pages` the server is asked for them."""

    url: str
    spec: Decode


@dataclass(frozen=True)
class Settings:
    """All that `kvxfer proxy` can be told.

    Args:
        prefill, decode: the servers.
        decode_choice: "early" sends both legs at once; "late" chooses decode when prefill is over.
        admission: who gets in; see `kvxfer.admission.Config`.
        connect_timeout_s: longest time for a connection to a server.
        silence_timeout_s: longest time for which a server may send no byte of an answer. It covers a queue at
            prefill, the hand-off, and the whole of an answer that is not streamed.
        health_interval_s: how often each server is asked for `/health`.
        health_timeout_s: how long it may take to answer that.
        health_failures: how many such timeouts in a row take it out. A refused connection or an error does at
            once.
        retries: how often a request that failed before anything reached its client is tried again.
        drain_timeout_s: how long requests in flight may take when the proxy is told to stop.
        max_body_mib: largest request.
        answer_tokens: length of an answer that is reserved for until answers have been seen.
        chars_per_token: characters of a token until prompts have been counted.
    """

    prefill: tuple[PrefillServer, ...]
    decode: tuple[DecodeServer, ...]
    decode_choice: Literal["early", "late"] = "early"
    admission: Config = field(default_factory=Config)
    connect_timeout_s: float = 10.0
    silence_timeout_s: float = 3600.0
    health_interval_s: float = 2.0
    health_timeout_s: float = 10.0
    health_failures: int = 3
    retries: int = 1
    drain_timeout_s: float = 300.0
    max_body_mib: int = 64
    answer_tokens: int = 256
    chars_per_token: float = 4.0


def parse_prefill(text: str) -> PrefillServer:
    """`http://host:8100[,source=host:8998][,tokens-per-s=N][,link=NAME][,link-gb-s=N]`."""
    url, host, name, options = _split("--prefill", text)
    shown = f"[{host}]" if ":" in host else host
    source = options.pop("source", f"{shown}:{DEFAULT_DIRECTORY_PORT}")
    spec = Prefill(name)
    spec = _with(spec, options, text, {"tokens-per-s": "tokens_per_s", **_LINK})
    return PrefillServer(url, source, spec)


def parse_decode(text: str) -> DecodeServer:
    """`http://host:8200[,pages=N,page-tokens=N][,slots=N][,link=NAME][,link-gb-s=N][,prefill-tokens-per-s=N]`."""
    url, _, name, options = _split("--decode", text)
    given = [key for key in ("pages", "page-tokens") if key in options]
    if len(given) == 1:
        other = "page-tokens" if given == ["pages"] else "pages"
        raise BadArgument(
            f"--decode {text}: {given[0]}= without {other}= does not say how large its memory is: give "
            "both, or neither to have vLLM asked for them"
        )
    spec = _with(
        Decode(name),
        options,
        text,
        {
            "pages": "pages",
            "page-tokens": "page_tokens",
            "slots": "slots",
            "prefill-tokens-per-s": "prefill_tokens_per_s",
            **_LINK,
        },
    )
    return DecodeServer(url, spec)


_LINK = {"link": "link", "link-gb-s": "gbytes_per_s"}
_WHOLE = {"pages", "page_tokens", "slots"}


def _split(option: str, text: str) -> tuple[str, str, str, dict[str, str]]:
    url, *rest = text.split(",")
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadArgument(
            f"{option} {text}: '{url}' is not a server's address; write it as http://HOST:PORT, and settings "
            "after it as ,name=value"
        )
    if parts.path.rstrip("/") or parts.query:
        raise BadArgument(
            f"{option} {text}: give the address alone, {parts.scheme}://{parts.netloc}; the proxy adds paths"
        )
    options: dict[str, str] = {}
    for item in rest:
        key, equals, value = item.partition("=")
        if not equals or not value:
            raise BadArgument(f"{option} {text}: '{item}' is not name=value")
        options[key] = value
    port = port or (443 if parts.scheme == "https" else 80)
    shown = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{parts.netloc}", parts.hostname, f"{shown}:{port}", options


def _with(spec: Any, options: dict[str, str], text: str, names: dict[str, str]) -> Any:
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in names:
            also = ["source"] if isinstance(spec, Prefill) else []
            raise BadArgument(
                f"{text}: there is no setting '{key}'; there are {', '.join(also + list(names))}"
            )
        kind: Any = str if names[key] == "link" else int if names[key] in _WHOLE else float
        try:
            values[names[key]] = kind(value)
        except ValueError:
            raise BadArgument(
                f"{text}: {key} is '{value}'; it must be a {'whole ' if kind is int else ''}number"
            ) from None
    return replace(spec, **values)
