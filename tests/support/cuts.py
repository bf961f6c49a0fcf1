"""Connections that are cut: a relay for control connections, and a knife for sockets of other processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(eq=False)
class _End:
    sock: socket.socket
    other: _End | None = None
    out: bytearray = field(default_factory=bytearray)


class Relay:
    """A TCP relay on 127.0.0.2, at the same port, to an agent on 127.0.0.1, in a thread.

    A directory answers with the agent's own address; the relay puts its own in that place, which has as many
    letters, so that everything comes this way.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        assert host == "127.0.0.1"
        self.address = f"127.0.0.2:{port}"
        self._target = (host, int(port))
        self._words = (address.encode(), self.address.encode())
        self._listener = socket.create_server(("127.0.0.2", int(port)))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._poke = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._ends: list[_End] = []
        self._lock = threading.Lock()
        self._over = False
        self._holding = False
        self.accepted = 0
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            ready = self._selector.select()
            with self._lock:
                for key, _ in ready:
                    if key.fileobj is self._wake:
                        self._wake.recv(100)
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _End) and key.data in self._ends and not self._holding:
                        self._move(key.data)

    def _accept(self) -> None:
        near = _End(self._listener.accept()[0])
        self.accepted += 1
        try:
            far = _End(socket.create_connection(self._target))
        except OSError:
            near.sock.close()
            return
        near.other, far.other = far, near
        for end in (near, far):
            self._ends.append(end)
            if not self._holding:
                self._selector.register(end.sock, selectors.EVENT_READ, end)

    def _move(self, end: _End) -> None:
        assert end.other
        try:
            data = end.sock.recv(1 << 16)
            if data:
                end.other.sock.sendall(data.replace(*self._words))
                return
        except OSError:
            pass
        self._drop(end, reset=False)

    def _drop(self, end: _End, *, reset: bool) -> None:
        for one in (end, end.other):
            if one and one in self._ends:
                self._ends.remove(one)
                if not self._holding:
                    self._selector.unregister(one.sock)
                if reset:
                    one.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.sock.close()

    def cut(self, *, reset: bool = True) -> int:
        """Ends every connection, by a reset or an orderly end. Returns how many there were."""
        with self._lock:
            count = len(self._ends) // 2
            while self._ends:
                self._drop(self._ends[0], reset=reset)
            return count

    def hold(self) -> None:
        """A black hole: connections stay, are even accepted, and nothing passes."""
        with self._lock:
            for end in self._ends:
                self._selector.unregister(end.sock)
            self._holding = True

    def let_go(self) -> None:
        with self._lock:
            self._holding = False
            for end in self._ends:
                self._selector.register(end.sock, selectors.EVENT_READ, end)
        self._poke.send(b"x")

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._poke.send(b"x")
        self._thread.join(10)
        self.cut()
        self._selector.close()
        for sock in (self._listener, self._wake, self._poke):
            sock.close()


Ports = tuple[int, int]


def _inodes(pid: int) -> dict[str, int]:
    """The sockets of a process: inode to descriptor."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            what = os.readlink(f"/proc/{pid}/fd/{fd}")
            if what.startswith("socket:["):
                found[what[8:-1]] = int(fd)
    return found


def _connected(pid: int) -> Iterator[tuple[Ports, int]]:
    """Local and remote port of each TCP connection of a process, with its descriptor."""
    inodes = _inodes(pid)
    for name in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "01" and words[9] in inodes:
                local, remote = (int(words[i].rpartition(":")[2], 16) for i in (1, 2))
                yield (local, remote), inodes[words[9]]


def data_connections(one: int, two: int, control: set[int]) -> list[tuple[Ports, int]]:
    """TCP connections between two processes but those to these control ports, with the first one's
    descriptors.
    """
    mirrored = {(b, a) for (a, b), _ in _connected(two)}
    return [(ports, fd) for ports, fd in _connected(one) if ports in mirrored and not control & set(ports)]


def unix_connections(pid: int) -> set[int]:
    """Descriptors of the unix sockets of a process that are connected."""
    inodes = _inodes(pid)
    found = set()
    for line in pathlib.Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[4] in ("0001", "0005") and words[5] == "03" and words[6] in inodes:
            found.add(inodes[words[6]])
    return found


def shut(pid: int, fd: int) -> None:
    """Shuts a socket of this or another process down, as if its network had ended it."""
    if pid == os.getpid():
        copy = os.dup(fd)
    else:
        pidfd = os.pidfd_open(pid)
        try:
            copy = _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
            if copy < 0:
                raise OSError(ctypes.get_errno(), f"pidfd_getfd({pid}, {fd})")
        finally:
            os.close(pidfd)
    with socket.socket(fileno=copy) as sock:
        sock.shutdown(socket.SHUT_RDWR)
