"""The scheduler's half: which request hands off in which room, and what the workers have to do about it.

Pure bookkeeping: it takes requests, pages and tokens as plain values, so it is tested without vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvxfer._kvxfer import new_room
from kvxfer.errors import BadArgument
from kvxfer.vllm.meta import Chunk, Grant, Open, Orders
from kvxfer.vllm.settings import Settings, split_address

__all__ = ["Books", "Scheduled"]

_log = logging.getLogger("vllm.kvxfer")

_ASKS = {"do_remote_decode": "prefill leg", "do_remote_prefill": "decode leg"}


class Scheduled(NamedTuple):
    """One request of a step."""

    request: str
    # New pages of the request; all of them if `replaced`.
    blocks: tuple[int, ...]
    replaced: bool
    # Tokens that had their KV before this step, and tokens that this step computes.
    computed: int
    scheduled: int


@dataclass
class _Out:
    """A request whose prompt is computed here for another engine."""

    room: int
    prompt: int
    blocks: list[int] = field(default_factory=list)
    sent: int = 0
    opened: bool = False


@dataclass
class _In:
    """A request whose prompt another engine computes."""

    room: int
    source: str
    prompt: int
    came_s: float = 0.0
    # Tokens that were in the prefix cache when vLLM last asked.
    cached: int = 0
    granted: bool = False
    loaded_s: float | None = None


class Books:
    """Requests and rooms of one engine's scheduler."""

    def __init__(
        self, settings: Settings, block_size: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._settings = settings
        self._block_size = block_size
        self._clock = clock
        self._out: dict[str, _Out] = {}
        self._in: dict[str, _In] = {}
        self._orders = Orders()
        self.missing_rooms = 0
        self.refused_requests = 0

    def new_request(self, request: str, params: Mapping[str, Any] | None, prompt: int) -> str | None:
        """A request has come. The answer is what is wrong with it, for which it is to fail; None if nothing
        is.
        """
        if params and self._settings.prefills and (room := _room(params.get("give_up"))) is not None:
            # From a proxy whose decode leg failed. The prefill leg may have ended, and cannot be aborted.
            self._orders.given_up.append(room)
            return None
        asks = [key for key in _ASKS if params and params.get(key)]
        if not asks:
            # A proxy that says no to both means it: decode computes this one by itself.
            meant = params is not None and all(params.get(key) is False for key in _ASKS)
            if self._settings.role != "kv_both" and not meant:
                return self._missing(request, "it came without kv_transfer_params")
            return None
        if len(asks) == 2:
            return self._refuse(
                request, "its kv_transfer_params ask for both do_remote_decode and do_remote_prefill"
            )
        assert params is not None
        fits = self._settings.prefills if asks[0] == "do_remote_decode" else self._settings.decodes
        if not fits:
            return self._refuse(
                request,
                f"it is a {_ASKS[asks[0]]} ({asks[0]}), but this server is a {self._settings.role}:"
                " the proxy's lists of prefill and decode servers are the wrong way round",
            )
        room = params.get("room")
        if room is None and asks[0] == "do_remote_decode":
            # A proxy that calls prefill first and gives the answer's kv_transfer_params to decode needs no
            # room of its own.
            room = new_room()
        if room is None:
            return self._missing(request, "its kv_transfer_params have no room")
        number = _room(room)
        if number is None:
            return self._refuse(request, f"room={room!r} is no number of 63 bits: take kvxfer.new_room()")
        if any(item.room == number for books in (self._out, self._in) for item in books.values()):
            return self._refuse(
                request, f"room {number} is in use by another request: each needs one of its own"
            )
        source = params.get("source")
        if asks[0] == "do_remote_decode":
            # vLLM tells engines of a dense model that there is one of them, but which one it still says.
            several = self._settings.dp_size > 1 or self._settings.dp_index > 0
            if several and _port(source) not in (None, _port(self._settings.directory)):
                return self._refuse(
                    request,
                    f"the decode leg was told source={source!r}, but data-parallel engine"
                    f" {self._settings.dp_index} has the prompt, whose directory is"
                    f" {self._settings.directory}: choose decode late (kvxfer proxy --decode-choice late),"
                    " or give each engine its own API server (--data-parallel-external-lb) and source",
                )
            self._out[request] = _Out(number, prompt)
            return None
        if (why := _not_a_source(source)) is not None:
            return self._refuse(
                request,
                f"source={source!r}: must be host:port of the prefill server's kvxfer directory{why}",
            )
        self._in[request] = _In(number, str(source), prompt, came_s=self._clock())
        return None

    def rejected(self, request: str, params: Mapping[str, Any] | None) -> None:
        """vLLM's front end has turned a request away before it was one, and tells only what it asked for: a
        prefill engine that works for it should not wait. `finished` follows.
        """
        asked = params or {}
        number, source = _room(asked.get("room")), asked.get("source")
        if number is None or not asked.get("do_remote_prefill") or not isinstance(source, str):
            return
        if self._settings.decodes and all(item.room != number for item in self._in.values()):
            self._in[request] = _In(number, source, 0)

    def matched(self, request: str, computed: int) -> tuple[int, bool]:
        """How many tokens after the `computed` ones come from elsewhere, and whether while the engine goes
        on.
        """
        item = self._in.get(request)
        if item is None or item.granted:
            return 0, False
        item.cached = computed
        missing = item.prompt - computed
        return (missing, True) if missing > 0 else (0, False)

    def allocated(self, request: str, blocks: Iterable[int], tokens: int) -> None:
        """vLLM has given a request its pages, of which `tokens` tokens are to come from elsewhere."""
        item = self._in.get(request)
        if item is None or item.granted:
            return
        if tokens <= 0:
            # vLLM computes it all the same, as for logprobs of the prompt: prefill need not wait for us.
            self._abandon(request, item)
            return
        item.granted = True
        size = self._block_size
        end = item.cached + tokens
        pages = tuple(blocks)[item.cached // size : -(-end // size)]
        self._orders.grants.append(Grant(request, item.room, item.source, item.cached, end, pages))

    def loaded(self, request: str) -> None:
        """A request's prompt is there."""
        if (item := self._in.get(request)) is not None and item.granted:
            item.loaded_s = self._clock()

    def refused_by_agent(self, request: str, why: str) -> str | None:
        """The agent of a rank could not take a request's room; what it is to fail for."""
        return self._refuse(request, why) if request in self._in else None

    def step(self, scheduled: Iterable[Scheduled], preempted: Collection[str]) -> Orders:
        """The orders of a step, and clean books for the next one."""
        orders, self._orders = self._orders, Orders()
        orders.preempted.extend(preempted)
        for request in preempted:
            if out := self._out.get(request):
                out.sent = 0
                out.blocks.clear()
        for request, out in self._out.items():
            if not out.opened:
                out.opened = True
                orders.opens.append(Open(request, out.room))
        for item in scheduled:
            out = self._out.get(item.request)
            if out is None:
                continue
            if item.replaced:
                out.blocks.clear()
            out.blocks.extend(item.blocks)
            end = min(item.computed + item.scheduled, out.prompt)
            if end <= out.sent:
                continue
            size = self._block_size
            pages = tuple(out.blocks[out.sent // size : -(-end // size)])
            orders.chunks.append(Chunk(item.request, out.room, out.sent, end, pages, last=end == out.prompt))
            out.sent = end
        return orders

    def finished(self, request: str, *, aborted: bool) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Whether its pages must stay, and what its answer tells the proxy."""
        if (item := self._in.pop(request, None)) is not None:
            if item.loaded_s is not None:
                # For the proxy, which tells the hand-off's time from the wait for a slot by it.
                return False, {"loaded_ms": round((item.loaded_s - item.came_s) * 1e3, 3)}
            if item.granted:
                # vLLM itself keeps the pages of a load that it waits for. One that has ended is not known to
                # the worker any more, and cancelling it does nothing.
                self._orders.cancels.append(request)
            else:
                self._abandon(request, item)
        if (out := self._out.pop(request, None)) is None:
            return False, None
        if aborted or out.sent < out.prompt:
            if out.opened:
                self._orders.cancels.append(request)
            else:
                # So that decode learns of it: only a room that is known can be cancelled.
                self._orders.opens.append(Open(request, out.room))
                self._orders.cancels.append(request)
            if out.sent > 0:
                self._orders.finished.append(request)
            return out.sent > 0, None
        self._orders.finished.append(request)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "room": out.room,
            "source": self._settings.directory,
        }

    @property
    def pending(self) -> bool:
        """Whether there are orders that only another step can bring to the workers."""
        return bool(self._orders)

    def _abandon(self, request: str, item: _In) -> None:
        """Tells prefill that nobody waits for a room: grants nothing in it, and gives it up."""
        self._in.pop(request, None)
        self._orders.grants.append(Grant(request, item.room, item.source, item.prompt, item.prompt, ()))
        self._orders.cancels.append(request)

    def _missing(self, request: str, why: str) -> str | None:
        self.missing_rooms += 1
        if self._settings.on_missing_room == "reject":
            return self._refuse(
                request,
                f"{why}, and on_missing_room is 'reject': send requests to the proxy (kvxfer proxy), not to a"
                f" {self._settings.role} server",
            )
        if self.missing_rooms == 1:
            _log.warning(
                "kvxfer: request %s is computed here alone, since %s. Requests should come through the proxy"
                " (kvxfer proxy); this %s server counts them (kvxfer_missing_rooms) and says so once.",
                request,
                why,
                self._settings.role,
            )
        return None

    def _refuse(self, request: str, why: str) -> str:
        self.refused_requests += 1
        _log.error("kvxfer: request %s is refused: %s", request, why)
        return why


def _not_a_source(source: object) -> str | None:
    """What is wrong with the address of a directory, in as far as it is a text; None if nothing is."""
    if not isinstance(source, str) or not source:
        return ""
    try:
        _, port = split_address(source)
    except BadArgument as error:
        return f" ({error})"
    return None if port else " (it has no port)"


def _port(source: object) -> int | None:
    """The port of an address; None if there is none."""
    if not isinstance(source, str) or _not_a_source(source) is not None:
        return None
    return split_address(source)[1]


def _room(value: object) -> int | None:
    """A room from JSON, where big numbers may come as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        return None
    return value
