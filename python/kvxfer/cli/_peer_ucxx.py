"""UCX's own Python binding. It has no puts: pages are packed, sent as one message, and unpacked."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import numpy as np

from kvxfer.cli._loopback import ROOM_S
from kvxfer.cli._peer_base import End, Turn, now_us

__all__ = ["UcxxEnd"]

_LOOK_S = 50e-6


class UcxxEnd(End):
    """One worker whose thread makes the progress."""

    takes_part = True

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        import ucxx
        from ucxx._lib import libucxx

        self.version = f"{version('ucxx-cu12')} on UCX {'.'.join(map(str, ucxx.get_ucx_version()))}"
        self._api = libucxx
        self._worker = libucxx.UCXWorker(
            libucxx.UCXContext(feature_flags=(libucxx.Feature.TAG, libucxx.Feature.WAKEUP))
        )
        self._worker.start_progress_thread(polling_mode=False)
        self._message = np.empty(0, np.uint8)
        self._request: Any = None

    def info(self) -> dict[str, Any]:
        return {"address": self._worker.address.tobytes().hex()}

    def connect(self, other: dict[str, Any]) -> None:
        # With error handling UCX leaves shared memory out, unless it is told otherwise.
        address = self._api.UCXAddress.create_from_buffer(bytearray.fromhex(other["address"]))
        self._endpoint = self._api.UCXEndpoint.create_from_worker_address(
            self._worker, address, endpoint_error_handling=False
        )

    def _tag(self, turn: Turn) -> Any:
        return self._api.UCXXTag(turn.room & 0xFFFF_FFFF)

    def _views(self, pages: int) -> Any:
        size = len(self.regions) * pages * self.page_bytes
        if self._message.nbytes != size:
            self._message = np.zeros(size, np.uint8)
        return self._message.reshape(len(self.regions), pages, self.page_bytes)

    def arm(self, turn: Turn) -> None:
        self._views(len(turn.to))
        self._request = self._endpoint.tag_recv(self._array(), self._tag(turn))

    def _array(self) -> Any:
        from ucxx._lib.arr import Array

        return Array(self._message)

    def post(self, turn: Turn) -> None:
        packed = self._views(len(turn.source))
        for region, place in zip(self.regions, packed, strict=True):
            np.take(region.reshape(-1, self.page_bytes), turn.source, axis=0, out=place, mode="clip")
        self._request = self._endpoint.tag_send(self._array(), self._tag(turn))

    def _wait(self) -> None:
        deadline = time.monotonic() + ROOM_S
        while not self._request.completed:
            if time.monotonic() > deadline:
                raise RuntimeError(f"ucxx has not ended a message in {ROOM_S:.0f} s")
            time.sleep(_LOOK_S)
        self._request.check_error()

    def finish(self, turn: Turn) -> None:
        self._wait()

    def is_here(self) -> bool:
        return bool(self._request.completed)

    def settle(self, turn: Turn) -> float | None:
        self._wait()
        packed = self._views(len(turn.to))
        for region, place in zip(self.regions, packed, strict=True):
            region.reshape(-1, self.page_bytes)[turn.to] = place
        return now_us()
