"""Who asks for what and when: Poisson arrivals, bursts, a number of users, or a trace file."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt

from kvxfer.simulate.prefixes import BLOCK

if TYPE_CHECKING:
    # For types only: Python itself has it from 3.11 on.
    from typing_extensions import Unpack

__all__ = ["Shape", "Traffic", "TrafficError", "bursts", "poisson", "read_trace", "users"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class TrafficError(ValueError):
    """A trace or a set of arguments that gives no traffic; the message says what is wrong and where."""


@dataclass(frozen=True)
class Traffic:
    """Requests, drawn before anything is simulated: every mode gets the same ones.

    Args:
        arrivals_ms: when each comes, in ms from the start, rising. With `users` the thinking before each
            instead.
        prompts: tokens of each prompt.
        answers: tokens of each answer, 1 or more.
        luck: a number from 0 to 1 for each, which decides whether its hand-off fails.
        blocks: of each prompt, names of its blocks of 512 tokens (Mooncake's `hash_ids`), if known.
        users: 0, or how many requests are under way at a time: the next comes when one has ended.
        name: in words.
    """

    arrivals_ms: Floats
    prompts: Ints
    answers: Ints
    luck: Floats
    name: str
    blocks: tuple[tuple[int, ...], ...] | None = None
    users: int = 0

    def __len__(self) -> int:
        return len(self.prompts)


class _Means(TypedDict):
    prompt: int
    answer: int


class Shape(_Means, total=False):
    """What requests look like, for `poisson`, `bursts` and `users`.

    Args:
        prompt: tokens of a prompt, on average.
        answer: tokens of an answer, on average.
        spread: sigma of lognormal lengths of prompts; 0 (the default) gives all the same.
        answer_spread: the same of answers.
        shared_prefix: tokens at the front of every prompt with which others begin too (a system prompt, a
            document), in whole blocks of 512; by default none.
        prefixes: how many such fronts there are; each prompt has one of them.
    """

    spread: float
    answer_spread: float
    shared_prefix: int
    prefixes: int


def _lengths(rng: np.random.Generator, count: int, mean: int, spread: float, least: int) -> Ints:
    if mean < least:
        raise TrafficError(f"a length of {mean} tokens: it must be {least} or more")
    if not 0 <= spread < 4:
        raise TrafficError(f"a spread of {spread}: it must be from 0 to 4 (sigma of a lognormal)")
    drawn = rng.standard_normal(count)
    if spread == 0:
        return np.full(count, mean, np.int64)
    # Half of sigma squared is taken off so that the mean stays what was asked for.
    lengths: Ints = np.maximum(least, np.rint(mean * np.exp(spread * drawn - spread**2 / 2))).astype(np.int64)
    return lengths


def _checked(count: int, qps: float) -> None:
    if count < 1:
        raise TrafficError(f"{count} requests: there must be 1 or more")
    if not 0 < qps < 1e6:
        raise TrafficError(f"{qps} requests a second: it must be above 0")


def _blocks(
    rng: np.random.Generator, lengths: Ints, tokens: int, prefixes: int
) -> tuple[tuple[int, ...], ...] | None:
    """Names of blocks of prompts that begin with one of so many prefixes, each as often as the others."""
    if not tokens:
        return None
    if tokens < BLOCK or prefixes < 1:
        raise TrafficError(
            f"{prefixes} shared prefixes of {tokens} tokens: there must be 1 or more, and of {BLOCK} tokens "
            f"or more, as prefixes are found by blocks of {BLOCK}"
        )
    each = tokens // BLOCK
    which = rng.integers(prefixes, size=len(lengths))
    return tuple(
        tuple(range(int(p) * each, int(p) * each + min(each, int(length) // BLOCK)))
        for p, length in zip(which, lengths, strict=True)
    )


def _make(
    rng: np.random.Generator,
    arrivals: Floats,
    name: str,
    *,
    prompt: int,
    answer: int,
    spread: float = 0.0,
    answer_spread: float = 0.0,
    shared_prefix: int = 0,
    prefixes: int = 1,
    users: int = 0,
) -> Traffic:
    count = len(arrivals)
    words = f"prompts of {prompt:,} tokens, answers of {answer:,}"
    if spread or answer_spread:
        words += f" on average (sigma of lognormals: {spread:g} and {answer_spread:g})"
    if shared_prefix:
        words += f", the first {shared_prefix:,} tokens from {prefixes} prefixes"
    lengths = _lengths(rng, count, prompt, spread, 1)
    return Traffic(
        arrivals_ms=arrivals,
        prompts=lengths,
        answers=_lengths(rng, count, answer, answer_spread, 1),
        luck=rng.random(count),
        blocks=_blocks(rng, lengths, shared_prefix, prefixes),
        name=f"{name}, {words}",
        users=users,
    )


def poisson(
    *,
    qps: float,
    requests: int,
    seed: int = 0,
    **shape: Unpack[Shape],
) -> Traffic:
    """Requests that know nothing of each other.

    The same seed draws the same waits for every rate, only longer or shorter: rates differ in nothing else.

    Args:
        qps: requests a second, on average.
        requests: how many.
        seed: decides all draws.
        shape: lengths, and what prompts have in common.
    """
    _checked(requests, qps)
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0, requests)) * 1e3 / qps
    return _make(rng, arrivals, f"Poisson, {qps:g} req/s", **shape)


def bursts(
    *,
    qps: float,
    requests: int,
    factor: float = 4.0,
    burst_s: float = 10.0,
    every_s: float = 60.0,
    seed: int = 0,
    **shape: Unpack[Shape],
) -> Traffic:
    """Poisson arrivals whose rate is `factor` times as high in the last `burst_s` of every `every_s` seconds.

    Args:
        qps: requests a second outside of bursts.
        requests: how many.
        factor: rate within a burst over the one outside, 1 or more.
        burst_s: length of a burst, in seconds.
        every_s: from the end of one burst to that of the next, in seconds.
        seed: decides all draws.
        shape: lengths, and what prompts have in common.
    """
    _checked(requests, qps)
    if factor < 1 or not 0 < burst_s <= every_s:
        raise TrafficError(
            f"bursts of {burst_s} s every {every_s} s at {factor} times the rate: a factor is 1 or more, "
            f"and a burst is above "
            "0 s and no longer than the time between bursts"
        )
    rng = np.random.default_rng(seed)
    drawn = np.cumsum(rng.exponential(1.0, requests))
    quiet = qps * (every_s - burst_s)
    rounds, rest = np.divmod(drawn, quiet + qps * factor * burst_s)
    within_s = np.where(rest < quiet, rest / qps, every_s - burst_s + (rest - quiet) / (qps * factor))
    arrivals = (rounds * every_s + within_s) * 1e3
    name = f"Poisson, {qps:g} req/s, and {factor:g} x that for {burst_s:g} s of every {every_s:g}"
    return _make(rng, arrivals, name, **shape)


def users(
    *,
    users: int,
    requests: int,
    seed: int = 0,
    **shape: Unpack[Shape],
) -> Traffic:
    """So many requests under way at any time: each user sends the next when the last has ended.

    Args:
        users: how many.
        requests: in all.
        seed: decides all draws.
        shape: lengths, and what prompts have in common.
    """
    _checked(requests, 1.0)
    if users < 1:
        raise TrafficError(f"{users} users: there must be 1 or more")
    rng = np.random.default_rng(seed)
    # A millisecond between the first ones keeps them from being one batch.
    first = np.arange(requests, dtype=np.float64)
    return _make(rng, first, f"{users} users at a time", users=users, **shape)


def _mooncake(path: Path) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                ids = tuple(int(one) for one in row.get("hash_ids", ()))
                yield float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]), ids
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise TrafficError(
                    f"{path}:{number}: not a row of a Mooncake trace (timestamp in ms, input_length, "
                    f"output_length, "
                    f"hash_ids): {error!r}"
                ) from error


def _azure_ms(text: str) -> float:
    # Seven digits of a second, which fromisoformat does not take before Python 3.11.
    whole, _, part = text.strip().replace("T", " ").partition(".")
    digits = "".join(c for c in part.split("+")[0].rstrip("Z") if c.isdigit())
    moment = datetime.datetime.fromisoformat(whole.split("+")[0].rstrip("Z")).replace(
        tzinfo=datetime.timezone.utc
    )
    return moment.timestamp() * 1e3 + (float(f"0.{digits}") * 1e3 if digits else 0.0)


def _azure(path: Path) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            try:
                yield _azure_ms(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise TrafficError(
                    f"{path}:{number}: not a row of an Azure LLM trace (TIMESTAMP, ContextTokens, "
                    f"GeneratedTokens): "
                    f"{error!r}"
                ) from error


def read_trace(
    path: str | Path, *, requests: int | None = None, speed: float = 1.0, seed: int = 0
) -> Traffic:
    """A public trace: Mooncake's (`.jsonl`) or Azure's (`.csv`).

    Mooncake's rows have `timestamp` (ms), `input_length`, `output_length` and `hash_ids` (a name for each
    512 tokens of the prompt and all before them); Azure's columns are `TIMESTAMP`, `ContextTokens` and
    `GeneratedTokens`.

    Args:
        path: the file.
        requests: take only so many, from the start.
        speed: how many times as fast as they came.
        seed: decides which hand-offs fail, if any do.

    Raises:
        TrafficError: if a row is not of that form, or none is left.
        OSError: if the file cannot be read.
    """
    file = Path(path)
    if not 0 < speed < 1e9:
        raise TrafficError(f"a speed of {speed}: it must be above 0")
    rows = list(_azure(file) if file.suffix.lower() == ".csv" else _mooncake(file))
    # Some public traces are not quite in order.
    rows.sort(key=lambda row: row[0])
    rows = rows[:requests]
    if not rows:
        raise TrafficError(f"{file} has no requests")
    bad = next((row for row in rows if row[1] < 0 or row[2] < 0), None)
    if bad is not None:
        raise TrafficError(f"{file}: a request with {bad[1]} prompt and {bad[2]} answer tokens")
    arrivals = np.array([row[0] for row in rows])
    known = any(row[3] for row in rows)
    return Traffic(
        arrivals_ms=(arrivals - arrivals[0]) / speed,
        prompts=np.maximum(1, np.array([row[1] for row in rows], np.int64)),
        answers=np.maximum(1, np.array([row[2] for row in rows], np.int64)),
        luck=np.random.default_rng(seed).random(len(rows)),
        blocks=tuple(row[3] for row in rows) if known else None,
        name=f"{file.name}, {len(rows):,} requests" + (f" at {speed:g} x speed" if speed != 1 else ""),
    )
