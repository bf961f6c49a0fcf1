"""Cancels of one process of `kvxfer stress`, by a thread of their own: they are to meet bytes in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import kvxfer as kx
from kvxfer.cli._stress_plan import Room

__all__ = ["Canceller"]

_LOOK_S = 0.0003
# An order that finds the queue full is made again; so many rooms cannot fill it for long.
_FULL_S = 0.002


@dataclass
class _Pending:
    room: Room
    added_s: float
    due_s: float | None = None


class Canceller:
    """Waits for the moment that each room's plan names, and cancels.

    Args:
        agent: whose rooms.
        name: this process's in the plan.
        in_flight: whether bytes of a room have begun to move.
    """

    def __init__(self, agent: kx.Agent, name: str, in_flight: Callable[[Room], bool]) -> None:
        self._agent, self._name, self._in_flight = agent, name, in_flight
        self._changed = threading.Condition()
        self._pending: dict[int, _Pending] = {}
        self._ordered: dict[int, float] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="cancels", daemon=True)
        self._thread.start()

    def add(self, room: Room) -> None:
        """A room was just ordered here; cancels it if that is this process's part."""
        if room.cancel is None or room.cancel.by != self._name:
            return
        if room.cancel.when == "at-once":
            self._cancel(room)
            return
        with self._changed:
            self._pending[room.index] = _Pending(room, time.monotonic())
            self._changed.notify()

    def forget(self, room: Room) -> None:
        """The room has ended."""
        with self._changed:
            self._pending.pop(room.index, None)

    def when(self, room: Room) -> float | None:
        """When the order to cancel it was given, seconds of the monotonic clock."""
        return self._ordered.get(room.index)

    @property
    def orders(self) -> int:
        """How many orders were given that met a room."""
        return len(self._ordered)

    def stop(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _cancel(self, room: Room) -> None:
        while True:
            now = time.monotonic()
            try:
                self._agent.cancel(room.room)
            except kx.QueueFull:
                time.sleep(_FULL_S)
                continue
            except (kx.UnknownRoom, kx.AgentClosed):
                return  # It has ended well meanwhile.
            self._ordered[room.index] = now
            return

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                pending = list(self._pending.values())
            for one in pending:
                if self._is_due(one):
                    self.forget(one.room)
                    self._cancel(one.room)
            time.sleep(_LOOK_S)

    def _is_due(self, one: _Pending) -> bool:
        assert one.room.cancel is not None
        now = time.monotonic()
        if one.due_s is None:
            if one.room.cancel.when == "later":
                one.due_s = one.added_s + one.room.cancel.delay_s
            elif self._in_flight(one.room):
                one.due_s = now + one.room.cancel.delay_s
        return one.due_s is not None and now >= one.due_s
