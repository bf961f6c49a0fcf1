"""kvxfer itself, in the same harness as its peers."""

from __future__ import annotations

from typing import Any

import kvxfer as kx
from kvxfer.cli._loopback import ROOM_S
from kvxfer.cli._peer_base import PAGE_TOKENS, End, Turn

__all__ = ["KvxferEnd"]


class KvxferEnd(End):
    """One agent."""

    def __init__(self, side: Any, memory: Any, fabric: Any, pages: int, secret: str) -> None:
        super().__init__(side, memory, fabric, pages)
        self.version = kx.__version__
        self.agent = kx.Agent(
            side,
            self.layout,
            kx.Shard(),
            memory=self.owner,
            role=side,
            fabric=fabric,
            secret=secret,
            engine=side,
        )

    def info(self) -> dict[str, Any]:
        return {"address": self.agent.address}

    def connect(self, other: dict[str, Any]) -> None:
        self._other = other["address"]

    def arm(self, turn: Turn) -> None:
        tokens = len(turn.to) * PAGE_TOKENS
        self.agent.expect(turn.room, turn.to, tokens=tokens, source=self._other)

    def post(self, turn: Turn) -> None:
        self.agent.push(turn.room, turn.source, tokens=len(turn.source) * PAGE_TOKENS)

    def finish(self, turn: Turn) -> None:
        self._end(turn)

    def settle(self, turn: Turn) -> float | None:
        return float(self._end(turn).stats.at_us)

    def _end(self, turn: Turn) -> kx.Event:
        event = self.agent.wait(turn.room, ROOM_S)
        released = False
        while not released:
            released = any(event.released and event.room == turn.room for event in self.agent.poll())
        return event

    def close(self) -> None:
        self.agent.close()
