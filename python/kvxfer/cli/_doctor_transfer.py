"""One of the two processes of `kvxfer doctor`'s speed test of a fabric."""

from __future__ import annotations

import time
from typing import Any

import kvxfer as kx
from kvxfer.cli._loopback import End
from kvxfer.cli._worker import Link, run


def _work(link: Link, config: dict[str, Any]) -> None:
    end = End(
        config["side"], config["fabric"], config["tokens"], pooled=config["pooled"], secret=config["secret"]
    )
    with end.agent as agent:
        pushes = config["side"] == "prefill"
        if pushes:
            end.fill()
        else:
            end.touch()
        link.send("listening", address=agent.address)
        source = link.receive()["source"]
        times: list[int] = []
        moved = 0
        for room in config["rooms"]:
            if pushes:
                end.await_grants([room])
                times.append(time.monotonic_ns() // 1000)
                agent.push(room, end.sets[0], tokens=end.tokens)
                end.drain([room])
            else:
                agent.expect(room, end.sets[0], tokens=end.tokens, source=source)
                event = end.drain([room])[0]
                times.append(event.stats.at_us)
                moved = event.stats.bytes
        link.send("moved", times_us=times, bytes=moved, right=pushes or end.is_filled())
        link.receive()


if __name__ == "__main__":
    run(_work, (kx.KvxferError,))
