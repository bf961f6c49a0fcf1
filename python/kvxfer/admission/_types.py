"""What `Admission` is told and what it answers."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kvxfer.errors import BadArgument

__all__ = [
    "Admitted",
    "Config",
    "Decision",
    "Decode",
    "Expired",
    "Prefill",
    "Queued",
    "Reason",
    "Refused",
    "Request",
    "ServerStats",
    "Stats",
]


def _positive(what: str, name: str, value: float) -> None:
    if not value > 0:
        raise BadArgument(f"{what}: {name} is {value}; it must be above 0")


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill server.

    Args:
        name: unique among all servers.
        tokens_per_s: how fast it computes prompts; replaced by what is measured as prompts end.
        link: the link that its bytes leave by; servers that name the same one share it. Default: one of its
            own.
        gbytes_per_s: how fast that link is, in 10^9 bytes a second.
    """

    name: str
    tokens_per_s: float = 8000.0
    link: str = ""
    gbytes_per_s: float = 12.5

    def __post_init__(self) -> None:
        _positive(f"prefill server {self.name}", "tokens_per_s", self.tokens_per_s)
        _positive(f"prefill server {self.name}", "gbytes_per_s", self.gbytes_per_s)


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode server.

    Args:
        name: unique among all servers.
        pages: KV pages that it has; None where that is not known, and then pages limit nothing.
        page_tokens: tokens of a page.
        slots: requests that it runs at a time at most.
        link: the link that its bytes come by, as for `Prefill`.
        gbytes_per_s: how fast that link is, in 10^9 bytes a second.
        prefill_tokens_per_s: how fast it computes a prompt itself; 0 says that it never should.
    """

    name: str
    pages: int | None = None
    page_tokens: int = 16
    slots: int = 256
    link: str = ""
    gbytes_per_s: float = 12.5
    prefill_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        what = f"decode server {self.name}"
        if self.pages is not None:
            _positive(what, "pages", self.pages)
        _positive(what, "page_tokens", self.page_tokens)
        _positive(what, "slots", self.slots)
        _positive(what, "gbytes_per_s", self.gbytes_per_s)
        if self.prefill_tokens_per_s < 0:
            raise BadArgument(f"{what}: prefill_tokens_per_s is {self.prefill_tokens_per_s}")


@dataclass(frozen=True, slots=True)
class Config:
    """How to decide. Times are seconds unless the name says otherwise.

    Args:
        kv_bytes_per_token: bytes of KV that a token moves, all layers and ranks together. The default is that
            of 32 layers with 8 KV heads of 128 in 16 bits.
        handoff_ms: what a hand-off takes beside its bytes.
        layers: layers that are pushed one by one while prefill computes, which hides all but the last layer's
            bytes behind it. 1: bytes move when the prompt has been computed.
        slots_share: part of a decode server's slots that is given away; the rest keeps queues short.
        growth_share: part of a decode server's pages that only answers that grow may take.
        growth_tokens: how many tokens further a reservation that proved too small is extended, if it can be.
        link_backlog_s: a link whose bytes in flight take longer takes no more.
        prefill_backlog_s: a prefill server whose tokens in flight take longer takes no more. Keep it well
            below the time for which decode's engine waits for a hand-off (300 s in kvxfer).
        recompute_s: longest time for which a decode server may be busy with prompts that it computes itself;
            0: it never does.
        route: "load" chooses by bytes, tokens, pages and links; "requests" by the number of requests in
            flight, for comparison.
        enforce: False chooses servers and refuses nothing, for comparison: then pages and slots are
            over-committed.
        queue_requests: how many may wait.
        queue_wait_s: how long each may wait.
        overtakes: how many smaller requests may pass one that does not fit yet.
        look_ahead: how many waiting requests are tried behind the first.
        time_per_token_ms: time per token of an answer, until it is measured.
    """

    kv_bytes_per_token: int = 131_072
    handoff_ms: float = 5.0
    layers: int = 1
    slots_share: float = 0.8
    growth_share: float = 0.05
    growth_tokens: int = 128
    link_backlog_s: float = 10.0
    prefill_backlog_s: float = 120.0
    recompute_s: float = 0.5
    route: Literal["load", "requests"] = "load"
    enforce: bool = True
    queue_requests: int = 1024
    queue_wait_s: float = 600.0
    overtakes: int = 16
    look_ahead: int = 4
    time_per_token_ms: float = 25.0

    def __post_init__(self) -> None:
        for name in ("layers", "slots_share", "link_backlog_s", "prefill_backlog_s", "time_per_token_ms"):
            _positive("Config", name, getattr(self, name))
        for name in (
            *("kv_bytes_per_token", "handoff_ms", "growth_tokens", "recompute_s"),
            *("queue_requests", "queue_wait_s", "overtakes", "look_ahead"),
        ):
            if not getattr(self, name) >= 0:
                raise BadArgument(f"Config: {name} is {getattr(self, name)}; it must be 0 or more")
        if self.slots_share > 1:
            raise BadArgument(f"Config: slots_share is {self.slots_share}; it is a part, above 0 and up to 1")
        if not 0 <= self.growth_share < 1:
            raise BadArgument(
                f"Config: growth_share is {self.growth_share}; it is a part, 0 or more and below 1"
            )
        if self.route not in ("load", "requests"):
            raise BadArgument(f"Config: route is {self.route!r}; it is 'load' or 'requests'")


class Reason(str, enum.Enum):
    """What was lacking."""

    DECODE_PAGES = "decode_pages"
    """No decode server has the pages for prompt and answer."""
    DECODE_SLOTS = "decode_slots"
    """No decode server has a slot."""
    LINK = "link"
    """The links' bytes in flight already take `link_backlog_s`."""
    PREFILL = "prefill"
    """The prefill servers' tokens in flight already take `prefill_backlog_s`."""
    NO_DECODE = "no_decode"
    """No decode server is up."""
    NO_PREFILL = "no_prefill"
    """No prefill server is up."""
    TOO_LARGE = "too_large"
    """No decode server has so many pages at all: do not try again."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Request:
    """What a request needs.

    Args:
        id: the caller's name for it, unique among those that wait or run.
        prompt_tokens: length of the prompt.
        answer_tokens: how long the answer will be, as far as one can say. Pages are reserved for that many.
        cached_tokens: tokens of the prompt that decode has already and that do not move.
        local: decode computes the prompt itself in any case.
        avoid: servers that it should not go to while there are others.
    """

    id: Hashable
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int = 0
    local: bool = False
    avoid: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.answer_tokens < 0:
            raise BadArgument(
                f"request {self.id}: {self.prompt_tokens} prompt tokens and {self.answer_tokens} answer "
                "tokens; a prompt has at least 1, an answer 0 or more"
            )
        if not 0 <= self.cached_tokens <= self.prompt_tokens:
            raise BadArgument(
                f"request {self.id}: {self.cached_tokens} of {self.prompt_tokens} prompt tokens are cached"
            )


@dataclass(frozen=True, slots=True)
class Admitted:
    """Pages and a slot are reserved at `decode`; `prefill` may start.

    `prefill` is None where decode computes the prompt itself: because it is sooner, there is no prefill
    server, or the request said so. `start_s` is when prefill plausibly begins with this prompt,
    `first_token_s` when the first token plausibly comes, both on the clock of `now_s`; `waited_s` is the time
    in the queue, and `move_s` how long the bytes take with those before them.
    """

    id: Hashable
    prefill: str | None
    decode: str
    pages: int
    nbytes: int
    move_s: float
    start_s: float
    first_token_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Queued:
    """It waits, behind `ahead` others, for what `reason` says; `poll` admits it, plausibly at `start_s`."""

    id: Hashable
    reason: Reason
    ahead: int
    start_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """It does not get in. `retry_after_s` is when trying again plausibly helps; None: never."""

    id: Hashable
    reason: Reason
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Expired:
    """It waited `queue_wait_s` in vain, for what `reason` says."""

    id: Hashable
    reason: Reason
    retry_after_s: float


Decision: TypeAlias = Admitted | Queued | Refused | Expired


@dataclass(frozen=True, slots=True)
class ServerStats:
    """One server: what is reserved and in flight there now."""

    name: str
    up: bool
    requests: int
    tokens_in_flight: int
    bytes_in_flight: int
    pages: int | None = None
    pages_reserved: int = 0
    pages_short: int = 0
    slots: int = 0
    """How many are given away at most: `Config.slots_share` of those that it has."""
    slots_in_all: int = 0
    slots_held: int = 0
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Where everything stands. Counters count since the start."""

    prefill: list[ServerStats]
    decode: list[ServerStats]
    queued: int
    admitted: int
    recomputed: int
    refused: dict[str, int]
    expired: int
    hold_s: float
    """How long a request holds its slot, as measured of late."""
    time_per_token_ms: float
    waiting: dict[str, int] = field(default_factory=dict)
    """Of those queued, how many wait for what (`Reason`)."""
