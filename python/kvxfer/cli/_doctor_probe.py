"""One of the two processes of `kvxfer doctor`'s test of one UCX transport: are its writes one-sided?

The writer writes and flushes, and the target leaves UCX alone until it has looked at its memory.
"""

from __future__ import annotations

import time
from typing import Any

import kvxfer as kx
from kvxfer import _kvxfer
from kvxfer._memory import ucx_wheel_dir
from kvxfer.cli._worker import Link, run

_CONNECT_S = 5.0
_SETTLE_S = 0.1
# Region 0 is memory that UCX allocated, region 1 memory that it did not; each with the byte to write. The
# first write into each only settles things: with some transports it needs both sides, and later ones do not.
_WRITES = ((0, 0xA1), (1, 0xA2), (0, 0xA3), (1, 0xA4))


def _progress_a_while(target: _kvxfer._UcxProbeTarget) -> None:
    """An endpoint goes on choosing its lanes after it is connected, and each choice needs both sides."""
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        target.progress()


def _target(link: Link, tls: str) -> None:
    target = _kvxfer._UcxProbeTarget(tls, ucx_wheel_dir())
    link.send("address", address=target.address().hex())
    target.connect(bytes.fromhex(link.receive()["address"]))
    deadline = time.monotonic() + _CONNECT_S
    while not link.waiting():
        target.progress()
        if time.monotonic() > deadline:
            raise kx.FabricError(f"no connection over {tls} in {_CONNECT_S:.0f} s")
    link.receive()
    _progress_a_while(target)
    link.send("idle")
    for region, value in _WRITES:
        # Blocks in here, so that nothing in this process can help UCX along.
        link.receive()
        arrived = target.arrived(value)[region]
        # A write that needed this side can now end, so that the next one is tested alone.
        _progress_a_while(target)
        link.send("looked", arrived=arrived)
    link.receive()


def _writer(link: Link, tls: str) -> None:
    writer = _kvxfer._UcxProbeWriter(tls, ucx_wheel_dir())
    link.send("address", address=writer.address().hex())
    writer.connect(bytes.fromhex(link.receive()["address"]))
    deadline = time.monotonic() + _CONNECT_S
    while not writer.progress():
        if time.monotonic() > deadline:
            raise kx.FabricError(f"no connection over {tls} in {_CONNECT_S:.0f} s")
    link.send("connected", transports=writer.transports())
    for region, value in _WRITES:
        # What is still to be settled with the other side, or to be sent to it, goes on until the next order.
        while not link.waiting():
            writer.progress()
        link.receive()
        link.send("wrote", flushed=writer.write(region, value))
    while not link.waiting():
        writer.progress()
    link.receive()


def _work(link: Link, config: dict[str, Any]) -> None:
    (_target if config["side"] == "target" else _writer)(link, config["tls"])


if __name__ == "__main__":
    run(_work, (kx.KvxferError,))
