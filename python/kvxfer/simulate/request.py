"""A request, and the work that a prompt is, as they pass from server to server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.simulate.link import Flow
    from kvxfer.simulate.server import Server

__all__ = ["Request", "Work"]


class Request:
    """A request and what became of it; times are ms from the start, -1 for never."""

    __slots__ = (
        "again_ms", "answer", "arrival_ms", "arrived", "asked_ms", "bound", "broken", "context", "counted",
        "decode", "end_step", "failed", "fails_at", "first_ms", "flow", "given", "gone", "granted",
        "granted_ms", "handing", "holds_pages", "holds_slot", "holds_source", "joined_ms", "joined_step",
        "landed_ms", "last_ms", "left", "life", "limit", "local", "moved_ms", "moves", "noticed", "number",
        "pages", "paused_ms", "pending", "place", "prefill", "prefilled_ms", "prompt", "queued_ms",
        "routed_ms", "sent", "skip", "source_life", "sourceless", "spilled", "started_ms", "tries",
    )  # fmt: skip

    def __init__(self, number: int, arrival_ms: float, prompt: int, answer: int, fails_at: float) -> None:
        self.number = number
        self.arrival_ms = arrival_ms
        self.prompt = prompt
        self.answer = answer
        # Part of the bytes after which the hand-off breaks; 2 is never.
        self.fails_at = fails_at
        self.prefill: Server | None = None
        self.decode: Server | None = None
        self.pages = 0  # tokens reserved at decode
        self.context = prompt  # tokens that a server must have in its cache to go on
        self.left = answer
        self.joined_step = 0
        self.end_step = 0
        self.life = 0  # counts preemptions: what was planned before one is void
        self.holds_slot = False
        self.granted = False
        self.handing = False  # counted in the hand-off queue
        self.local = False  # the prompt is computed where the answer is written
        self.broken = False  # its hand-off broke, which is noticed later
        self.noticed = False
        self.gone = False  # a server that it was on has crashed, which is noticed later
        self.sourceless = False  # and that was the one that computes its prompt
        self.failed = False
        self.spilled = False
        self.place = -1  # among all requests
        self.tries = 0  # before this one
        self.bound = False  # its decode server is chosen for good
        self.holds_source = False  # pages at prefill, in that life of the server
        self.source_life = 0
        self.holds_pages = False  # pages at decode that a hand-off is to fill
        self.arrived = False  # all of its bytes are at decode
        self.counted = False  # in the sum of bytes moved
        self.moves = prompt  # tokens that decode does not have
        self.skip = 0  # of those that it has, how many are still to be left out of what is pushed
        self.pending = 0  # tokens computed and not yet pushed
        self.sent = 0.0  # bytes posted
        self.given = 0.0  # of those, bytes that the link got
        self.limit = 0.0  # bytes after which it breaks, or all
        self.flow: Flow | None = None
        self.routed_ms = self.asked_ms = self.granted_ms = self.queued_ms = -1.0
        self.started_ms = self.prefilled_ms = self.moved_ms = self.landed_ms = self.joined_ms = -1.0
        self.first_ms = self.last_ms = self.paused_ms = self.again_ms = -1.0

    def again(self, now_ms: float) -> Request:
        """The same request from the start, after a server that it was on has crashed. Links break once."""
        other = Request(self.number, self.arrival_ms, self.prompt, self.answer, 2.0)
        other.place, other.tries, other.again_ms = self.place, self.tries + 1, now_ms
        return other


class Work:
    """A prompt, or a cache to build anew, to compute."""

    __slots__ = ("base", "done", "dropped", "finds", "holds_pages", "local", "request", "returns", "tokens")

    def __init__(
        self,
        request: Request,
        tokens: int,
        *,
        local: bool,
        finds: bool = False,
        holds_pages: bool = False,
        returns: bool = False,
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.local = local
        self.finds = finds  # asks the prefix cache, once it is begun
        self.base = 0  # of the tokens, those found there
        self.done = 0
        self.holds_pages = holds_pages
        self.returns = returns  # lost its cache to others
        self.dropped = False  # given up while a step with it was under way
