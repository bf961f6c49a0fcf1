"""Sums over the ranks of one tensor-parallel engine on one host.

A star of Unix sockets: rank 0 collects every rank's array, adds them in rank order and sends the sum back,
so every rank gets the very same bits. A rank that dies closes its sockets; rank 0 then fails and closes
its own, so the error reaches everyone. A rank that hangs is caught by the timeout.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Comm", "CommError", "LocalComm", "SoloComm", "local_group"]

F32 = npt.NDArray[np.float32]

_HEADER = struct.Struct("<IQQ")  # operation, its number, bytes that follow
_REDUCE, _GATHER = 1, 2
_BUFFER_BYTES = 1 << 20


class CommError(ConnectionError):
    """Another rank died, hung past the timeout, or is out of step. The group cannot be used any more."""


class Comm(Protocol):
    """What the model needs of a group of ranks. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_reduce(self, array: F32) -> F32:
        """The sum of every rank's `array` (same shape everywhere), with the same bits on every rank."""
        ...

    def all_gather(self, array: F32) -> F32:
        """Every rank's `array` (same shape everywhere) along a new first axis: `[size, ...]`."""
        ...


class SoloComm:
    """The group of a single rank: everything is already there."""

    rank = 0
    size = 1

    def all_reduce(self, array: F32) -> F32:
        """Returns `array`."""
        return array

    def all_gather(self, array: F32) -> F32:
        """Returns `array` as `[1, ...]`."""
        return array[np.newaxis]


class LocalComm:
    """One rank's end of a star of Unix sockets.

    Made by `local_group` (threads, or processes that get the object by fork or pickled by
    `multiprocessing`), or by `from_filenos` (processes started with `pass_fds`).

    Args:
        rank: this rank.
        size: number of ranks, at least 2.
        sockets: on rank 0 one for each of the ranks 1, 2, ... in order; elsewhere the one to rank 0.
        timeout: seconds to wait for another rank before it counts as hung.

    Raises:
        ValueError: if rank, size and the number of sockets don't fit.
    """

    def __init__(self, rank: int, size: int, sockets: Sequence[socket.socket], timeout: float = 60.0) -> None:
        if size < 2 or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size} is no rank of a group")
        needed = size - 1 if rank == 0 else 1
        if len(sockets) != needed:
            raise ValueError(f"rank {rank} of {size} needs {needed} sockets, got {len(sockets)}")
        self.rank = rank
        self.size = size
        self._sockets = list(sockets)
        self._timeout = timeout
        self._number = 0
        self._closed = False
        for sock in self._sockets:
            sock.settimeout(timeout)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    @classmethod
    def from_filenos(cls, rank: int, size: int, filenos: Sequence[int], timeout: float = 60.0) -> LocalComm:
        """Takes over descriptors that came from `filenos()` of a group made in the parent process."""
        return cls(rank, size, [socket.socket(fileno=fileno) for fileno in filenos], timeout)

    def filenos(self) -> list[int]:
        """The descriptors of this end, for `pass_fds` and then `from_filenos` in the child.

        Close this object in the parent once the child runs, else a dead child looks alive to the others.
        """
        return [sock.fileno() for sock in self._sockets]

    def all_reduce(self, array: F32) -> F32:
        """See `Comm.all_reduce`.

        Raises:
            CommError: if another rank died, hung or is out of step.
        """
        array = np.ascontiguousarray(array, dtype=np.float32)
        try:
            if self.rank:
                return self._ask(_REDUCE, array, array.shape)
            total: F32 = array.copy()
            part = np.empty_like(array)
            for peer in range(1, self.size):
                self._receive(peer, _REDUCE, part)
                total += part
            self._answer(_REDUCE, total)
            return total
        except BaseException:
            self.close()
            raise

    def all_gather(self, array: F32) -> F32:
        """See `Comm.all_gather`.

        Raises:
            CommError: if another rank died, hung or is out of step.
        """
        array = np.ascontiguousarray(array, dtype=np.float32)
        shape = (self.size, *array.shape)
        try:
            if self.rank:
                return self._ask(_GATHER, array, shape)
            parts = np.empty(shape, dtype=np.float32)
            parts[0] = array
            for peer in range(1, self.size):
                self._receive(peer, _GATHER, parts[peer])
            self._answer(_GATHER, parts)
            return parts
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leaves the group; the other ranks get a `CommError` from what they do next. Idempotent."""
        self._closed = True
        for sock in self._sockets:
            sock.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, because a socket that crosses processes loses its timeout.
        return LocalComm, (self.rank, self.size, self._sockets, self._timeout)

    def __enter__(self) -> LocalComm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, operation: int, array: F32, shape: tuple[int, ...]) -> F32:
        self._send(0, operation, array)
        result = np.empty(shape, dtype=np.float32)
        self._receive(0, operation, result)
        self._number += 1
        return result

    def _answer(self, operation: int, array: F32) -> None:
        for peer in range(1, self.size):
            self._send(peer, operation, array)
        self._number += 1

    def _socket(self, peer: int) -> socket.socket:
        return self._sockets[peer - 1 if self.rank == 0 else 0]

    def _send(self, peer: int, operation: int, array: F32) -> None:
        sock = self._socket(peer)
        try:
            sock.sendall(_HEADER.pack(operation, self._number, array.nbytes))
            sock.sendall(_bytes(array))
        except OSError as err:
            raise self._lost(peer, err) from err

    def _receive(self, peer: int, operation: int, into: F32) -> None:
        header = bytearray(_HEADER.size)
        self._fill(peer, memoryview(header))
        got = _HEADER.unpack(header)
        if got != (operation, self._number, into.nbytes):
            raise CommError(
                f"rank {peer} is out of step with rank {self.rank}: its (operation, number, bytes) is {got}, "
                f"{(operation, self._number, into.nbytes)} was due"
            )
        self._fill(peer, _bytes(into))

    def _fill(self, peer: int, into: memoryview) -> None:
        sock = self._socket(peer)
        while into:
            try:
                count = sock.recv_into(into)
            except OSError as err:
                raise self._lost(peer, err) from err
            if count == 0:
                raise CommError(f"rank {peer} is gone: it closed its connection to rank {self.rank}")
            into = into[count:]

    def _lost(self, peer: int, err: OSError) -> CommError:
        if self._closed:
            return CommError(f"rank {self.rank} has left the group, after an error or by close()")
        if isinstance(err, TimeoutError):
            return CommError(f"rank {peer} did not answer rank {self.rank} within {self._timeout} s")
        return CommError(f"rank {peer} is gone: {err}")


def _bytes(array: F32) -> memoryview:
    # Flat bytes: a socket takes a memoryview's length for its size in bytes.
    return array.reshape(-1).view(np.uint8).data


def local_group(size: int, timeout: float = 60.0) -> list[LocalComm]:
    """A group of ranks on this host: element `r` is rank `r`'s end.

    Args:
        size: number of ranks, at least 2 (a single rank uses `SoloComm`).
        timeout: seconds after which a silent rank counts as hung.
    """
    if size < 2:
        raise ValueError(f"a group has at least 2 ranks, got {size}")
    pairs = [socket.socketpair() for _ in range(size - 1)]
    ends = [LocalComm(0, size, [hub for hub, _ in pairs], timeout)]
    return ends + [LocalComm(rank, size, [pairs[rank - 1][1]], timeout) for rank in range(1, size)]
