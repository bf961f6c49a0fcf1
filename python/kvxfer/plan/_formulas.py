"""The formulas. Each says its units and where it comes from; none of them knows a model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvxfer.errors import BadArgument

__all__ = [
    "FIELD_POSTING",
    "KVXFER_POSTING",
    "SLOTS_LIMIT",
    "Choice",
    "Offload",
    "PostingCost",
    "Split",
    "answer_s",
    "best_split",
    "crossover_tokens",
    "fit_posting",
    "gb_per_s",
    "kv_bytes",
    "loop_lost_fraction",
    "offload",
    "posting_ms_from_tpot",
    "prefill_decode_ratio",
    "recompute_ms",
    "recompute_or_transfer",
    "slots_held",
    "slots_needed",
    "slots_out_qps",
    "tpot_without_posting",
    "transfer_ms",
]

SLOTS_LIMIT = 0.8
"""The part of the slots that may be held on average. Arrivals come in bunches: with all of the slots held on
average a queue has no end, and close to it the wait is long, whatever hands off the KV."""

_EXAMPLE = "for example {name}={example}"


def positive(name: str, value: float, example: str) -> float:
    """`value`, if it is a number above zero; else an error that says what a good one looks like."""
    number: object = value
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        raise BadArgument(f"{name}={value!r} is no number; " + _EXAMPLE.format(name=name, example=example))
    if not math.isfinite(value) or value <= 0:
        raise BadArgument(f"{name}={value} is not above zero; " + _EXAMPLE.format(name=name, example=example))
    return value


def not_negative(name: str, value: float, example: str) -> float:
    """`value`, if it is zero or more."""
    if value == 0 and not isinstance(value, bool):
        return value
    return positive(name, value, example)


def whole(name: str, value: int, example: str, least: int = 1) -> int:
    """`value`, if it is a whole number, `least` or more."""
    if isinstance(value, bool) or int(value) != value or value < least:
        raise BadArgument(
            f"{name}={value!r} is no whole number from {least} on; "
            + _EXAMPLE.format(name=name, example=example)
        )
    return int(value)


def kv_bytes(tokens: int, layers: int, kv_heads: int, head_dim: int, dtype_bytes: float = 2) -> int:
    """Bytes of keys and values of so many tokens, in all layers and on all ranks together.

    `2 x layers x kv_heads x head_dim x dtype_bytes` a token: one key and one value of each head of each layer
    (Pope et al., Efficiently Scaling Transformer Inference, 2022, section 2.1). For models that keep
    something else, take `ModelShape.kv_bytes`.

    Args:
        tokens: tokens of prompt and answer.
        layers: layers that keep keys and values.
        kv_heads: heads of keys (and of values) of a layer, in the whole model and not on a rank.
        head_dim: elements of a head.
        dtype_bytes: bytes of an element; 0.5 for 4 bits.

    >>> kv_bytes(1, layers=64, kv_heads=8, head_dim=128)  # Qwen3-32B: 256 KiB a token
    262144
    """
    whole("tokens", tokens, "16000", least=0)
    whole("layers", layers, "64")
    whole("kv_heads", kv_heads, "8")
    whole("head_dim", head_dim, "128")
    positive("dtype_bytes", dtype_bytes, "2 (bfloat16), 1 (fp8) or 0.5 (4 bits)")
    return math.ceil(2 * tokens * layers * kv_heads * head_dim * dtype_bytes)


def gb_per_s(gbit_per_s: float) -> float:
    """GB/s (10^9 bytes a second) of a link that is sold by Gbit/s: 400 Gbit/s are 50 GB/s."""
    return positive("gbit_per_s", gbit_per_s, "400") / 8


def transfer_ms(nbytes: float, link_gb_s: float, tp: int = 1) -> float:
    """Milliseconds that bytes take on a link, if each of `tp` ranks has a link of its own and an equal part.

    `nbytes / (tp x link)`: the least it can take. What a link really gives is less: measure it with `kvxfer
    bench transfer` and put that in.

    Args:
        nbytes: bytes of all ranks together. Of several hand-offs at once over the same links: of all of them.
        link_gb_s: GB/s (10^9 bytes a second) of one rank's link.
        tp: ranks that share the bytes. Latent KV (MLA) is not shared but repeated: there, 1.

    >>> round(transfer_ms(kv_bytes(16_000, 64, 8, 128), link_gb_s=50, tp=8), 1)
    10.5
    """
    not_negative("nbytes", nbytes, "4194304000")
    positive("link_gb_s", link_gb_s, "50 (that is 400 Gbit/s)")
    whole("tp", tp, "8")
    return nbytes / (tp * link_gb_s * 1e9) * 1e3


def answer_s(out_tokens: float, tpot_ms: float) -> float:
    """Seconds that an answer takes, at so many milliseconds a token.

    >>> round(answer_s(8192, tpot_ms=1000 / 50))
    164
    """
    not_negative("out_tokens", out_tokens, "128")
    positive("tpot_ms", tpot_ms, "7.0, taken at peak load")
    return out_tokens * tpot_ms / 1e3


def slots_held(qps: float, out_tokens: float, tpot_ms: float) -> float:
    """Decode slots that are held on average.

    Little's law, `L = lambda x W` (J. D. C. Little, A Proof for the Queuing Formula, 1961): as many as
    arrive in the time that one stays.

    Args:
        qps: requests a second that one decode server gets.
        out_tokens: tokens of an answer, on average.
        tpot_ms: milliseconds a token, taken at peak load: on an idle server it is better, and the result too
            low.

    >>> round(slots_held(8, 128, 10.4), 1), round(slots_held(8, 128, 7.0), 1)
    (10.6, 7.2)
    """
    return positive("qps", qps, "8") * answer_s(out_tokens, tpot_ms)


def slots_needed(held: float, limit: float = SLOTS_LIMIT) -> int:
    """Slots of which so many may be held on average, if at most `limit` of them (a part of 1) may be."""
    not_negative("held", held, "10.6")
    if not 0 < limit <= 1:
        raise BadArgument(f"limit={limit} is not between 0 and 1; for example limit={SLOTS_LIMIT}")
    # A count that is exact but for the last bit of a float must not cost a slot.
    return max(1, math.ceil(held / limit - 1e-9))


def loop_lost_fraction(qps: float, posting_ms: float) -> float:
    """Part of the decode loop's time that goes into posting, if the loop posts. From 1 on it never keeps up.

    >>> round(loop_lost_fraction(8, 14.7), 3)
    0.118
    """
    return positive("qps", qps, "8") * not_negative("posting_ms", posting_ms, "14.7") / 1e3


def tpot_without_posting(tpot_ms: float, lost: float) -> float:
    """Milliseconds a token once the loop does not post, of a time that was measured while it did.

    A loop that gives `lost` of its time away makes tokens in the rest of it.
    """
    positive("tpot_ms", tpot_ms, "10.4")
    if not 0 <= lost < 1:
        raise BadArgument(
            f"lost={lost} is not in [0, 1): a loop that loses all of its time to posting makes no tokens "
            "at all"
        )
    return tpot_ms * (1 - lost)


def posting_ms_from_tpot(tpot_ms: float, without_ms: float, qps: float) -> float:
    """Milliseconds of posting a request, from the time per token with posting on the loop and without.

    >>> round(posting_ms_from_tpot(10.4, 7.0, 8), 1)
    40.9
    """
    positive("qps", qps, "8")
    if not 0 < positive("without_ms", without_ms, "7.0") <= positive("tpot_ms", tpot_ms, "10.4"):
        raise BadArgument(f"tpot_ms={tpot_ms} (with posting) is less than without_ms={without_ms}: swapped?")
    return (1 - without_ms / tpot_ms) / qps * 1e3


@dataclass(frozen=True)
class PostingCost:
    """What posting a request's KV costs the thread that does it: `base_ms + ms_per_token x tokens`."""

    base_ms: float
    """Milliseconds of a request of any length."""
    ms_per_token: float
    """Milliseconds more for each token of the prompt."""

    def ms(self, tokens: int) -> float:
        """Milliseconds for a prompt of so many tokens."""
        return self.base_ms + self.ms_per_token * whole("tokens", tokens, "16000", least=0)


def fit_posting(points: Iterable[tuple[int, float]]) -> PostingCost:
    """The line `a + b x tokens` through measured (tokens, milliseconds), by least squares.

    Two prompt lengths at the least: one cannot tell what each request costs from what each token does. A line
    that would give a negative time somewhere is refused: then a measurement is wrong.
    """
    measured = [(whole("tokens", t, "2000"), not_negative("milliseconds", m, "14.7")) for t, m in points]
    if len({tokens for tokens, _ in measured}) < 2:
        raise BadArgument(
            "posting cost is a + b x tokens: give its milliseconds at two prompt lengths or more, for "
            "example "
            "[(2000, 14.7), (16000, 40.9)]"
        )
    mean_t = sum(t for t, _ in measured) / len(measured)
    mean_m = sum(m for _, m in measured) / len(measured)
    slope = sum((t - mean_t) * (m - mean_m) for t, m in measured) / sum(
        (t - mean_t) ** 2 for t, _ in measured
    )
    base = mean_m - slope * mean_t
    # What is left of a zero after rounding is no negative cost.
    rounding = 1e-9 * max(m for _, m in measured)
    if slope * mean_t < -rounding or base < -rounding:
        raise BadArgument(
            f"the line through {measured} is {base:.3g} + {slope:.3g} x tokens: a negative part cannot be "
            "right; "
            "measure again on a quiet machine"
        )
    return PostingCost(max(0.0, base), max(0.0, slope))


FIELD_POSTING = fit_posting([(2000, 14.7), (16_000, posting_ms_from_tpot(10.4, 7.0, 8))])
"""Pull mode with posting on the decode loop, as the field measured it on Qwen3-32B: 14.7 ms at 2,000 tokens,
and at 16,000 what makes 10.4 ms a token out of 7.0 at 8 requests/s. A line through zero would have the loop
lose 94 % there."""

KVXFER_POSTING = PostingCost(base_ms=5.45e-3, ms_per_token=1.25e-7)
"""`expect` and `push` of kvxfer on the caller's thread: 4.0 + 1.7 us at 2,000 tokens and 1 ns a page of 16
tokens in each call, the upper ends of what `kvxfer bench post` measured (docs/performance.md)."""


def slots_out_qps(
    slots: int, out_tokens: float, tpot_ms: float, posting_ms: float = 0.0, limit: float = 1.0
) -> float:
    """Requests a second at which `limit` of the slots are held on average; at `limit=1` they run out.

    Posting on the loop makes tokens slower, and so slots longer held: `q x out x tpot / (1 - q x posting) =
    limit x slots`, solved for `q`.

    Args:
        slots: slots of one decode server.
        out_tokens: tokens of an answer, on average.
        tpot_ms: milliseconds a token at peak load, *without* what posting costs (`tpot_without_posting`).
        posting_ms: milliseconds of posting a request on the loop.
        limit: part of the slots.
    """
    room = whole("slots", slots, "8") * positive("limit", limit, f"{SLOTS_LIMIT}")
    held_s = answer_s(positive("out_tokens", out_tokens, "128"), tpot_ms)
    return room / (held_s + room * not_negative("posting_ms", posting_ms, "14.7") / 1e3)


def recompute_ms(prompt_tokens: int, prefill_tokens_per_s: float) -> float:
    """Milliseconds to compute a prompt anew, at a measured rate (which falls with length: measure at this
    one)."""
    whole("prompt_tokens", prompt_tokens, "16000", least=0)
    return prompt_tokens / positive("prefill_tokens_per_s", prefill_tokens_per_s, "20000") * 1e3


@dataclass(frozen=True)
class Choice:
    """Whether a prompt's KV is sooner recomputed where it is needed, or transferred there."""

    recompute_ms: float
    transfer_ms: float
    sooner: Literal["recompute", "transfer"]
    recompute_meets_slo: bool | None
    """Whether recomputing alone leaves the first token in time; None without an SLO."""
    transfer_meets_slo: bool | None
    answer_share: float | None
    """The sooner one's time as a part of the answer's, None if that is not known. What is little of a long
    answer can still be too much for a first token."""


def recompute_or_transfer(
    prompt_tokens: int,
    transfer: float,
    prefill_tokens_per_s: float,
    slo_ttft_ms: float | None = None,
    answer: float | None = None,
) -> Choice:
    """Which is sooner for KV that exists elsewhere, and whether either meets the SLO of the first token.

    Args:
        prompt_tokens: tokens whose KV is needed.
        transfer: milliseconds of the transfer (`transfer_ms`, plus what set-up and queues cost).
        prefill_tokens_per_s: tokens a second of the server that would recompute, measured at this length.
        slo_ttft_ms: milliseconds until the first token, at most.
        answer: seconds of the answer (`answer_s`).
    """
    again = recompute_ms(prompt_tokens, prefill_tokens_per_s)
    not_negative("transfer", transfer, "10.5")
    if slo_ttft_ms is not None:
        positive("slo_ttft_ms", slo_ttft_ms, "300")
    sooner: Literal["recompute", "transfer"] = "transfer" if transfer < again else "recompute"
    return Choice(
        recompute_ms=again,
        transfer_ms=transfer,
        sooner=sooner,
        recompute_meets_slo=None if slo_ttft_ms is None else again <= slo_ttft_ms,
        transfer_meets_slo=None if slo_ttft_ms is None else transfer <= slo_ttft_ms,
        answer_share=None
        if answer is None
        else min(again, transfer) / 1e3 / positive("answer", answer, "164"),
    )


def crossover_tokens(
    bytes_per_token: float,
    link_gb_s: float,
    prefill_tokens_per_s: float,
    tp: int = 1,
    handoff_ms: float = 0.0,
) -> float | None:
    """Prompt length from which a transfer is sooner than recomputing; None if it never is.

    A transfer costs `handoff_ms` and so much a token, recomputing only so much a token.
    """
    moved = transfer_ms(positive("bytes_per_token", bytes_per_token, "262144"), link_gb_s, tp)
    saved = recompute_ms(1, prefill_tokens_per_s) - moved
    return None if saved <= 0 else not_negative("handoff_ms", handoff_ms, "2") / saved


def prefill_decode_ratio(
    prompt_tokens: float, out_tokens: float, prefill_tokens_per_s: float, decode_tokens_per_s: float
) -> float:
    """Prefill servers for each decode server, so that neither waits for the other.

    Seconds of work that a request is for one kind of server, divided by those for the other. Rates are of a
    whole server and measured at peak load; the ratio follows the traffic, so look again when that changes.
    """
    prefill_s = positive("prompt_tokens", prompt_tokens, "16000") / positive(
        "prefill_tokens_per_s", prefill_tokens_per_s, "20000"
    )
    decode_s = positive("out_tokens", out_tokens, "128") / positive(
        "decode_tokens_per_s", decode_tokens_per_s, "1000"
    )
    return prefill_s / decode_s


@dataclass(frozen=True)
class Split:
    """How servers are divided, and what that carries."""

    prefill: int
    decode: int
    qps: float
    """Requests a second until one of the two kinds is full."""
    plain_qps: float
    """What as many plain servers carry, each doing both: splitting does not raise throughput."""


def best_split(
    servers: int,
    prompt_tokens: float,
    out_tokens: float,
    prefill_tokens_per_s: float,
    decode_tokens_per_s: float,
) -> Split:
    """The division of so many servers that carries the most, beside as many plain ones.

    Args:
        servers: servers in all, each able to be either kind; two or more.
        prompt_tokens: tokens of a prompt, on average.
        out_tokens: tokens of an answer, on average.
        prefill_tokens_per_s: tokens a second that one prefill server computes, at peak load.
        decode_tokens_per_s: tokens a second that one decode server writes over all its slots, at peak load.
    """
    whole("servers", servers, "8", least=2)
    prefill_qps = positive("prefill_tokens_per_s", prefill_tokens_per_s, "20000") / positive(
        "prompt_tokens", prompt_tokens, "16000"
    )
    decode_qps = positive("decode_tokens_per_s", decode_tokens_per_s, "1000") / positive(
        "out_tokens", out_tokens, "128"
    )
    qps, prefill = max((min(n * prefill_qps, (servers - n) * decode_qps), n) for n in range(1, servers))
    return Split(prefill, servers - prefill, qps, servers / (1 / prefill_qps + 1 / decode_qps))


@dataclass(frozen=True)
class Offload:
    """What it means to put a session's KV aside."""

    hbm_freed_bytes: int
    pcie_ms: float
    """Milliseconds to bring it back from the host's memory."""
    nvme_ms: float
    """Milliseconds to bring it back from NVMe: for parked sessions only."""
    send_ms: float
    """Milliseconds to hand it off out of GPU memory."""
    spill_then_send_ms: float
    """Milliseconds to copy it to the host first and hand it off from there: a copy more."""


def offload(
    nbytes: int,
    link_gb_s: float,
    tp: int = 1,
    pcie_gb_s: float = 31.5,
    nvme_gb_s: float = 7.88,
) -> Offload:
    """What offloading frees, and what bringing it back costs.

    Args:
        nbytes: bytes of all ranks together.
        link_gb_s: GB/s of one rank's link to the other server.
        tp: ranks, each with a link and a PCIe connection of its own.
        pcie_gb_s: GB/s of one GPU's PCIe connection. Default: what PCIe 4.0 x16 can carry at most (16 GT/s x
            16 lanes x 128/130 / 8); measure yours.
        nvme_gb_s: GB/s of the server's NVMe, shared by its ranks. Default: PCIe 4.0 x4 at most.
    """
    back = transfer_ms(nbytes, positive("pcie_gb_s", pcie_gb_s, "31.5"), tp)
    send = transfer_ms(nbytes, link_gb_s, tp)
    return Offload(
        hbm_freed_bytes=nbytes,
        pcie_ms=back,
        nvme_ms=transfer_ms(nbytes, positive("nvme_gb_s", nvme_gb_s, "7.88")),
        send_ms=send,
        spill_then_send_ms=back + send,
    )
