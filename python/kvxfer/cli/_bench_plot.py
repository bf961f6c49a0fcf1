"""A plot as SVG, with nothing but text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

__all__ = ["Line", "plot"]

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 50, 60
# Okabe and Ito's, which people with any sight of colours can tell apart.
_COLOURS = ("#000000", "#0072b2", "#009e73", "#d55e00")
_TICKS = 6
# Lines whose points would lie on each other are so many pixels apart, and an interval's end is as wide.
_APART = 8


class Line(NamedTuple):
    """Points of one kind: (x, y, low, high)."""

    name: str
    points: Sequence[tuple[float, float, float, float]]


def _step(span: float) -> float:
    """The distance of about so many ticks over a span: 1, 2, 2.5 or 5 times a power of ten."""
    least = span / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    return next(times * power for times in (1, 2, 2.5, 5, 10) if times * power >= least)


def plot(title: str, x: str, y: str, lines: Sequence[Line]) -> str:
    """Lines with intervals over an axis whose places are the x values there are, evenly apart."""
    places = sorted({point[0] for line in lines for point in line.points})
    low = min(point[2] for line in lines for point in line.points)
    high = max(point[3] for line in lines for point in line.points)
    if high <= low:
        high = low + 1
    step = _step(high - low)
    # The scale begins and ends with a tick.
    first, last = math.floor(low / step), math.ceil(high / step)
    low, high = first * step, last * step
    digits = next(count for count in range(12) if math.isclose(round(step, count), step))

    def at_x(value: float, number: int | None = None) -> float:
        slot = (_WIDTH - _LEFT - _RIGHT) / len(places)
        aside = 0.0 if number is None else (number - (len(lines) - 1) / 2) * _APART
        return _LEFT + (places.index(value) + 0.5) * slot + aside

    def at_y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def text(where: tuple[float, float], words: str, more: str = "") -> str:
        return f'<text x="{where[0]:.1f}" y="{where[1]:.1f}" {more}>{escape(words)}</text>'

    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        text((_LEFT, 28), title, 'font-size="15"'),
        text(((_LEFT + right) / 2, _HEIGHT - 18), x, 'text-anchor="middle"'),
        text(
            (18, (_TOP + bottom) / 2),
            y,
            f'text-anchor="middle" transform="rotate(-90 18 {(_TOP + bottom) / 2})"',
        ),
    ]
    for tick in range(first, last + 1):
        height = at_y(tick * step)
        out.append(f'<line x1="{_LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}" stroke="#dddddd"/>')
        out.append(text((_LEFT - 8, height + 4), f"{tick * step:.{digits}f}", 'text-anchor="end"'))
    for place in places:
        out.append(text((at_x(place), bottom + 20), f"{place:g}", 'text-anchor="middle"'))
    for number, line in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        joined = " ".join(f"{at_x(px, number):.1f},{at_y(py):.1f}" for px, py, _, _ in line.points)
        out.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for px, py, least, most in line.points:
            middle, top, foot = at_x(px, number), at_y(most), at_y(least)
            ends = f"M{middle - _APART / 2:.1f} {{0:.1f}}h{_APART}"
            bar = f"M{middle:.1f} {top:.1f}V{foot:.1f}{ends.format(top)}{ends.format(foot)}"
            out.append(f'<path d="{bar}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            out.append(f'<circle cx="{middle:.1f}" cy="{at_y(py):.1f}" r="3" fill="{colour}"/>')
        key = _TOP + 10 + 22 * number
        ends = f'x1="{right + 16}" x2="{right + 40}" y1="{key}" y2="{key}"'
        out.append(f'<line {ends} stroke="{colour}" stroke-width="2"/>')
        out.append(text((right + 46, key + 4), line.name))
    return "\n".join([*out, "</svg>", ""])
