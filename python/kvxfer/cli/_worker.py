"""The worker's end of a command that runs several processes; `_workers` is the command's end.

Both directions are lines of JSON, over the worker's standard input and output. A worker whose command is gone
ends at once: nothing is left running.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["ORPHANED", "Link", "run"]

ORPHANED = 3
"""Exit status of a worker whose command has gone."""


class Link:
    """Messages to and from the command."""

    def __init__(self) -> None:
        # Libraries print to descriptor 1 (UCX's log does); what they say belongs with the errors.
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="command", daemon=True).start()

    def _read(self) -> None:
        # A stream of its own: the interpreter could not end while this thread holds the lock of `sys.stdin`.
        with os.fdopen(os.dup(0), encoding="utf-8") as lines:
            for line in lines:
                self._messages.put(json.loads(line))
        os._exit(ORPHANED)

    def receive(self) -> dict[str, Any]:
        """The next message; waits for it."""
        return self._messages.get()

    def waiting(self) -> bool:
        """Whether a message is there."""
        return not self._messages.empty()

    def send(self, event: str, **values: Any) -> None:
        """Tells the command that something happened."""
        line = json.dumps({"event": event, **values})
        try:
            with self._lock:
                self._out.write(line + "\n")
                self._out.flush()
        except OSError:
            os._exit(ORPHANED)


def run(work: Callable[[Link, dict[str, Any]], None], expected: tuple[type[Exception], ...]) -> NoReturn:
    """Runs a worker: `work` gets the link and the first message.

    Args:
        work: does it all; when it returns, the worker ends well.
        expected: exceptions that say all there is to say; others are printed with their traceback.
    """
    link = Link()
    status = 0
    try:
        work(link, link.receive())
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        link.send("failed", error=text, kind=type(error).__name__)
        if not isinstance(error, expected):
            raise
        status = 1
    sys.exit(status)
