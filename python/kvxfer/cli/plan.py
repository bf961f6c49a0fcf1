"""`kvxfer plan`: the numbers of a split deployment, the one that bites, and what to change."""

from __future__ import annotations

import argparse
from typing import Any

from kvxfer import plan
from kvxfer.cli._errors import CommandError
from kvxfer.cli._text import print_json, prose, quantity, size, table
from kvxfer.errors import BadArgument

__all__ = ["run"]

# What argparse calls wrong arguments, for those that only make sense together.
_WRONG_ARGUMENTS = 2


def _shape(options: argparse.Namespace) -> plan.ModelShape:
    by_hand = [name for name in ("layers", "kv_heads", "head_dim") if getattr(options, name) is not None]
    if options.model is not None:
        if by_hand:
            raise BadArgument(
                f"--model and --{by_hand[0].replace('_', '-')} both say what the model keeps: give one"
            )
        return plan.model(options.model, kv_dtype=options.kv_dtype, scale_dim=options.kv_scales)
    if len(by_hand) < 3:
        raise BadArgument(
            "which model? Give --model NAME (--list-models), --model path/to/config.json, or all of "
            "--layers, --kv-heads "
            "and --head-dim"
        )
    group = plan.KvGroup(
        "full",
        layers=options.layers,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        scale_dim=options.kv_scales,
    )
    each = plan.dtype_bytes(options.kv_dtype or "bfloat16")
    name = f"{options.layers} layers x {options.kv_heads} KV heads x {options.head_dim}"
    return plan.ModelShape(name, (group,), each)


def _model_rows() -> list[dict[str, Any]]:
    rows = []
    for name, (source, _) in plan.MODELS.items():
        shape = plan.model(name)
        rows.append(
            {
                "model": name,
                "kv_bytes_per_token": shape.bytes_per_token,
                "kv_bytes_at_16000": shape.kv_bytes(16_000),
                "source": source,
            }
        )
    return rows


def _list_models(as_json: bool) -> int:
    rows = _model_rows()
    if as_json:
        print_json({"models": rows})
        return 0
    print(
        table(
            [
                ("model", "a token", "16,000 tokens", "source"),
                *(
                    (r["model"], size(r["kv_bytes_per_token"]), size(r["kv_bytes_at_16000"]), r["source"])
                    for r in rows
                ),
            ],
            indent="",
        )
    )
    print(
        "\n"
        + prose(
            "A token is what one more costs while no sliding window is full. --kv-dtype fp8 halves bfloat16."
        )
    )
    return 0


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1e3 else f"{value:.3g} ms" if value < 0.1 else f"{value:.1f} ms"


def _yes(value: bool | None) -> str:
    return "" if value is None else ", within the SLO" if value else ", too late for the SLO"


def _rows(n: dict[str, Any]) -> list[tuple[str, str]]:
    """The page's numbers, a line each."""
    rows = [
        ("KV of a token", size(n["kv_bytes_per_token"])),
        (
            f"KV of {n['prompt_tokens']:,} tokens",
            f"{size(n['kv_bytes'])}; on a rank {size(n['rank_kv_bytes'])}",
        ),
        (
            "room for the answer too",
            f"{size(n['answer_kv_bytes'])} more for {n['output_tokens']:,} tokens: "
            f"{size(n['kv_bytes_with_answer'])}",
        ),
        (
            "transfer",
            f"{_ms(n['transfer_ms'])} at {n['link_gb_s']:g} GB/s a rank; links are "
            f"{n['link_used_fraction'] * 100:.1f} % used",
        ),
    ]
    if n["burst"] > 1:
        rows.append((f"{n['burst']} at once", _ms(n["burst_ms"])))
    on_loop = n["posting"] == "loop"
    rows += [
        ("answer", f"{n['answer_s']:.1f} s at {n['tpot_ms']:g} ms a token, if that is the time at peak load"),
        (
            "slots held",
            f"{n['slots_held']:.1f} of {n['slots']} ({n['slots_held_fraction'] * 100:.0f} %; keep under "
            f"{n['slots_limit'] * 100:.0f} %)",
        ),
        (
            "posting",
            f"{_ms(n['posting_ms'])} a request on {'the decode loop' if on_loop else 'its caller'}: "
            f"{n['loop_lost_fraction'] * 100:.3g} % of the loop",
        ),
        (
            "slots run out at",
            f"{n['qps_slots_run_out']:.2f} requests/s; 80 % are held at {n['qps_at_slots_limit']:.2f}",
        ),
    ]
    if on_loop and n["loop_lost_fraction"] < 1:
        rows.append(
            (
                "with posting off it",
                f"{n['tpot_ms_posting_off_loop']:.1f} ms a token, {n['slots_held_posting_off_loop']:.1f} "
                "slots held, run out at "
                f"{n['qps_slots_run_out_posting_off_loop']:.2f} requests/s",
            )
        )
    if "slots_in_memory" in n:
        rows.append(
            ("slots that fit", f"{n['slots_in_memory']} in {size(n['kv_memory_bytes'])} of KV memory a rank")
        )
    if "prefill_ms" in n:
        rows += _prefill_rows(n)
    elif n["slo_ttft_ms"] is not None:
        rows.append(
            (
                "first token",
                f"the hand-off takes {_ms(n['first_token_ms_unqueued'])} of {_ms(n['slo_ttft_ms'])}"
                f"{_yes(n['transfer_meets_slo'])}; it is {n['transfer_share_of_answer'] * 100:.2g} % of "
                "the answer's time",
            )
        )
    put = n["offload"]
    rows.append(
        (
            "offloaded",
            f"frees {size(put['hbm_freed_bytes'])} of GPU memory; back over PCIe in {_ms(put['pcie_ms'])}, "
            f"from NVMe in {_ms(put['nvme_ms'])}",
        )
    )
    rows.append(
        (
            "",
            f"(parked sessions only); spilt first, a hand-off takes {_ms(put['spill_then_send_ms'])} and not "
            f"{_ms(put['send_ms'])}",
        )
    )
    return rows


def _prefill_rows(n: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (
            "recompute or transfer",
            f"{n['sooner']}: {_ms(n['recompute_ms'])} to recompute{_yes(n['recompute_meets_slo'])}, "
            f"{_ms(n['transfer_ms'])} to transfer{_yes(n.get('transfer_meets_slo'))}",
        )
    ]
    crossover = n["transfer_sooner_from_tokens"]
    rows.append(
        (
            "",
            "transfer is never sooner"
            if crossover is None
            else f"transfer is sooner from {crossover:,.0f} tokens on",
        )
    )
    for one in n["by_prompt_length"]:
        rows.append(
            (
                "",
                f"{one['prompt_tokens']:>6,} tokens: recompute {_ms(one['recompute_ms'])}, transfer "
                f"{_ms(one['transfer_ms'])}",
            )
        )
    if n["slo_ttft_ms"] is not None:
        rows.append(
            (
                "first token",
                f"{_ms(n['first_token_ms_unqueued'])} without a queue, {_ms(n['slo_ttft_ms'])} allowed",
            )
        )
    rows.append(("prefill : decode", f"{n['prefill_servers_per_decode_server']:.2f} : 1"))
    if "split" in n:
        s = n["split"]
        rows.append(
            (
                "servers",
                f"{s['prefill']} prefill and {s['decode']} decode carry {s['qps']:.2f} requests/s; as many "
                "plain servers "
                f"{s['plain_qps']:.2f}",
            )
        )
    return rows


def _show(found: plan.Capacity) -> None:
    n = found.numbers
    print(
        f"{n['model']}, {n['qps']:g} requests/s of {n['prompt_tokens']:,} + {n['output_tokens']:,} tokens "
        "to one decode "
        f"server of {quantity(n['tp'], 'rank')}\n"
    )
    print(table(_rows(n)))
    for note in n["notes"]:
        print(f"  note: {note}")
    print()
    worst = found.bites
    if worst is None:
        print(prose(f"verdict: {found.verdict}"))
    else:
        print(prose(f"what bites: {worst.name}. {worst.text}."))
        print("what to change:")
        for change in worst.changes:
            print(f"  * {change}")
        others = [x for x in found.limits if x.bites and x is not worst]
        for other in others:
            print(prose(f"too full as well: {other.name}. {other.text}."))
    print(f"\nshape: {n['model_source']}")


def run(options: argparse.Namespace) -> int:
    """The command."""
    if options.list_models:
        return _list_models(options.json)
    try:
        found = plan.capacity(
            _shape(options),
            qps=options.qps,
            prompt=options.prompt,
            output=options.output,
            tpot_ms=options.tpot_ms,
            slots=options.slots,
            link_gbit_s=options.link_gbit_s,
            tp=options.tp,
            posting=options.posting,
            posting_ms=options.posting_ms,
            burst=options.burst,
            kv_memory_gib=options.kv_memory_gib,
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            servers=options.servers,
            slo_ttft_ms=options.slo_ttft,
            handoff_ms=options.handoff_ms,
            pcie_gb_s=options.pcie_gb_s,
            nvme_gb_s=options.nvme_gb_s,
        )
    except BadArgument as error:
        raise CommandError(str(error), _WRONG_ARGUMENTS) from None
    if options.json:
        print_json(found.as_dict())
    else:
        _show(found)
    return 0
