"""Text for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["print_json", "progress", "quantity", "size", "table"]


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
