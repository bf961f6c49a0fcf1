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
# Memory that UCX allocated, and memory that it did not.
_REGIONS = (0, 1)


def _value(region: int) -> int:
    return 0xA5 - region


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
    link.send("idle")
    for region in _REGIONS:
        # Blocks in here, so that nothing in this process can help UCX along.
        link.receive()
        arrived = target.arrived(_value(region))[region]
        # A write that needed this side can now end, so that the next one is tested alone.
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            target.progress()
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
    for region in _REGIONS:
        link.receive()
        link.send("wrote", flushed=writer.write(region, _value(region)))
        while not link.waiting():
            writer.progress()
    link.receive()


def _work(link: Link, config: dict[str, Any]) -> None:
    (_target if config["side"] == "target" else _writer)(link, config["tls"])


if __name__ == "__main__":
    run(_work, (kx.KvxferError,))
