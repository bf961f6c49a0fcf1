"""Child processes without an interpreter's start: forks of a process that has imported all that they need.

Each is adopted by this process (a subreaper), so that it can be signalled and waited for like any other.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
from typing import IO

_PR_SET_CHILD_SUBREAPER = 36
HERE = pathlib.Path(__file__).parent


class Child:
    """What `subprocess.Popen` has, as far as these tests need it."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            finally:
                os.close(pidfd)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process from which children are forked; a context manager."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._parent = subprocess.Popen(
                [sys.executable, str(HERE / "nursery_child.py")],
                stdin=theirs,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )

    def child(self, env: dict[str, str]) -> Child:
        """A new process that runs `rank_child.main`."""
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        try:
            socket.send_fds(self._sock, [json.dumps(env).encode()], [stdin_read, stdout_write])
            pid = int(self._sock.recv(100))
        finally:
            os.close(stdin_read)
            os.close(stdout_write)
        return Child(pid, os.fdopen(stdin_write, "w"), os.fdopen(stdout_read))

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        self._parent.wait(10)
