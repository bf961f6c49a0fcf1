"""Requests, and what `kvxfer.admission` may say to them."""

from __future__ import annotations

from kvxfer.admission import Admission, Admitted, Config, Decision, Decode, Prefill, Queued, Refused, Request

MB = 10**6


def ask(id: object, prompt: int = 1000, answer: int = 100, **more: object) -> Request:
    return Request(id, prompt_tokens=prompt, answer_tokens=answer, **more)  # type: ignore[arg-type]


def admitted(found: Decision | None) -> Admitted:
    assert isinstance(found, Admitted), found
    return found


def refused(found: Decision) -> Refused:
    assert isinstance(found, Refused), found
    return found


def queued(found: Decision) -> Queued:
    assert isinstance(found, Queued), found
    return found


def one_pair(
    *,
    pages: int | None = 200,
    slots: int = 10,
    local: float = 0.0,
    gbytes_per_s: float = 12.5,
    **config: object,
) -> Admission:
    admission = Admission(Config(**{"growth_share": 0.0, "slots_share": 1.0, **config}))  # type: ignore[arg-type]
    admission.add_prefill(Prefill("p", tokens_per_s=1000, gbytes_per_s=gbytes_per_s))
    admission.add_decode(
        Decode("d", pages=pages, slots=slots, gbytes_per_s=gbytes_per_s, prefill_tokens_per_s=local)
    )
    return admission
