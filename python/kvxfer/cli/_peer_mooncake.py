"""Mooncake's transfer engine over TCP.

Its TCP path takes some 1,000 pieces at a time, so that of more the caller waits for all but the last.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np

from kvxfer.cli._bench_rank import pieces_of
from kvxfer.cli._peer_base import PAGE_TOKENS, End, Turn

__all__ = ["MooncakeEnd"]

# Batches of several thousand pieces are refused ("TCP lane queue-full rejection"), and at times is a second
# batch of 1,000 while the first is under way.
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
        self._batch = 0
        for i in range(0, len(here), _BATCH):
            if i:
                self.finish(turn)
            end = i + _BATCH
            self._batch = self._engine.batch_transfer_async_write(
                self._other, here[i:end], there[i:end], sizes[i:end]
            )
            if self._batch == 0:
                raise RuntimeError("Mooncake refused a batch")

    def finish(self, turn: Turn) -> None:
        # It may be asked once: it waits, and then the batch is gone.
        if self._engine.get_batch_transfer_status([self._batch]):
            raise RuntimeError("Mooncake says that the transfer failed")
