"""The tests of `kvxfer doctor`: two processes each, over every fabric and every UCX transport."""

from __future__ import annotations

import secrets
import statistics
from typing import Any

from kvxfer.cli._errors import CommandError
from kvxfer.cli._workers import Workers

__all__ = ["look", "probe", "transfer"]

# 64 layers of K and V, 128 pages of 4 KiB each: 64 MiB.
_TOKENS = 2048
_ROUNDS = 8
_STEP_S = 40.0
_PROBE_S = 20.0

Found = dict[str, Any]


def look(what: str) -> Found:
    """What a process of its own finds out about `ucx` or `gpus`.

    Raises:
        CommandError: with the reason, if it finds nothing.
    """
    with Workers() as workers:
        workers.start(what, "kvxfer.cli._doctor_look", {"what": what})
        found: Found = workers.receive([what], "found", _STEP_S)[what]["found"]
        workers.finish([what], _STEP_S)
    return found


def transfer(fabric: str, *, pooled: bool = True) -> Found:
    """Moves 64 MiB in 4 KiB pieces a few times: `ok`, `gbytes_per_s`, and `error` if it is not ok.

    Timed from the call of `push` until decode's `Success`; the median, without the first, which meets cold
    memory.
    """
    sides = ("prefill", "decode")
    config = {
        "fabric": fabric,
        "tokens": _TOKENS,
        "pooled": pooled,
        "secret": secrets.token_hex(32),
        "rooms": [secrets.randbits(63) for _ in range(_ROUNDS)],
    }
    try:
        with Workers() as workers:
            for side in sides:
                workers.start(side, "kvxfer.cli._doctor_transfer", {**config, "side": side})
            listening = workers.receive(sides, "listening", _STEP_S)
            workers.send(sides, source=listening["prefill"]["address"])
            moved = workers.receive(sides, "moved", _STEP_S)
            workers.send(sides, close=True)
            workers.finish(sides, _STEP_S)
    except CommandError as error:
        return {"ok": False, "gbytes_per_s": None, "error": str(error)}
    pairs = zip(moved["prefill"]["times_us"], moved["decode"]["times_us"], strict=True)
    seconds = statistics.median([(arrived - pushed) / 1e6 for pushed, arrived in pairs][1:])
    right: bool = moved["decode"]["right"]
    return {
        "ok": right,
        "gbytes_per_s": moved["decode"]["bytes"] / seconds / 1e9,
        "bytes": moved["decode"]["bytes"],
        "error": None if right else "the bytes that arrived are not those that were sent",
    }


def _probe(tls: str) -> Found:
    sides = ("target", "writer")
    arrived = []
    with Workers() as workers:
        for side in sides:
            workers.start(side, "kvxfer.cli._doctor_probe", {"side": side, "tls": tls})
        addresses = workers.receive(sides, "address", _PROBE_S)
        workers.send(["target"], address=addresses["writer"]["address"])
        workers.send(["writer"], address=addresses["target"]["address"])
        lanes: list[str] = workers.receive(["writer"], "connected", _PROBE_S)["writer"]["transports"]
        workers.send(["target"], connected=True)
        workers.receive(["target"], "idle", _PROBE_S)
        # Two rounds of two kinds of memory; `_doctor_probe` says why.
        for _ in range(4):
            workers.send(["writer"], write=True)
            flushed = workers.receive(["writer"], "wrote", _PROBE_S)["writer"]["flushed"]
            workers.send(["target"], look=True)
            looked = workers.receive(["target"], "looked", _PROBE_S)["target"]["arrived"]
            arrived.append(bool(flushed and looked))
        # The writer first: a target that is gone would be an error to it.
        for side in reversed(sides):
            workers.send([side], end=True)
            workers.finish([side], _PROBE_S)
    return {"tls": tls, "lanes": lanes, "ucx_memory": arrived[2], "other_memory": arrived[3], "error": None}


def probe(transport: str) -> Found:
    """Whether writes over a UCX transport are one-sided: into UCX's own memory, and into other memory."""
    # Some transports only write, and need another one to get in contact.
    found: Found = {}
    for tls in (transport, f"{transport},tcp"):
        try:
            return _probe(tls)
        except CommandError as error:
            found = {"tls": tls, "lanes": [], "ucx_memory": False, "other_memory": False, "error": str(error)}
    return found
