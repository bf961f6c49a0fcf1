"""`kvxfer demo`: prefill and decode processes hand off the KV cache of a real model."""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import time
from typing import Any

from kvxfer.cli._errors import CommandError
from kvxfer.cli._text import print_json, progress, quantity, size, table
from kvxfer.cli._workers import Workers
from kvxfer.demo import DemoUnavailable, blas_env

__all__ = ["PROMPT", "run"]

PROMPT = (
    "Summarize this in one sentence: A large language model works in two phases. In the prefill phase it "
    "reads the whole prompt at once and stores keys and values for every token in a cache. In the decode "
    "phase it writes the answer one token at a time, and every new token reads the whole cache. Prefill is "
    "limited by computing power and decode by memory speed, so some servers run the two phases on different "
    "machines and send the cache from one to the other."
)
PAGE_TOKENS = 16

_RANK = "kvxfer.cli._demo_rank"
_REFERENCE = "kvxfer.cli._demo_reference"
# A step that takes longer has gone wrong, on the slowest machine that the demo is meant for.
_STEP_S = 120.0


def _check_packages() -> None:
    """Says at once what is missing, and not after half of the processes have started."""
    from importlib.util import find_spec

    from kvxfer.demo.weights import find_model_file

    find_model_file()
    for package in ("gguf", "tokenizers"):
        if find_spec(package) is None:
            raise DemoUnavailable(f"the demo needs package {package}: pip install {package}")


def _start_ranks(
    workers: Workers, side: str, count: int, options: argparse.Namespace, shared: dict[str, Any]
) -> list[str]:
    """Starts one engine's ranks, with sockets between them."""
    from kvxfer.demo.comm import local_group

    names = [f"{side}-{rank}" for rank in range(count)]
    group = local_group(count, timeout=_STEP_S) if count > 1 else []
    for rank, name in enumerate(names):
        fds = group[rank].filenos() if group else []
        config = {
            **shared,
            "side": side,
            "name": name,
            "tp_rank": rank,
            "tp_size": count,
            "comm_fds": fds,
            "comm_timeout": _STEP_S,
            "fabric": options.fabric,
            "chunk": options.chunk,
            "max_tokens": options.max_tokens,
            "page_tokens": getattr(options, f"{side}_page_tokens"),
            "order": getattr(options, f"{side}_order"),
        }
        workers.start(name, _RANK, config, env=blas_env(1), pass_fds=fds)
    for end in group:
        # Else a rank that dies looks alive to the others.
        end.close()
    return names


def _hand_off(workers: Workers, options: argparse.Namespace) -> dict[str, Any]:
    """Runs everything; what was found, ready for `--json`."""
    began = time.monotonic()
    prompt = PROMPT if options.prompt is None else options.prompt
    shared = {"room": secrets.randbits(63), "secret": secrets.token_hex(32)}
    progress(
        f"loading SmolLM2-135M: prefill tp {options.prefill_tp}, decode tp {options.decode_tp}, and one "
        "process alone"
    )
    prefill = _start_ranks(workers, "prefill", options.prefill_tp, options, shared)
    decode = _start_ranks(workers, "decode", options.decode_tp, options, shared)
    ranks = prefill + decode
    config = {
        "prompt": prompt,
        "chunk": options.chunk,
        "max_tokens": options.max_tokens,
        "page_tokens": PAGE_TOKENS,
    }
    workers.start("reference", _REFERENCE, config, env=blas_env(1))
    asked = workers.receive(["reference"], "prompt", _STEP_S)["reference"]
    loaded = workers.receive(ranks, "loaded", _STEP_S)
    workers.receive(["reference"], "loaded", _STEP_S)

    progress(
        f"{quantity(len(ranks), 'agent')} over {options.fabric}; the prompt has {len(asked['tokens'])} tokens"
    )
    connecting = time.monotonic()
    workers.send(ranks, tokens=asked["tokens"], eos=asked["eos"])
    directory = workers.receive(prefill[:1], "listening", _STEP_S)[prefill[0]]["address"]
    workers.send(prefill[1:] + decode, directory=directory)
    workers.receive(ranks[1:], "listening", _STEP_S)
    connected = time.monotonic()

    progress("prefill computes and pushes, decode waits for the pages and answers")
    workers.send(ranks, start=True)
    pushed = workers.receive(prefill, "pushed", _STEP_S)
    answers = workers.receive(decode, "answered", _STEP_S)
    workers.send(ranks, close=True)
    workers.finish(ranks, _STEP_S)

    progress("one process answers alone, to compare")
    workers.send(["reference"], start=True)
    alone = workers.receive(["reference"], "answered", _STEP_S)["reference"]
    workers.finish(["reference"], _STEP_S)

    first, *others = (answers[name] for name in decode)
    if any(other["tokens"] != first["tokens"] for other in others):
        raise CommandError(
            "the decode ranks disagree on the answer: " + str([answers[d]["tokens"] for d in decode])
        )
    last_push = max(message["last_push_ns"] for message in pushed.values())
    arrived = max(message["success_ns"] for message in answers.values())
    pushes = [ns for message in pushed.values() for ns in message["push_ns"]]
    expects = [message["expect_ns"] for message in answers.values()]
    return {
        "tokens_identical": first["tokens"] == alone["tokens"],
        "tokens": first["tokens"],
        "text": first["text"],
        "reference_tokens": alone["tokens"],
        "reference_text": alone["text"],
        "prompt_tokens": len(asked["tokens"]),
        "bytes": sum(message["bytes"] for message in answers.values()),
        "pages": first["pages"],
        "page_tokens": options.decode_page_tokens,
        "prefill_page_tokens": options.prefill_page_tokens,
        "prefill_order": options.prefill_order,
        "decode_order": options.decode_order,
        "stages_ms": {
            "load": max(message["ms"] for message in loaded.values()),
            "agents": (connected - connecting) * 1e3,
            "prefill": max(message["prefill_ms"] for message in pushed.values()),
            "handoff": (arrived - last_push) / 1e6,
            "decode": max(message["decode_ms"] for message in answers.values()),
            "reference_prefill": alone["prefill_ms"],
            "reference_decode": alone["decode_ms"],
            "total": (time.monotonic() - began) * 1e3,
        },
        "pushes": len(pushes),
        "push_us_p50": statistics.median(pushes) / 1e3,
        "expects": len(expects),
        "expect_us_p50": statistics.median(expects) / 1e3,
        "processes": len(ranks) + 1,
        "cores": len(os.sched_getaffinity(0)),
        "fabric": options.fabric,
        "prefill_tp": options.prefill_tp,
        "decode_tp": options.decode_tp,
    }


_STAGES = {
    "load": "every process reads its share of the model",
    "agents": "pools allocated, agents started and registered",
    "prefill": "the prompt computed, pages pushed layer by layer meanwhile",
    "handoff": "from the last push until decode has everything",
    "decode": "the answer written from the pages that arrived",
    "reference_prefill": "one process alone: the prompt",
    "reference_decode": "one process alone: the answer",
    "total": "all of it, as you waited for it",
}


def _show(found: dict[str, Any]) -> None:
    if found["tokens_identical"]:
        verdict = f"yes: all {len(found['tokens'])} tokens equal those of one process that did it all"
    else:
        verdict = "NO: one process alone wrote " + repr(found["reference_text"])
    push, expect = found["push_us_p50"], found["expect_us_p50"]
    rows = [
        ("identical", verdict),
        (
            "hand-off",
            f"prefill -> decode {found['prefill_tp']} -> {found['decode_tp']} over {found['fabric']}, "
            f"{found['prefill_order']} pages of {found['prefill_page_tokens']} tokens to "
            f"{found['decode_order']} pages of {found['page_tokens']}",
        ),
        (
            "moved",
            f"{size(found['bytes'])} ({found['bytes']} bytes) for {found['prompt_tokens']} tokens in "
            f"{quantity(found['pages'], 'page')} of {found['page_tokens']} tokens",
        ),
        ("push", f"{push:.1f} us of the caller's time, the median of {quantity(found['pushes'], 'call')}"),
        ("expect", f"{expect:.1f} us, the median of {quantity(found['expects'], 'call')}, one a rank"),
        (
            "",
            f"({found['processes']} processes on {quantity(found['cores'], 'core')} take each other's time; "
            "`kvxfer bench post` measures both alone)",
        ),
    ]
    print(found["text"].strip())
    print()
    print(table(rows))
    print()
    print(table((stage, f"{found['stages_ms'][stage]:9.1f} ms", text) for stage, text in _STAGES.items()))


def run(options: argparse.Namespace) -> int:
    """The command; 1 if the answers differ."""
    try:
        _check_packages()
    except DemoUnavailable as error:
        raise CommandError(str(error)) from error
    with Workers(on_progress=lambda name, text: progress(f"{name}: {text}")) as workers:
        found = _hand_off(workers, options)
    if options.json:
        print_json(found)
    else:
        _show(found)
    return 0 if found["tokens_identical"] else 1
