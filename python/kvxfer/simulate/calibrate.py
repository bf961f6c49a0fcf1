"""Costs out of results of `kvxfer bench ... --json`, instead of stated defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvxfer.errors import BadArgument
from kvxfer.plan import FIELD_POSTING, fit_posting
from kvxfer.simulate.costs import Costs

__all__ = ["Calibration", "CalibrationError"]


class CalibrationError(ValueError):
    """A file that is no result of a benchmark, or of one that says nothing of costs."""


@dataclass
class Calibration:
    """Costs that were measured, each with where. Files are read one after the other; what is measured twice
    counts as measured last.

    `bench transfer` gives a link's speed and a message's time; `bench post` what a call costs the loop and
    how long the thread takes until the first byte; `bench plan` what a token takes the thread; `bench loop`
    and `bench peers` with NIXL what NIXL's posting takes. Posting has one cost whatever the mode: give those
    of the library that is to be simulated.
    """

    values: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    _points: dict[int, float] = field(default_factory=dict)

    def read(self, path: str | Path) -> None:
        """Takes in a result.

        Raises:
            CalibrationError: if the file is none, with what was expected.
            OSError: if it cannot be read.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise CalibrationError(
                f"{path} is no JSON: give what `kvxfer bench ... --json` printed ({error})"
            ) from error
        if not isinstance(found, dict):
            raise CalibrationError(f"{path} is no JSON object: give what `kvxfer bench ... --json` printed")
        name = Path(path).name
        try:
            if "push_us_p50" in found:
                self._post(found, name)
            elif "cases" in found:
                self._plan(found, name)
            elif "first_touch" in found and "rows" in found:
                self._transfer(found, name)
            elif "rows" in found and ("target_step_ms" in found or "nixl_tuned" in found):
                self._nixl(found, name)
            else:
                raise CalibrationError(
                    f"{path} has keys {', '.join(list(found)[:6])}: it is no result of `kvxfer bench "
                    f"post`, `plan`, "
                    "`transfer`, `loop` or `peers`"
                )
        except (KeyError, TypeError) as error:
            raise CalibrationError(
                f"{path} looks like a benchmark's result and lacks {error}: is it whole?"
            ) from error

    def apply(self, costs: Costs) -> Costs:
        """The same costs, with what was measured."""
        return replace(costs, **self.values)

    def _set(self, name: str, value: float, source: str) -> None:
        self.values[name] = float(value)
        self.sources[name] = source

    def _post(self, found: dict[str, Any], name: str) -> None:
        about = f"kvxfer bench post, {name}"
        self._set("call_ms", (found["push_us_p50"] + found["expect_us_p50"]) / 1e3, about)
        self._set(
            "post_fixed_ms",
            found["submit_to_first_write_us_p50"] / 1e3,
            f"{about}: from push to the first byte",
        )
        if not self.sources.get("post_ms_per_token", "").startswith("kvxfer bench plan"):
            self._set(
                "post_ms_per_token",
                0.0,
                f"{about}: the thread plans while it posts; `bench plan` says how long",
            )

    def _plan(self, found: dict[str, Any], name: str) -> None:
        cases = [case for case in found["cases"] if case["order"] == "HND" and case["pages"] == "shuffled"]
        if not cases:
            raise CalibrationError(f"{name} has no case of shuffled HND pages")
        case = max(cases, key=lambda one: one["tokens"])
        self._set(
            "post_ms_per_token", case["plan_us_p50"] / 1e3 / case["tokens"], f"kvxfer bench plan, {name}"
        )
        if not self.sources.get("post_fixed_ms", "").startswith("kvxfer bench post"):
            self._set(
                "post_fixed_ms",
                case["template_us_p50"] / 1e3,
                f"kvxfer bench plan, {name}: the template of a pair",
            )

    def _transfer(self, found: dict[str, Any], name: str) -> None:
        rows = [row for row in found["rows"] if row["rooms"] == 1 and row["pages"] == "shuffled"]
        if not rows:
            raise CalibrationError(f"{name} has no hand-off of one room with shuffled pages")
        # Between hosts it is UCX that carries the bytes.
        ucx = [row for row in rows if row["fabric"] == "ucx"]
        best = max(ucx or rows, key=lambda row: (row["tokens"], row["gbytes_per_s"]))
        way = f"{best['fabric']}, {best['memory']} memory, {best['tokens']:,} tokens"
        about = f"kvxfer bench transfer, {name}: {way}"
        self._set("nic_gb_s", best["gbytes_per_s"], about)
        pings = [row["ping_us_p50"] for row in found["latency"]]
        if pings:
            self._set("control_ms", min(pings) / 2e3, f"kvxfer bench transfer, {name}: half a ping")

    def _nixl(self, found: dict[str, Any], name: str) -> None:
        if "target_step_ms" in found:
            times = [
                row["post_ms_p50"] for row in found["rows"] if row["who"] == "nixl" and row["post_ms_p50"]
            ]
        else:
            times = [
                row["post_us_p50"] / 1e3
                for row in found["rows"]
                if row["peer"] == "nixl" and row["pages"] == "shuffled" and row["post_us_p50"]
            ]
        if not times:
            raise CalibrationError(f"{name} has no times of NIXL: it did not take part")
        self._points[int(found["tokens"])] = sum(times) / len(times)
        about = f"NIXL's posting, {name}"
        if len(self._points) > 1:
            try:
                line = fit_posting(sorted(self._points.items()))
            except BadArgument as error:
                raise CalibrationError(f"{name}: {error}") from error
            about += f": a line through {len(self._points)} lengths"
        else:
            # One point says nothing of the slope: the field's line, scaled through it.
            (tokens, measured), line = next(iter(self._points.items())), FIELD_POSTING
            scale = measured / line.ms(tokens)
            line = replace(line, base_ms=line.base_ms * scale, ms_per_token=line.ms_per_token * scale)
            about += f": the default's line scaled to {measured:.3g} ms at {tokens:,} tokens"
        self._set("post_fixed_ms", line.base_ms, about)
        self._set("post_ms_per_token", line.ms_per_token, about)
