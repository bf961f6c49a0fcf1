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
    """One figure of each result, over the rate of arrivals.

    `limit` is the value not to be passed: a number, or the name of an SLO in the set-up.
    """

    title: str
    unit: str
    key: str
    scale: float = 1.0
    log: bool = False
    limit: str | float | None = None


PANELS = (
    Panel("Time to first token, mean", "ms", "ttft_ms_mean", log=True, limit="slo_ttft_ms"),
    Panel("Time to first token, 99th percentile", "ms", "ttft_ms_p99", log=True, limit="slo_ttft_ms"),
    Panel("Time per token, mean", "ms", "tpot_ms_mean", limit="slo_tpot_ms"),
    Panel("Gap between tokens, 99th percentile", "ms", "itl_ms_p99", log=True),
    Panel("Slots held", "% of slots", "slots_used_fraction", 100.0, limit=80.0),
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


def _draw_limit(axes: Sequence[Any], panel: Panel, points: Sequence[Point]) -> None:
    """A grey line at the value not to be passed, where the row comes near it."""
    limit = panel.limit
    if isinstance(limit, str):
        limit = float(getattr(points[0].result.setup, limit))
    low, high = axes[0].get_ylim()
    if limit is None or not low < limit < 1.3 * high:
        return
    axes[0].set_ylim(low, max(high, 1.15 * limit))
    for axis in axes:
        axis.axhline(limit, color="#888888", linewidth=1.0, linestyle=(0, (6, 2)), zorder=1)
    what = "SLO" if isinstance(panel.limit, str) else "keep under"
    axes[0].annotate(
        f"{what}: {limit:,.6g} {panel.unit.split()[0]}",
        (0.01, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        fontsize=7.5,
        color="#666666",
    )


def draw(
    points: Sequence[Point], file: str | Path, *, x: str, title: str, panels: Sequence[Panel] = PANELS
) -> None:
    """Draws a row of panels for each figure and a column for each group, one line for each name.

    The panels of a row have the same scale, so that groups can be compared.

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
        len(panels),
        len(groups),
        figsize=size,
        squeeze=False,
        sharex=True,
        sharey="row",
        layout="constrained",
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
            axis.grid(True, color="#dddddd", linewidth=0.6)
            if row == 0:
                axis.annotate(
                    group, (0.5, 1.22), xycoords="axes fraction", ha="center", fontsize=10, fontweight="bold"
                )
            axis.set_title(panel.title, fontsize=9)
            if column == 0:
                axis.set_ylabel(panel.unit)
            if row == len(panels) - 1:
                axis.set_xlabel(x)
        if not panel.log:
            axes[row][0].set_ylim(bottom=0)
        _draw_limit(axes[row], panel, points)
    # One legend for all: every panel has the same lines.
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    save(figure, Path(file))
    pyplot.close(figure)
