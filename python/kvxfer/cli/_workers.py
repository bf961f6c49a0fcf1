"""The processes of a command: started, listened to, and ended with it. `_worker` is their end."""

from __future__ import annotations

import collections
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from kvxfer.cli._errors import CommandError

__all__ = ["Workers"]

Message = dict[str, Any]

# Lines of a worker's standard error that are kept for when it fails.
_TAIL_LINES = 40
# How long to listen for further failures: the first one to be heard of may be a consequence of another.
_AFTERMATH_S = 0.4
_END_S = 5.0


class _Worker:
    """One process and the two threads that read what it writes."""

    def __init__(
        self,
        name: str,
        module: str,
        inbox: queue.SimpleQueue[tuple[str, Message | None]],
        env: Mapping[str, str] | None,
        pass_fds: Sequence[int],
        python: str,
    ) -> None:
        self.name = name
        self.ended = False
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        # In a session of its own, so that a Ctrl-C reaches the command only, which then ends its workers.
        self.process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            pass_fds=pass_fds,
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self.threads = [
            threading.Thread(target=self._listen, args=(inbox,), name=f"{name}-out", daemon=True),
            threading.Thread(target=self._keep_tail, name=f"{name}-err", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def _listen(self, inbox: queue.SimpleQueue[tuple[str, Message | None]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                inbox.put((self.name, json.loads(line)))
            except json.JSONDecodeError:
                self.tail.append(line.rstrip())
        inbox.put((self.name, None))

    def _keep_tail(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.tail.append(line.rstrip())

    def send(self, message: Message) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # It has ended; its reader says so.

    def how_it_ended(self) -> str:
        """In words, once it has closed its output."""
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "closed its output"
        if code < 0:
            # What aborts a process says why before its backtrace.
            said = next((line for line in self.tail if "Fatal" in line or "panicked" in line), "")
            return f"was killed by {signal.Signals(-code).name}" + (f": {said.strip()}" if said else "")
        said = next((line for line in reversed(self.tail) if line.strip()), "")
        return f"ended with status {code}" + (f": {said.strip()}" if said else "")

    def end(self) -> None:
        """Makes sure that it is gone."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except OSError:
            pass  # It is gone already, with input unread.
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for thread in self.threads:
            thread.join(_END_S)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Workers:
    """A group of named processes; leaving the context ends them all."""

    def __init__(self, on_progress: Callable[[str, str], None] | None = None) -> None:
        self._workers: dict[str, _Worker] = {}
        self._inbox: queue.SimpleQueue[tuple[str, Message | None]] = queue.SimpleQueue()
        self._early: list[tuple[str, Message]] = []
        self._on_progress = on_progress

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for worker in self._workers.values():
                worker.process.kill()
        for worker in self._workers.values():
            worker.end()

    def start(
        self,
        name: str,
        module: str,
        config: Message,
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        python: str = sys.executable,
    ) -> None:
        """Starts `python -m module` and sends it its configuration."""
        worker = _Worker(name, module, self._inbox, env, pass_fds, python)
        self._workers[name] = worker
        worker.send(config)

    def send(self, names: Iterable[str], **message: Any) -> None:
        """Sends a message to each of these workers."""
        for name in names:
            self._workers[name].send(message)

    def receive(self, names: Iterable[str], event: str, timeout: float) -> dict[str, Message]:
        """Waits until each of these workers has sent this event; their messages by name.

        Raises:
            CommandError: if any worker fails or ends meanwhile, or the time is up.
        """
        missing = set(names)
        got: dict[str, Message] = {}
        deadline = time.monotonic() + timeout
        for name, message in list(self._early):
            if name in missing and message["event"] == event:
                self._early.remove((name, message))
                missing.discard(name)
                got[name] = message
        while missing:
            try:
                name, said = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                who = ", ".join(sorted(missing))
                raise CommandError(f"{who}: nothing was heard of '{event}' in {timeout:.0f} s") from None
            if said is None or said["event"] == "failed":
                self._check(name, said)
            elif said["event"] == "progress":
                if self._on_progress is not None:
                    self._on_progress(name, said["text"])
            elif name in missing and said["event"] == event:
                missing.discard(name)
                got[name] = said
            else:
                self._early.append((name, said))
        return got

    def next(self, timeout: float) -> tuple[str, Message] | None:
        """The next message of any worker, with its name; None if there is none in that time.

        Raises:
            CommandError: if a worker fails or ends that was not killed.
        """
        if self._early:
            return self._early.pop(0)
        try:
            name, said = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if said is None or said["event"] == "failed":
            self._check(name, said)
            return None
        return name, said

    def signal(self, names: Iterable[str], number: signal.Signals) -> None:
        """Sends a signal to each of these workers."""
        for name in names:
            self._workers[name].process.send_signal(number)

    def kill(self, name: str) -> None:
        """SIGKILL, and back when the worker is gone; that is no failure then."""
        worker = self._workers[name]
        worker.ended = True
        worker.process.kill()
        worker.process.wait()

    def finish(self, names: Iterable[str], timeout: float) -> None:
        """Waits until these workers have ended well.

        Raises:
            CommandError: if one does not.
        """
        deadline = time.monotonic() + timeout
        for name in names:
            worker = self._workers[name]
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise CommandError(f"{name} has not ended within {timeout:.0f} s") from None
            if worker.process.returncode != 0:
                self._check(name, None)
            worker.ended = True

    def _check(self, name: str, said: Message | None) -> None:
        """A worker failed or ended: raises the failure that explains most."""
        if said is None and self._workers[name].ended:
            return
        failures: list[tuple[str, Message | None]] = [(name, said)]
        deadline = time.monotonic() + _AFTERMATH_S
        while True:
            try:
                other, more = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if more is None and self._workers[other].ended:
                continue
            if more is None or more["event"] == "failed":
                failures.append((other, more))
        spoke = {who for who, message in failures if message is not None}
        # Who ended without a word is the cause; else who failed first, before those that only miss another
        # rank.
        for who, message in failures:
            if message is None and who not in spoke:
                raise CommandError(f"{who} {self._workers[who].how_it_ended()}")
        words = [(who, message) for who, message in failures if message is not None]
        words.sort(key=lambda failure: failure[1].get("kind") in ("CommError", "PeerLost"))
        who, message = words[0]
        raise CommandError(f"{who}: {message['error']}")
