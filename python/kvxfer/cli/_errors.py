"""What a command tells the user when it cannot go on."""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(Exception):
    """A failure that the user should know about: one line, no traceback.

    Args:
        text: what failed, with the values, and what to do about it.
        status: the exit status of the command.
    """

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status
