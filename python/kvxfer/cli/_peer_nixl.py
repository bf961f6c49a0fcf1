"""NIXL, as it comes or with prepared lists; the bytes are written by the source, or read by the target."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np

from kvxfer.cli._bench_rank import pieces_of
from kvxfer.cli._peer_base import PAGE_TOKENS, End, Turn

__all__ = ["NixlEnd"]


def _joined(bases: Any, offsets: Any, lens: Any) -> Any:
    rows = np.zeros((len(bases), len(offsets), 3), np.uint64)
    rows[:, :, 0] = bases[:, np.newaxis] + offsets
    rows[:, :, 1] = lens
    return rows.reshape(-1, 3)


class NixlEnd(End):
    """One NIXL agent with its UCX backend.

    Args:
        prepared: whether the lists of all pages are prepared once, and a request only names indices.
        reads: whether the target reads, instead of the source writing; `post` and `finish` are then its.
        rest: as in `End`.
    """

    def __init__(self, *rest: Any, prepared: bool, reads: bool = False) -> None:
        super().__init__(*rest)
        import nixl_cu12 as nixl

        self.version = version("nixl-cu12")
        self.prepared, self.operation = prepared, "READ" if reads else "WRITE"
        self._agent = nixl.nixl_agent(self.side, nixl.nixl_agent_config(backends=["UCX"]))
        regions = [(region.ctypes.data, region.nbytes, 0, "") for region in self.regions]
        if not self._agent.register_memory(regions, "DRAM"):
            raise RuntimeError("NIXL did not register the memory")
        self._all = np.arange(self.pages, dtype=np.int32)
        self._handle: Any = None

    def info(self) -> dict[str, Any]:
        return {"metadata": self._agent.get_agent_metadata().hex(), "bases": self.bases.tolist()}

    def connect(self, other: dict[str, Any]) -> None:
        self._other = self._agent.add_remote_agent(bytes.fromhex(other["metadata"]))
        if isinstance(self._other, bytes):
            self._other = self._other.decode()
        self._there = np.array(other["bases"], np.uint64)
        if self.prepared:
            self._ours = self._agent.prep_xfer_dlist(
                "NIXL_INIT_AGENT", self._rows(self.bases, self._all), "DRAM"
            )
            self._theirs = self._agent.prep_xfer_dlist(
                self._other, self._rows(self._there, self._all), "DRAM"
            )

    def _rows(self, bases: Any, ids: Any) -> Any:
        rows = np.zeros((len(bases) * len(ids), 3), np.uint64)
        rows[:, 0] = self.addresses(bases, ids)
        rows[:, 1] = self.page_bytes
        return rows

    def _indices(self, ids: Any) -> Any:
        first = np.arange(len(self.bases), dtype=np.int32) * np.int32(self.pages)
        return (first[:, np.newaxis] + ids).reshape(-1)

    def post(self, turn: Turn) -> None:
        agent = self._agent
        here, there = (turn.to, turn.source) if self.operation == "READ" else (turn.source, turn.to)
        if self.prepared:
            self._handle = agent.make_prepped_xfer(
                self.operation, self._ours, self._indices(here), self._theirs, self._indices(there)
            )
        else:
            # Neighbours are joined, as engines do; with indices into prepared lists NIXL joins them itself.
            to, source, lens = pieces_of(here, there, len(here) * PAGE_TOKENS, PAGE_TOKENS)
            ours = agent.get_xfer_descs(_joined(self.bases, to, lens), "DRAM")
            theirs = agent.get_xfer_descs(_joined(self._there, source, lens), "DRAM")
            self._handle = agent.initialize_xfer(self.operation, ours, theirs, self._other)
        self._state = agent.transfer(self._handle)

    def is_done(self) -> bool:
        """Whether what was posted last has ended; raises if it failed."""
        if self._state != "DONE":
            self._state = self._agent.check_xfer_state(self._handle)
        if self._state == "ERR":
            raise RuntimeError("NIXL says that the transfer failed")
        return bool(self._state == "DONE")

    def finish(self, turn: Turn) -> None:
        while not self.is_done():
            pass
        self.release()

    def release(self) -> None:
        """Lets go of what was posted last, which has ended."""
        if self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
            self._handle = None

    @property
    def posted(self) -> bool:
        """Whether something was posted and not let go of."""
        return self._handle is not None
