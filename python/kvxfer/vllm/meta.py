"""What the scheduler's half of the connector orders of the workers' half, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Chunk", "Grant", "Open", "Orders"]


@dataclass(frozen=True)
class Open:
    """A request whose prompt this engine computes for another one: its room may get in contact already."""

    request: str
    room: int


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of a prompt that this step computes, or found in the prefix cache."""

    request: str
    room: int
    start: int
    end: int
    # Pages of the whole prompt so far, the first with token 0.
    blocks: tuple[int, ...]
    last: bool


@dataclass(frozen=True)
class Grant:
    """Pages that another engine fills with tokens `start` to `end` of a prompt."""

    request: str
    room: int
    source: str
    start: int
    end: int
    # The first holds token `start`.
    blocks: tuple[int, ...]


@dataclass
class Orders:
    """One step's orders, carried out from the top down."""

    # Requests whose pages vLLM has taken away: their pushes must be taken back before the step computes.
    preempted: list[str] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    # Rooms for whose prompts nobody will come.
    given_up: list[int] = field(default_factory=list)
    # Requests that ended before their hand-off did.
    cancels: list[str] = field(default_factory=list)
    # Requests that ended, and whose pages wait for `finished_sending`.
    finished: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(
            (
                self.preempted,
                self.opens,
                self.chunks,
                self.grants,
                self.given_up,
                self.cancels,
                self.finished,
            )
        )
