"""Text for people."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Counter", "aligned", "print_json", "progress", "prose", "quantity", "size", "table"]


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Rows in columns as wide as they need; the last column is left as it is."""
    lines = [tuple(row) for row in rows]
    if not lines:
        return ""
    columns = max(len(row) for row in lines)
    widths = [
        max(len(row[i]) for row in lines if i < len(row) - 1 or len(row) == 1) for i in range(columns - 1)
    ]
    text = []
    for row in lines:
        cells = [cell.ljust(widths[i]) if i < len(row) - 1 else cell for i, cell in enumerate(row)]
        text.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(text)


def aligned(rows: Sequence[Sequence[str]], texts: int) -> str:
    """A table whose columns after the first `texts` are numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return table(
        [
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )


def prose(text: str) -> str:
    """A paragraph in lines that fit a terminal."""
    return textwrap.fill(text, 110)


def size(count: float) -> str:
    """A number of bytes."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes everything")


def quantity(count: int, what: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def progress(text: str) -> None:
    """A line about what is going on, on standard error."""
    print(f"kvxfer: {text}", file=sys.stderr, flush=True)


def print_json(values: dict[str, Any]) -> None:
    """The one JSON object of `--json`."""
    print(json.dumps(values, indent=2))


class Counter:
    """How far a long command has come, in one line of standard error that is written over, on a terminal.

    Args:
        quiet: whether to say nothing in any case.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._speaks = not quiet and sys.stderr.isatty()
        self._said_s = 0.0

    def show(self, done: int, of: int) -> None:
        """Says it, at most ten times a second."""
        now = time.monotonic()
        if self._speaks and (now - self._said_s >= 0.1 or done == of):
            self._said_s = now
            print(f"\rkvxfer: {done} of {of}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leaves the line."""
        if self._speaks and self._said_s:
            print(file=sys.stderr, flush=True)
