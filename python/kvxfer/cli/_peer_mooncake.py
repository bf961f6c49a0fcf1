"""Mooncake's transfer engine over TCP, by its synchronous calls.

Those that return at once ended the process with a segmentation fault here (0.3.13, one piece of 4 KiB), so
what a request takes is the caller's time as a whole; engines have threads for it.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np

from kvxfer.cli._bench_rank import pieces_of
from kvxfer.cli._peer_base import PAGE_TOKENS, End, Turn

__all__ = ["MooncakeEnd"]

# Its TCP transport refuses batches of several thousand pieces: "TCP lane queue-full rejection" for 4,000.
_BATCH = 1000


class MooncakeEnd(End):
    """One transfer engine; metadata goes from one to the other, without a server."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        from mooncake.engine import TransferEngine

        self.version = version("mooncake-transfer-engine-non-cuda")
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake's engine did not start")
        for region in self.regions:
            if self._engine.register_memory(region.ctypes.data, region.nbytes):
                raise RuntimeError("Mooncake did not register the memory")

    def info(self) -> dict[str, Any]:
        return {"name": f"127.0.0.1:{self._engine.get_rpc_port()}", "bases": self.bases.tolist()}

    def connect(self, other: dict[str, Any]) -> None:
        self._other, self._there = other["name"], np.array(other["bases"], np.uint64)

    def post(self, turn: Turn) -> None:
        to, source, lens = pieces_of(turn.to, turn.source, len(turn.to) * PAGE_TOKENS, PAGE_TOKENS)
        here = (self.bases[:, np.newaxis] + source).reshape(-1).tolist()
        there = (self._there[:, np.newaxis] + to).reshape(-1).tolist()
        sizes = np.tile(lens, len(self.bases)).tolist()
        for i in range(0, len(here), _BATCH):
            end = i + _BATCH
            if self._engine.batch_transfer_sync_write(self._other, here[i:end], there[i:end], sizes[i:end]):
                raise RuntimeError("Mooncake says that the transfer failed")

    def finish(self, turn: Turn) -> None:
        """Nothing is left to do."""
