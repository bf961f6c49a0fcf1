"""What each server would cost a request, and which are free for it. Reads the books and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvxfer.admission._books import Bools, Decodes, Floats, Links, Prefills
from kvxfer.admission._estimates import Mean
from kvxfer.admission._types import Config, Reason, Request

__all__ = ["ALIKE", "Choices"]

# Costs closer than this part of the least are alike, and are taken in turn.
ALIKE = 1e-6


class Choices:
    """Compares servers.

    Args:
        config: how to decide.
        links, prefills, decodes: the books.
        names: role and place of each server.
        token_s: time per token of answers, of late.
    """

    def __init__(
        self,
        config: Config,
        links: Links,
        prefills: Prefills,
        decodes: Decodes,
        names: Mapping[str, tuple[str, int]],
        token_s: Mean,
    ) -> None:
        self._config = config
        self.links, self.prefills, self.decodes = links, prefills, decodes
        self._names = names
        self.token_s = token_s
        # Goes up with every request that was let in.
        self.turn = 0

    def avoiding(self, up: Bools, role: str, avoid: frozenset[str]) -> Bools:
        """Those that a request should go to while there are any."""
        if not avoid:
            return up
        left = up.copy()
        for name in avoid:
            if self._names.get(name, ("", 0))[0] == role:
                left[self._names[name][1]] = False
        return left if left.any() else up

    def fits(self, need: Any) -> Bools:
        """Decode servers that have so many pages, and a slot."""
        books = self.decodes
        if not self._config.enforce:
            return books.up.copy()
        after = books.reserved + need
        # One that is too large for what new requests may take gets a server of its own.
        pages = (after <= books.pages_for_new) | ((books.reserved == 0) & (need <= books.pages))
        fits: Bools = pages & (books.slots_held < books.slots) & books.open
        return fits

    def choose_prefill(self, request: Request) -> int | Reason:
        """The prefill server that is free first, or what is lacking."""
        books = self.prefills
        up = self.avoiding(books.up, "prefill", request.avoid)
        if not up.any():
            return Reason.NO_PREFILL
        busy_s = books.tokens / books.per_s
        own_s = request.prompt_tokens / books.per_s
        if self._config.route == "requests":
            cost = np.where(up, books.requests, np.inf)
        else:
            link_s = self.links.nbytes[books.link] / self.links.per_s[books.link]
            cost = np.where(up, np.maximum(busy_s + own_s, link_s), np.inf)
        if self._config.enforce:
            # One that is long in itself may have a server to itself.
            free = (busy_s + own_s <= self._config.prefill_backlog_s) | (books.tokens == 0)
            cost = np.where(free, cost, np.inf)
        p = self.least(cost)
        return p if np.isfinite(cost[p]) else Reason.PREFILL

    def least(self, cost: Floats) -> int:
        """The cheapest; those that are alike are taken in turn."""
        least = float(cost.min())
        alike = np.flatnonzero(cost <= least + abs(least) * ALIKE) if np.isfinite(least) else (0,)
        return int(alike[self.turn % len(alike)])

    def move_s(self, p: int, tokens: int) -> Floats:
        """How long the bytes will take to each decode server, with those that are before them."""
        links, books = self.links, self.decodes
        nbytes = tokens * self._config.kv_bytes_per_token
        to: Floats = (links.nbytes[books.link] + nbytes) / links.per_s[books.link]
        out = self.prefills.link[p]
        np.maximum(to, (links.nbytes[out] + nbytes) / links.per_s[out], out=to)
        to += self._config.handoff_ms / 1e3
        return to

    def links_free(self, p: int, tokens: int) -> Bools:
        """Decode servers to which the links are not too busy."""
        links, books = self.links, self.decodes
        nbytes = tokens * self._config.kv_bytes_per_token
        most_s = self._config.link_backlog_s
        there = links.nbytes[books.link]
        free: Bools = ((there + nbytes) <= most_s * links.per_s[books.link]) | (there == 0)
        out = int(self.prefills.link[p])
        if links.nbytes[out] and links.nbytes[out] + nbytes > most_s * links.per_s[out]:
            free[:] = False
        return free

    def load_s(self, request: Request, pages_share: Any, slots_share: Any) -> Any:
        """What a decode server's load costs the answer: a full one takes twice as long for a token as an
        empty one. That factor is a guess; only its being the same for all servers matters.
        """
        return request.answer_tokens * self.token_s.value * 0.5 * (pages_share + slots_share)

    def decode_costs(self, request: Request, need: Any, move_s: Floats) -> Floats:
        """What each decode server costs an answer."""
        books = self.decodes
        if self._config.route == "requests":
            return books.slots_held.astype(np.float64)
        pages = (books.reserved + need) / books.pages
        slots = (books.slots_held + 1) / books.slots
        found: Floats = move_s + self.load_s(request, pages, slots)
        return found

    def local_s(self, tokens: int, *, within_s: float, at_all: bool) -> Floats:
        """How long each decode server would take for the prompt itself; infinite where it should not."""
        books = self.decodes
        per_s = books.local_per_s
        if at_all:
            # The speed is not known where it was not given; any will do to compare servers.
            per_s = np.where(per_s > 0, per_s, 8000.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            took: Floats = (books.local_tokens + tokens) / per_s
        return np.where((per_s > 0) & (took <= within_s), took, np.inf)
