"""Results side by side as a picture. Needs matplotlib (`pip install 'kvxfer[plot]'`)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvxfer.simulate.result import Result

__all__ = ["Panel", "PlotError", "Point", "draw"]

# Okabe and Ito's, which people with any sight of colours can tell apart, with a mark and a dash of its own
# each.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


class PlotError(Exception):
    """The picture cannot be drawn; the message says what to do."""


class Point(NamedTuple):
    """A result at a place of the x axis."""

    x: float
    name: str
    group: str
    result: Result


class Panel(NamedTuple):
    """One figure of each result, over the rate of arrivals."""

    title: str
    unit: str
    key: str
    scale: float = 1.0
    log: bool = False


PANELS = (
    Panel("Time to first token, mean", "ms", "ttft_ms_mean", log=True),
    Panel("Time to first token, 99th percentile", "ms", "ttft_ms_p99", log=True),
    Panel("Time per token, mean", "ms", "tpot_ms_mean"),
    Panel("Gap between tokens, 99th percentile", "ms", "itl_ms_p99", log=True),
    Panel("Slots held", "% of slots", "slots_used_fraction", 100.0),
    Panel("Good requests (both SLOs met)", "% of requests", "good_fraction", 100.0),
)


def load() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        PlotError: if it is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise PlotError(f"a plot needs matplotlib: pip install 'kvxfer[plot]' ({error})") from error
    # The same results give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "kvxfer"
    matplotlib.rcParams["font.size"] = 9
    return pyplot


def save(figure: Any, file: Path) -> None:
    """Writes a figure, in the format that its name says.

    Raises:
        PlotError: if it cannot be written.
    """
    suffix = file.suffix.lower()
    try:
        figure.savefig(file, dpi=110, metadata={"Date": None} if suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise PlotError(f"the plot cannot be written to {file}: {error}") from error


def style(number: int) -> dict[str, Any]:
    """Colour, mark and dash of the line of this number."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKS[number % len(_MARKS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "markersize": 4.5,
        "linewidth": 1.5,
    }


def plain_log(axis: Any) -> None:
    """A logarithmic y axis with numbers as people write them."""
    from matplotlib import ticker

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def draw(
    points: Sequence[Point], file: str | Path, *, x: str, title: str, panels: Sequence[Panel] = PANELS
) -> None:
    """Draws a row of panels for each figure and a column for each group, one line for each name.

    Args:
        points: the results.
        file: where to; `.png`, `.svg` or `.pdf`.
        x: what the x axis says.
        title: above all.
        panels: which figures.

    Raises:
        PlotError: if matplotlib is not installed, or the file cannot be written.
    """
    pyplot = load()
    groups = list(dict.fromkeys(point.group for point in points))
    names = list(dict.fromkeys(point.name for point in points))
    size = (1.2 + 3.6 * len(groups), 0.9 + 2.1 * len(panels))
    figure, axes = pyplot.subplots(
        len(panels), len(groups), figsize=size, squeeze=False, sharex=True, layout="constrained"
    )
    figure.suptitle(textwrap.fill(title, 14 + 42 * len(groups)), fontsize=10)
    for row, panel in enumerate(panels):
        for column, group in enumerate(groups):
            axis = axes[row][column]
            for number, name in enumerate(names):
                line = [
                    (p.x, value * panel.scale)
                    for p in points
                    if p.group == group
                    and p.name == name
                    and (value := p.result.summary[panel.key]) is not None
                ]
                if line:
                    axis.plot(*zip(*line, strict=True), label=name, **style(number))
            if panel.log:
                plain_log(axis)
            else:
                axis.set_ylim(bottom=0)
            axis.grid(True, color="#dddddd", linewidth=0.6)
            axis.set_title(f"{panel.title}\n{group}" if row == 0 else panel.title, fontsize=9)
            if column == 0:
                axis.set_ylabel(panel.unit)
            if row == len(panels) - 1:
                axis.set_xlabel(x)
    # One legend for all: every panel has the same lines.
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    save(figure, Path(file))
    pyplot.close(figure)
