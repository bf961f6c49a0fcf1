"""What each server and link holds, in arrays: choosing among a thousand servers is a few operations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.admission._estimates import Rate
from kvxfer.admission._types import Decode, Prefill, ServerStats
from kvxfer.errors import BadArgument

__all__ = ["Decodes", "Held", "Links", "Prefills"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Stands for "as many as you like"; sums of a million of these stay within 64 bits.
UNLIMITED = 2**40


def _grown(array: npt.NDArray[Any], value: Any) -> Any:
    return np.append(array, np.asarray([value], array.dtype))


class Held:
    """What one admitted request holds. What was given back is 0 or False here, so that nothing is twice."""

    __slots__ = (
        *(
            "id",
            "prefill",
            "decode",
            "prompt_tokens",
            "answer_tokens",
            "moved_tokens",
            "pages",
            "short",
            "slot",
        ),
        *("prefill_tokens", "local_tokens", "nbytes", "admitted_s", "first_s", "avoid"),
    )

    def __init__(self, id: Hashable, prompt_tokens: int, answer_tokens: int, moved_tokens: int) -> None:
        self.id = id
        self.prefill = -1
        self.decode = -1
        self.prompt_tokens = prompt_tokens
        # As many as pages are reserved for.
        self.answer_tokens = answer_tokens
        self.moved_tokens = moved_tokens
        self.pages = 0
        # Pages that its answer needs and that the server has not got.
        self.short = 0
        self.slot = False
        self.avoid: frozenset[str] = frozenset()
        self.prefill_tokens = 0
        self.local_tokens = 0
        self.nbytes = 0
        self.admitted_s = 0.0
        self.first_s: float | None = None


class Links:
    """Links by name, with the bytes in flight on each."""

    def __init__(self) -> None:
        self.nbytes: Ints = np.zeros(0, np.int64)
        self.per_s: Floats = np.zeros(0)
        self._by_name: dict[str, int] = {}

    def index(self, name: str, gbytes_per_s: float) -> int:
        """The link of this name; a new one if there is none yet."""
        per_s = gbytes_per_s * 1e9
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = len(self.per_s)
            self.nbytes = _grown(self.nbytes, 0)
            self.per_s = _grown(self.per_s, per_s)
        elif self.per_s[found] != per_s:
            raise BadArgument(
                f"link {name} is given {gbytes_per_s} GB/s here and {self.per_s[found] / 1e9:g} GB/s before: "
                "servers that share a link name the same speed"
            )
        return found


class Prefills:
    """The prefill servers."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.specs: list[Prefill] = []
        self.rates: list[Rate] = []
        self.last_s: list[float] = []
        self.up: Bools = np.zeros(0, np.bool_)
        self.tokens: Ints = np.zeros(0, np.int64)
        self.requests: Ints = np.zeros(0, np.int64)
        self.per_s: Floats = np.zeros(0)
        self.link: Ints = np.zeros(0, np.int64)

    def add(self, spec: Prefill) -> int:
        """A new server, which is up."""
        link = self.links.index(spec.link or f"{spec.name} (own)", spec.gbytes_per_s)
        self.specs.append(spec)
        self.rates.append(Rate(spec.tokens_per_s))
        self.last_s.append(-np.inf)
        self.up = _grown(self.up, True)
        self.tokens = _grown(self.tokens, 0)
        self.requests = _grown(self.requests, 0)
        self.per_s = _grown(self.per_s, spec.tokens_per_s)
        self.link = _grown(self.link, link)
        return len(self.specs) - 1

    def give_back(self, held: Held) -> None:
        """The prompt is no longer in flight."""
        if held.prefill_tokens:
            self.tokens[held.prefill] -= held.prefill_tokens
            self.requests[held.prefill] -= 1
            held.prefill_tokens = 0

    def stats(self) -> list[ServerStats]:
        """Where each stands."""
        return [
            ServerStats(
                name=spec.name,
                up=bool(self.up[i]),
                requests=int(self.requests[i]),
                tokens_in_flight=int(self.tokens[i]),
                bytes_in_flight=int(self.links.nbytes[self.link[i]]),
                tokens_per_s=float(self.per_s[i]),
            )
            for i, spec in enumerate(self.specs)
        ]

    def measure(self, held: Held, now_s: float) -> None:
        """A prompt ended: the server was busy with it since it came, or since the one before it ended."""
        p = held.prefill
        self.rates[p].add(held.prefill_tokens, now_s - max(held.admitted_s, self.last_s[p]))
        self.per_s[p] = self.rates[p].value
        self.last_s[p] = now_s


class Decodes:
    """The decode servers: pages, slots, prompts that they compute themselves."""

    def __init__(self, links: Links, slots_share: float, growth_share: float) -> None:
        self.links = links
        self._slots_share = slots_share
        self._growth_share = growth_share
        self.specs: list[Decode] = []
        self.up: Bools = np.zeros(0, np.bool_)
        # None are open that are down or owe pages to answers that have grown.
        self.open: Bools = np.zeros(0, np.bool_)
        self.page_tokens: Ints = np.zeros(0, np.int64)
        self.pages: Ints = np.zeros(0, np.int64)
        # What new requests may take in all, and what is taken.
        self.pages_for_new: Ints = np.zeros(0, np.int64)
        self.reserved: Ints = np.zeros(0, np.int64)
        self.slots: Ints = np.zeros(0, np.int64)
        self.slots_held: Ints = np.zeros(0, np.int64)
        self.local_tokens: Ints = np.zeros(0, np.int64)
        self.local_per_s: Floats = np.zeros(0)
        self.link: Ints = np.zeros(0, np.int64)
        self.one_page_size: int | None = None
        self.any_local = False
        self.debts: list[OrderedDict[Hashable, Held]] = []

    def add(self, spec: Decode) -> int:
        """A new server, which is up."""
        link = self.links.index(spec.link or f"{spec.name} (own)", spec.gbytes_per_s)
        self.specs.append(spec)
        self.debts.append(OrderedDict())
        self.up = _grown(self.up, True)
        self.open = _grown(self.open, True)
        self.page_tokens = _grown(self.page_tokens, spec.page_tokens)
        self.pages = _grown(self.pages, 0)
        self.pages_for_new = _grown(self.pages_for_new, 0)
        self.reserved = _grown(self.reserved, 0)
        self.slots = _grown(self.slots, 0)
        self.slots_held = _grown(self.slots_held, 0)
        self.local_tokens = _grown(self.local_tokens, 0)
        self.local_per_s = _grown(self.local_per_s, spec.prefill_tokens_per_s)
        self.link = _grown(self.link, link)
        self.any_local = bool(self.local_per_s.any())
        self.set_capacity(len(self.specs) - 1, spec)
        return len(self.specs) - 1

    def set_capacity(self, d: int, spec: Decode) -> None:
        """The numbers of `spec`; what is reserved is not looked at."""
        self.specs[d] = spec
        pages = UNLIMITED if spec.pages is None else min(spec.pages, UNLIMITED)
        self.pages[d] = pages
        self.pages_for_new[d] = max(1, int(pages * (1.0 - self._growth_share)))
        self.page_tokens[d] = spec.page_tokens
        self.slots[d] = max(1, int(spec.slots * self._slots_share))
        sizes = np.unique(self.page_tokens)
        self.one_page_size = int(sizes[0]) if len(sizes) == 1 else None

    def need(self, tokens: int) -> Any:
        """Pages for so many tokens: one number, or one for each server where their pages differ."""
        if self.one_page_size is not None:
            return -(-tokens // self.one_page_size)
        return -(-tokens // self.page_tokens)

    def pages_at(self, d: int, tokens: int) -> int:
        """Pages for so many tokens at one server."""
        return -(-tokens // self.specs[d].page_tokens)

    def stats(self) -> list[ServerStats]:
        """Where each stands."""
        return [
            ServerStats(
                name=spec.name,
                up=bool(self.up[i]),
                requests=int(self.slots_held[i]),
                tokens_in_flight=int(self.reserved[i]) * spec.page_tokens,
                bytes_in_flight=int(self.links.nbytes[self.link[i]]),
                pages=None if self.pages[i] == UNLIMITED else int(self.pages[i]),
                pages_reserved=int(self.reserved[i]),
                pages_short=sum(one.short for one in self.debts[i].values()),
                slots=int(self.slots[i]),
                slots_in_all=spec.slots,
                slots_held=int(self.slots_held[i]),
            )
            for i, spec in enumerate(self.specs)
        ]

    def take(self, held: Held, d: int, pages: int) -> None:
        """Reserves a slot and pages."""
        held.decode, held.pages, held.slot = d, pages, True
        self.reserved[d] += pages
        self.slots_held[d] += 1
        self.local_tokens[d] += held.local_tokens

    def grow(self, held: Held, pages: int) -> None:
        """More pages; those that are not there become a debt, which closes the server until it is paid."""
        d = held.decode
        # Nothing is free while there are debts, so nobody is passed over.
        got = min(pages, max(0, int(self.pages[d] - self.reserved[d])))
        self.reserved[d] += got
        held.pages += got
        if got < pages:
            held.short += pages - got
            self.debts[d][held.id] = held
            self.open[d] = False

    def shrink(self, held: Held, pages: int) -> None:
        """Gives pages back, those first that it is owed."""
        owed = min(pages, held.short)
        held.short -= owed
        held.pages -= pages - owed
        if not held.short:
            self.debts[held.decode].pop(held.id, None)
        self._freed(held.decode, pages - owed)

    def give_back(self, held: Held) -> None:
        """Slot and pages are free again."""
        d = held.decode
        self.end_local(held)
        if held.slot:
            held.slot = False
            self.slots_held[d] -= 1
            pages, held.pages, held.short = held.pages, 0, 0
            self.debts[d].pop(held.id, None)
            self._freed(d, pages)

    def end_local(self, held: Held) -> None:
        """Its prompt, which decode computed itself, is no longer in flight."""
        self.local_tokens[held.decode] -= held.local_tokens
        held.local_tokens = 0

    def set_up(self, d: int, up: bool) -> None:
        """Takes it in or out."""
        self.up[d] = up
        self.open[d] = up and not self.debts[d]

    def _freed(self, d: int, pages: int) -> None:
        self.reserved[d] -= pages
        debts = self.debts[d]
        while debts:
            first = next(iter(debts.values()))
            paid = min(first.short, max(0, int(self.pages[d] - self.reserved[d])))
            first.short -= paid
            first.pages += paid
            self.reserved[d] += paid
            if first.short:
                return
            del debts[first.id]
        self.open[d] = self.up[d]
