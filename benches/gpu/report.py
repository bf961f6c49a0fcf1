"""Puts the stages of benches/gpu/run.sh together: report.py FOLDER OUT [--docs FILE].

Writes OUT/result.json and OUT/table.md. `--docs` puts the table between the marks of a page, unless it comes
from the stub driver, whose times mean nothing. Ends with 1 if a stage failed, else with 2 if a bar was
missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

Found = dict[str, Any]

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
# Of the device's own copy, by the length of the runs.
KERNEL_BARS = {"4 KiB": 0.7, "256 B": 0.5}
HAND_OFF_BAR = 1.5
STEP_BAR_PERCENT = 1.0


class Row:
    """One line of the table."""

    def __init__(self, what: str, found: str, bar: str = "", holds: bool | None = None) -> None:
        self.what, self.found, self.bar, self.holds = what, found, bar, holds

    def __str__(self) -> str:
        verdict = "" if self.holds is None else (", held" if self.holds else ", **missed**")
        return f"| {self.what} | {self.found} | {self.bar}{verdict} |"


def of_kernels(found: Found) -> list[Row]:
    rows = []
    for name, one in found["rows"].items():
        bar = next(value for length, value in KERNEL_BARS.items() if name.startswith(length))
        share = one["of_the_copy"]
        few = ", ".join(f"{share[blocks]:.2f} on {blocks}" for blocks in ("16", "32", "64"))
        rows.append(
            Row(
                f"kernel, runs of {name}",
                f"{one['gbytes_per_s']['all']:.0f} GB/s read and written, {share['all']:.2f} x the device's "
                f"copy ({one['copy_gbytes_per_s']:.0f} GB/s); {few} blocks",
                f">= {bar} x",
                share["all"] >= bar,
            )
        )
    return rows


def of_hand_offs(found: Found) -> list[Row]:
    rows = []
    for what, one in found.items():
        if not isinstance(one, dict):
            continue
        if "error" in one:
            rows.append(Row(f"hand-off, {what}", f"failed: {one['error']}"))
            continue
        is_bar = what == "one rank, HND"
        times = one["times_the_peer_copy"]
        copied = "one peer copy" if one["peer_copy_by"] == "CUDA IPC" else one["peer_copy_by"]
        rows.append(
            Row(
                f"hand-off, {one['tokens']} tokens, {what}",
                f"{one['ms']['median']:.2f} ms for {one['bytes'] / 1e6:.1f} MB "
                f"({one['gbytes_per_s']:.1f} GB/s), {times:.2f} x {copied} "
                f"({one['peer_copy_ms']['median']:.3f} ms); push {one['push_us']['median']:.1f} us",
                f"<= {HAND_OFF_BAR} x" if is_bar else "",
                times <= HAND_OFF_BAR if is_bar else None,
            )
        )
    return rows


def of_loop(found: Found) -> list[Row]:
    rows = []
    for way in ("pushing", "receiving"):
        one = found[way]
        without, with_ = (one["step_ms"][key]["median"] for key in ("without", "with"))
        rows.append(
            Row(
                f"decode step while {way}, one hand-off each {found['steps_between_hand_offs']} steps",
                f"{without:.3f} ms without, {with_:.3f} ms with: {one['slower_by_percent']:+.2f} % (means "
                f"{one['mean_slower_by_percent']:+.2f} %)",
                f"<= {STEP_BAR_PERCENT:g} %",
                one["slower_by_percent"] <= STEP_BAR_PERCENT,
            )
        )
    calls = ", ".join(
        f"{call} {found[f'{call}_us']['p50']:.1f} (p99 {found[f'{call}_us']['p99']:.1f})"
        for call in ("push", "expect", "poll")
    )
    rows.append(Row("calls beside the loop", f"{calls} us"))
    return rows


def of_nixl(found: Found) -> list[Row]:
    if "absent" in found:
        return [Row("NIXL on the same pages", f"not run: {'; '.join(found['absent'])}")]
    text = ", ".join(f"{way} lists {ms:.2f} ms" for way, ms in found["ms"].items())
    wrong = "" if found["wrong"] is None else f" (wrong bytes: {found['wrong']})"
    return [Row(f"NIXL on the same pages, {found['bytes'] / 1e6:.1f} MB", text + wrong)]


def of_tests(folder: Path) -> list[Row]:
    file = folder / "tests.xml"
    if not file.is_file():
        return []
    # Written by our own pytest.
    suite = next(iter(ET.parse(file).getroot()))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    bad = counts["failures"] + counts["errors"]
    text = f"{counts['tests'] - bad - counts['skipped']} passed, {bad} failed, {counts['skipped']} skipped"
    return [Row("tests/gpu", text)]


def table(stages: dict[str, Found], folder: Path, failed: list[str]) -> tuple[list[Row], str]:
    machine = stages.get("machine", {})
    rows = of_tests(folder)
    for name, draw in (
        ("kernels", of_kernels),
        ("hand_off", of_hand_offs),
        ("loop", of_loop),
        ("nixl", of_nixl),
        ("single_writes", of_hand_offs),
    ):
        if name in stages:
            rows += draw(stages[name])
    if machine.get("stub", True):
        for row in rows:
            row.holds = None
    packages = ", ".join(f"{key} {value}" for key, value in machine.get("packages", {}).items())
    head = (
        f"{machine.get('gpu')}, driver {machine.get('driver')}, {machine.get('cpus')} CPUs "
        f"({machine.get('cpu')}), Linux {machine.get('kernel')}, Python {machine.get('python')}; {packages}."
    )
    lines = [head, "", "| what | found | bar |", "|---|---|---|", *map(str, rows)]
    if failed:
        lines += ["", f"Stages that failed: {', '.join(failed)}."]
    if machine.get("stub", True):
        lines = ["**On the stub driver: these numbers mean nothing.**", "", *lines]
    return rows, "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    # Lines of "stage status".
    ended = dict(line.split() for line in (options.folder / "status").read_text().splitlines())
    failed = [stage for stage, status in ended.items() if status != "0"]
    stages: dict[str, Found] = {
        file.stem: json.loads(file.read_text()) for file in sorted(options.folder.glob("*.json"))
    }
    rows, text = table(stages, options.folder, failed)
    stub = stages.get("machine", {}).get("stub", True)
    result = {"status": ended, "failed": failed, "stub": stub, "stages": stages}
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "table.md").write_text(text)
    print(text)
    if options.docs is not None:
        if stub:
            sys.exit(f"{options.docs} is left as it is: nothing was measured on a GPU")
        page = options.docs.read_text()
        before, mark, rest = page.partition(BEGIN)
        if not mark or END not in rest:
            sys.exit(f"{options.docs} has no place for the table")
        options.docs.write_text(f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    missed = [] if stub else [row.what for row in rows if row.holds is False]
    if missed:
        print(f"bars that were missed: {'; '.join(missed)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
