"""One page about a split server: the numbers, the one that bites, and what to change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from kvxfer.errors import BadArgument
from kvxfer.plan import _formulas as f
from kvxfer.plan._shape import ModelShape

__all__ = ["LINK_LIMIT", "LOOP_LIMIT", "Capacity", "Limit", "capacity"]

LINK_LIMIT = 0.8
"""The part of a link's time that may be used on average, as for slots."""
LOOP_LIMIT = 0.1
"""The part of the decode loop that posting may take before it is worth a change: in the field, moving the
posting of 2,000-token prompts to a thread took 6.14 to 5.52 ms a token, a tenth."""


@dataclass(frozen=True)
class Limit:
    """Something that can run out."""

    name: str
    used: float
    """How much of it is used, as a part of what there is."""
    limit: float
    """How much of it should be, at most."""
    text: str
    """The same in words."""
    changes: tuple[str, ...] = ()
    """What to do about it, what helps most first."""

    @property
    def bites(self) -> bool:
        """Whether more is used than should be."""
        return self.used > self.limit

    @property
    def runs_out(self) -> bool:
        """Whether more is asked for than there is: then a queue grows without end."""
        return self.used >= 1 and self.name != "first token"


@dataclass(frozen=True)
class Capacity:
    """What `capacity` has found; all of it is in `as_dict`."""

    numbers: dict[str, Any]
    limits: tuple[Limit, ...]

    @property
    def bites(self) -> Limit | None:
        """What bites first: what runs out, before what is only too full; None if nothing does."""
        worst = max(self.limits, key=lambda x: (x.bites, x.runs_out, x.used / x.limit))
        return worst if worst.bites else None

    @property
    def verdict(self) -> str:
        """What bites, and what to change; a sentence or two."""
        worst = self.bites
        if worst is None:
            nearest = max(self.limits, key=lambda x: x.used / x.limit)
            return f"nothing bites. The nearest to its limit: {nearest.text}"
        change = f" Change: {'; or '.join(worst.changes)}." if worst.changes else ""
        others = [x.name for x in self.limits if x.bites and x is not worst]
        also = f" Too full as well: {', '.join(others)}." if others else ""
        return f"{worst.name}: {worst.text}.{change}{also}"

    def as_dict(self) -> dict[str, Any]:
        """Everything, for `--json`."""
        worst = self.bites
        return {
            **self.numbers,
            "limits": [
                {"name": x.name, "used": x.used, "limit": x.limit, "text": x.text, "changes": list(x.changes)}
                for x in self.limits
            ],
            "bites": None if worst is None else worst.name,
            "verdict": self.verdict,
        }


def percent(part: float) -> str:
    """`0.118` is `11.8 %`."""
    return f"{part * 100:.1f} %" if part < 1 else f"{part * 100:.0f} %"


def gib(nbytes: float) -> str:
    """Bytes, in GiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes < 10 * 2**30 else f"{nbytes / 2**30:.1f} GiB"


def _slots_limit(
    n: dict[str, Any], slots: int, out_tokens: int, rank_room: int, kv_memory: int | None
) -> Limit:
    held, limit = n["slots_held"], f.SLOTS_LIMIT
    changes = []
    if n["posting"] == "loop" and n["loop_lost_fraction"] < 1:
        after = n["slots_held_posting_off_loop"]
        changes.append(
            f"take the posting off the decode loop (kvxfer does): {n['tpot_ms']:.1f} ms a token becomes "
            f"{n['tpot_ms_posting_off_loop']:.1f}, and {after:.1f} slots are held"
        )
        held_then = after
    else:
        held_then = held
    wanted = n["slots_wanted"] = f.slots_needed(held_then)
    if wanted > slots:
        need = wanted * rank_room
        text = f"{wanted} slots, of which {held_then:.1f} are under {limit * 100:.0f} %"
        if kv_memory is None:
            changes.append(f"{text}, if each rank has {gib(need)} of KV memory for them (--kv-memory-gib)")
        elif need <= kv_memory:
            changes.append(f"{text}; a rank's {gib(kv_memory)} of KV memory hold them ({gib(need)})")
        else:
            changes.append(
                f"more decode servers, and not more slots: {wanted} slots need {gib(need)} of KV memory on "
                "a rank, "
                f"and there are {gib(kv_memory)}"
            )
    changes.append(
        f"admit at most {n['qps_at_slots_limit']:.2f} requests/s to this decode server, or answers of "
        "fewer tokens"
    )
    return Limit(
        "slots",
        held / slots,
        limit,
        f"{held:.1f} of {slots} decode slots are held on average ({percent(held / slots)}); keep it under "
        f"{limit * 100:.0f} %",
        tuple(changes),
    )


def _link_limit(used: float, transfer: float, qps: float) -> Limit:
    return Limit(
        "link",
        used,
        LINK_LIMIT,
        f"{percent(used)} of each rank's link is used ({qps:g} requests/s x {transfer:.1f} ms); keep it "
        "under "
        f"{LINK_LIMIT * 100:.0f} %",
        (
            "faster links, or one for each rank",
            "fp8 KV (--kv-dtype fp8)",
            "send only what decode has not cached (start=)",
            "route by bytes and not by requests",
        ),
    )


def _loop_limit(lost: float, posting_ms: float, qps: float) -> Limit:
    return Limit(
        "loop",
        lost,
        LOOP_LIMIT,
        f"{percent(lost)} of the decode loop goes into posting ({qps:g} requests/s x {posting_ms:.1f} ms)",
        (
            "take the posting off the loop (kvxfer: `expect` and `poll` are microseconds)",
            "longer pages, fewer pieces",
        ),
    )


def _memory_limit(slots: int, rank_room: int, kv_memory: int) -> Limit:
    used = slots * rank_room / kv_memory
    return Limit(
        "memory",
        used,
        1.0,
        f"{slots} slots with prompt and answer need {gib(slots * rank_room)} of KV memory on a rank, and "
        "it has "
        f"{gib(kv_memory)}",
        (
            f"{max(0, kv_memory // rank_room)} slots, which is what fits",
            "fp8 KV",
            "a larger TP for decode",
            "park idle sessions (offload)",
        ),
    )


def _ttft_limit(first_ms: float, slo_ms: float, parts: str, prefill_ms: float | None) -> Limit:
    shorter: tuple[str, ...] = ()
    if prefill_ms is not None and prefill_ms > slo_ms:
        shorter = ("shorter prompts or more of a cached prefix: prefill alone takes longer than that",)
    return Limit(
        "first token",
        first_ms / slo_ms,
        1.0,
        f"{first_ms:.0f} ms until the first token ({parts}) without any queue, and {slo_ms:.0f} ms are "
        "allowed",
        (
            *shorter,
            "push layer by layer while prefill computes, so that the hand-off hides behind it",
            "faster links or a larger TP",
            "fp8 KV",
            "do not split: a plain server hands off nothing",
        ),
    )


def capacity(
    shape: ModelShape,
    *,
    qps: float,
    prompt: int,
    output: int,
    tpot_ms: float,
    slots: int,
    link_gbit_s: float,
    tp: int = 1,
    posting: Literal["loop", "thread"] = "loop",
    posting_ms: float | None = None,
    burst: int = 1,
    kv_memory_gib: float | None = None,
    prefill_tokens_per_s: float | None = None,
    servers: int | None = None,
    slo_ttft_ms: float | None = None,
    handoff_ms: float = 0.0,
    pcie_gb_s: float = 31.5,
    nvme_gb_s: float = 7.88,
) -> Capacity:
    """Everything about one decode server of a split deployment that arithmetic can say; no queueing beyond
    Little's law.

    Args:
        shape: what the model keeps (`kvxfer.plan.model`).
        qps: requests a second that this decode server gets.
        prompt: tokens of a prompt.
        output: tokens of an answer, on average.
        tpot_ms: milliseconds a token, measured at peak load, with the posting where `posting` says.
        slots: requests that the decode server runs at a time, at most.
        link_gbit_s: Gbit/s of one rank's link.
        tp: tensor-parallel ranks of the decode server, each with a link.
        posting: where the KV connector posts: on the decode loop, or on a thread of its own (kvxfer).
        posting_ms: milliseconds of posting a request of this length, as measured; default: the field's pull
            mode on the loop (`FIELD_POSTING`), kvxfer's own calls on a thread (`KVXFER_POSTING`).
        burst: hand-offs that come at once over the same links.
        kv_memory_gib: GiB of KV memory of one decode rank.
        prefill_tokens_per_s: tokens a second that one prefill server computes at this prompt length.
        servers: servers to be divided into prefill and decode; needs `prefill_tokens_per_s`.
        slo_ttft_ms: milliseconds until the first token, at most.
        handoff_ms: milliseconds of a hand-off besides its bytes (set-up, notice), as measured.
        pcie_gb_s: GB/s of one GPU's PCIe connection (default: PCIe 4.0 x16 at most).
        nvme_gb_s: GB/s of the server's NVMe (default: PCIe 4.0 x4 at most).
    """
    f.positive("qps", qps, "8")
    f.whole("prompt", prompt, "16000")
    f.whole("output", output, "128")
    f.positive("tpot_ms", tpot_ms, "10.4, taken at peak load")
    f.whole("slots", slots, "8")
    f.whole("tp", tp, "8")
    f.whole("burst", burst, "10")
    f.not_negative("handoff_ms", handoff_ms, "2")
    if posting not in ("loop", "thread"):
        raise BadArgument(f"posting={posting!r}: it is 'loop' (posting on the decode loop) or 'thread'")
    if servers is not None and prefill_tokens_per_s is None:
        raise BadArgument(
            f"servers={servers} cannot be divided without prefill_tokens_per_s: measure one server's "
            "prefill rate at "
            f"{prompt} tokens (--prefill-tokens-per-s)"
        )
    link = f.gb_per_s(link_gbit_s)
    moved = shape.rank_bytes(prompt, tp)
    transfer = f.transfer_ms(moved, link)
    if posting_ms is None:
        posting_ms = (f.FIELD_POSTING if posting == "loop" else f.KVXFER_POSTING).ms(prompt)
    lost = f.loop_lost_fraction(qps, posting_ms)
    held = f.slots_held(qps, output, tpot_ms)
    # A time that was measured with the posting on the loop has its cost in it already.
    free_tpot = f.tpot_without_posting(tpot_ms, lost) if posting == "loop" and lost < 1 else tpot_ms
    on_loop_ms = posting_ms if posting == "loop" else 0.0
    room = shape.rank_bytes(prompt + output, tp)
    n: dict[str, Any] = {
        "model": shape.name,
        "model_source": shape.source,
        "notes": list(shape.notes),
        "qps": qps,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "tpot_ms": tpot_ms,
        "tp": tp,
        "link_gb_s": link,
        "kv_bytes_per_token": shape.bytes_per_token,
        "kv_bytes": shape.kv_bytes(prompt),
        "kv_bytes_with_answer": shape.kv_bytes(prompt + output),
        "answer_kv_bytes": shape.kv_bytes(prompt + output) - shape.kv_bytes(prompt),
        "rank_kv_bytes": moved,
        "rank_kv_bytes_with_answer": room,
        "transfer_ms": transfer,
        "burst": burst,
        "burst_ms": transfer * burst,
        "link_used_fraction": qps * transfer / 1e3,
        "answer_s": f.answer_s(output, tpot_ms),
        "slots": slots,
        "slots_held": held,
        "slots_held_fraction": held / slots,
        "slots_limit": f.SLOTS_LIMIT,
        "posting": posting,
        "posting_ms": posting_ms,
        "loop_lost_fraction": lost,
        "tpot_ms_posting_off_loop": free_tpot,
        "slots_held_posting_off_loop": f.slots_held(qps, output, free_tpot),
        "qps_at_slots_limit": f.slots_out_qps(slots, output, free_tpot, on_loop_ms, f.SLOTS_LIMIT),
        "qps_slots_run_out": f.slots_out_qps(slots, output, free_tpot, on_loop_ms),
        "qps_slots_run_out_posting_off_loop": f.slots_out_qps(slots, output, free_tpot),
        "slo_ttft_ms": slo_ttft_ms,
    }
    kv_memory = None
    if kv_memory_gib is not None:
        kv_memory = math.floor(f.positive("kv_memory_gib", kv_memory_gib, "60") * 2**30)
        n["kv_memory_bytes"] = kv_memory
        n["slots_in_memory"] = kv_memory // room
    limits = [
        _slots_limit(n, slots, output, room, kv_memory),
        _link_limit(n["link_used_fraction"], transfer, qps),
        _loop_limit(lost, posting_ms, qps),
    ]
    if kv_memory is not None:
        limits.append(_memory_limit(slots, room, kv_memory))
    put = f.offload(shape.kv_bytes(prompt), link, tp, pcie_gb_s, nvme_gb_s)
    n["offload"] = {
        "hbm_freed_bytes": put.hbm_freed_bytes,
        "pcie_ms": put.pcie_ms,
        "nvme_ms": put.nvme_ms,
        "send_ms": put.send_ms,
        "spill_then_send_ms": put.spill_then_send_ms,
    }
    prefill_ms = None
    if prefill_tokens_per_s is not None:
        prefill_ms = _add_prefill(
            n, shape, prompt, output, tp, link, transfer, handoff_ms, prefill_tokens_per_s
        )
        if servers is not None:
            _add_split(n, limits, servers, prompt, output, slots, tpot_ms, prefill_tokens_per_s)
    if slo_ttft_ms is not None:
        f.positive("slo_ttft_ms", slo_ttft_ms, "300")
        first = transfer + handoff_ms + (prefill_ms or 0.0)
        parts = f"{transfer + handoff_ms:.1f} ms of hand-off"
        if prefill_ms is not None:
            parts += f" after {prefill_ms:.0f} ms of prefill"
        n["first_token_ms_unqueued"] = first
        n["transfer_meets_slo"] = transfer + handoff_ms <= slo_ttft_ms
        n["transfer_share_of_answer"] = (transfer + handoff_ms) / 1e3 / n["answer_s"]
        limits.append(_ttft_limit(first, slo_ttft_ms, parts, prefill_ms))
    return Capacity(n, tuple(limits))


def _add_prefill(
    n: dict[str, Any],
    shape: ModelShape,
    prompt: int,
    output: int,
    tp: int,
    link: float,
    transfer: float,
    handoff_ms: float,
    rate: float,
) -> float:
    """What a prefill rate tells: recompute or transfer, and how many prefill servers a decode server
    needs."""
    decode_rate = n["slots"] * f.SLOTS_LIMIT / (n["tpot_ms"] / 1e3)
    by_length = []
    for tokens in sorted({1024, 4096, 16_384, 65_536, prompt}):
        moved = f.transfer_ms(shape.rank_bytes(tokens, tp), link) + handoff_ms
        choice = f.recompute_or_transfer(
            tokens, moved, rate, n["slo_ttft_ms"], f.answer_s(output, n["tpot_ms"])
        )
        by_length.append({"prompt_tokens": tokens, **vars(choice)})
    chosen = next(x for x in by_length if x["prompt_tokens"] == prompt)
    n["prefill_ms"] = f.recompute_ms(prompt, rate)
    n["recompute_ms"] = chosen["recompute_ms"]
    n["sooner"] = chosen["sooner"]
    n["recompute_meets_slo"] = chosen["recompute_meets_slo"]
    n["by_prompt_length"] = by_length
    n["transfer_sooner_from_tokens"] = f.crossover_tokens(
        shape.rank_bytes(prompt, tp) / prompt, link, rate, handoff_ms=handoff_ms
    )
    n["prefill_servers_per_decode_server"] = f.prefill_decode_ratio(prompt, output, rate, decode_rate)
    return float(n["prefill_ms"])


def _add_split(
    n: dict[str, Any],
    limits: list[Limit],
    servers: int,
    prompt: int,
    output: int,
    slots: int,
    tpot_ms: float,
    rate: float,
) -> None:
    """How many of the servers should prefill. Here `qps` is what one decode server gets, and the total
    follows."""
    decode_rate = slots * f.SLOTS_LIMIT / (tpot_ms / 1e3)
    split = f.best_split(servers, prompt, output, rate, decode_rate)
    n["split"] = {
        "prefill": split.prefill,
        "decode": split.decode,
        "qps": split.qps,
        "plain_qps": split.plain_qps,
    }
    asked = n["qps"] * split.decode
    used = asked * prompt / rate / split.prefill
    limits.append(
        Limit(
            "prefill",
            used,
            0.8,
            f"{split.prefill} prefill servers are {percent(used)} busy with what {split.decode} decode "
            "servers get "
            f"({asked:g} requests/s); keep it under 80 %",
            ("more prefill servers, one moved at a time", "admit by reserving decode before prefill starts"),
        )
    )
