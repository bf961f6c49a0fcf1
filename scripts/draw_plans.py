"""Draws the pictures of docs/resharding.md from what the planner answers.

    draw_plans.py [--check] [--out FOLDER]

Every band of a picture is one write of `kvxfer.plan_transfer`, at its own offsets. `--check` writes nothing
and fails if a picture is not as it would be drawn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

import kvxfer as kx

OUT = Path(__file__).resolve().parent.parent / "docs" / "pictures"
# Told apart by people who see no red or green, and readable under dark text.
COLOURS = ("#56b4e9", "#f0b04a", "#4fc3a1", "#e58fb8", "#b7a7e8", "#e8d95a", "#f08a6c", "#a9c26b")
STYLE = """
.paper{fill:#ffffff}.text{fill:#24292f}.faint{fill:#57606a}.page{fill:#eaeef2;stroke:#8c959f}
.in{fill:#1b1f24}.cell{stroke:#1b1f24;stroke-opacity:.45;stroke-width:.6}
@media (prefers-color-scheme:dark){.paper{fill:#0d1117}.text{fill:#e6edf3}.faint{fill:#9198a1}
.page{fill:#21262d;stroke:#6e7681}}
text{font:12px system-ui,sans-serif;text-anchor:middle}.left{text-anchor:start}.small{font-size:10px}
.title{font-size:14px;font-weight:600;text-anchor:start}
""".strip().replace("\n", "")
WIDTH, MARGIN, PAGE_HEIGHT = 880, 20, 30


class Move(NamedTuple):
    """One write of a plan, with the ranks it goes between."""

    source: int
    target: int
    src_offset: int
    dst_offset: int
    length: int


@dataclass(frozen=True)
class Side:
    """One engine in a picture: a layout, how many ranks, and each one's page list."""

    name: str
    layout: kx.PageLayout
    tp_size: int
    pages: tuple[int, ...]

    def shard(self, rank: int) -> kx.Shard:
        """A rank's shard."""
        return kx.Shard(tp_rank=rank, tp_size=self.tp_size)

    @property
    def page_bytes(self) -> int:
        """Of one rank."""
        return self.layout.page_bytes(self.shard(0))


def planned(src: Side, dst: Side, tokens: int, sources: Iterable[int], targets: Sequence[int]) -> list[Move]:
    """The writes into K of the first layer."""
    moves = []
    for s in sources:
        for d in targets:
            plan = kx.plan_transfer(
                (src.layout, src.shard(s)),
                (dst.layout, dst.shard(d)),
                src_pages=src.pages,
                dst_pages=dst.pages,
                tokens=tokens,
            )
            for op in plan.ops:
                if plan.src_regions[op["src_region"]] == (0, 0, "k"):
                    moves.append(Move(s, d, int(op["src_offset"]), int(op["dst_offset"]), int(op["length"])))
    return moves


def _number(x: float) -> str:
    return f"{x:.1f}".rstrip("0").rstrip(".")


@dataclass
class Row:
    """Pages side by side: every rank's page list."""

    side: Side
    ranks: Sequence[int]
    top: int
    boxes: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """Left edge and width of a rank's page."""

    def __post_init__(self) -> None:
        count = len(self.ranks) * len(self.side.pages)
        wide, narrow = 16.0, 5.0
        gaps = (len(self.ranks) - 1) * wide + (count - len(self.ranks)) * narrow
        width = (WIDTH - 2 * MARGIN - gaps) / count
        x = float(MARGIN)
        for rank in self.ranks:
            for page in self.side.pages:
                self.boxes[rank, page] = (x, width)
                x += width + narrow
            x += wide - narrow

    def place(self, rank: int, offset: int, length: int) -> tuple[float, float]:
        """Left and right edge of some bytes, which lie within one page."""
        page, within = divmod(offset, self.side.page_bytes)
        assert within + length <= self.side.page_bytes
        x, width = self.boxes[rank, page]
        scale = width / self.side.page_bytes
        return x + within * scale, x + (within + length) * scale


class Picture:
    """An SVG in the making."""

    def __init__(self, title: str, text: str, height: int) -> None:
        self.title, self.text, self.height = title, text, height
        self.below: list[str] = []
        self.above: list[str] = []
        self.above.append(f'<text class="text title" x="{MARGIN}" y="26">{escape(title)}</text>')

    def note(self, y: int, text: str) -> None:
        """A line at the left."""
        self.above.append(f'<text class="faint left" x="{MARGIN}" y="{y}">{escape(text)}</text>')

    def pages(self, row: Row, over: bool) -> None:
        """Empty pages, with the names of ranks and pages over or under them."""
        several = len(row.side.pages) > 1
        for rank in row.ranks:
            boxes = [row.boxes[rank, page] for page in row.side.pages]
            middle = (boxes[0][0] + boxes[-1][0] + boxes[-1][1]) / 2
            near, far = (-7, -23) if over else (PAGE_HEIGHT + 15, PAGE_HEIGHT + 31)
            name = f"{row.side.name}{rank}"
            if several:
                self.label(middle, row.top + far, "text", name)
            for page, (x, width) in zip(row.side.pages, boxes, strict=True):
                self.below.append(
                    f'<rect class="page" x="{_number(x)}" y="{row.top}" width="{_number(width)}" '
                    f'height="{PAGE_HEIGHT}"/>'
                )
                text = f"page {page}" if several else f"{name}, page {page}"
                self.label(x + width / 2, row.top + near, "faint small" if several else "text", text)

    def label(self, x: float, y: float, classes: str, text: str) -> None:
        """Text around a point."""
        self.above.append(f'<text class="{classes}" x="{_number(x)}" y="{_number(y)}">{escape(text)}</text>')

    def cell(self, top: int, edges: tuple[float, float], colour: str, text: str) -> None:
        """Bytes that move, in their page."""
        left, right = edges
        self.below.append(
            f'<rect class="cell" x="{_number(left)}" y="{top}" width="{_number(right - left)}" '
            f'height="{PAGE_HEIGHT}" fill="{colour}"/>'
        )
        if text:
            small = " small" if right - left < 8 * len(text) else ""
            self.label((left + right) / 2, top + PAGE_HEIGHT / 2 + 4, f"in{small}", text)

    def band(
        self, top: int, upper: tuple[float, float], bottom: int, lower: tuple[float, float], colour: str
    ) -> None:
        """What one write, or one copy, carries."""
        (a, b), (c, d) = upper, lower
        bend = _number((top + bottom) / 2)
        w, x, y, z = (_number(edge) for edge in (a, b, c, d))
        points = f"M{w} {top}C{w} {bend} {y} {bend} {y} {bottom}H{z}C{z} {bend} {x} {bend} {x} {top}Z"
        self.below.append(f'<path d="{points}" fill="{colour}" fill-opacity=".38"/>')

    def svg(self) -> str:
        """All of it."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}">\n<desc>{escape(self.text)}</desc>\n<style>{STYLE}</style>\n'
            f'<rect class="paper" width="{WIDTH}" height="{self.height}" rx="8"/>'
        )
        return "\n".join([head, *self.below, *self.above, "</svg>"]) + "\n"


Words = Callable[[Move], str]


def direct(
    title: str, text: str, src: Side, dst: Side, tokens: int, colour: Callable[[Move], int], words: Words
) -> str:
    """Sources above, destinations below, and a band for each write."""
    height, top, bottom = 288, 84, 190
    picture = Picture(title, text, height)
    above, below = Row(src, range(src.tp_size), top), Row(dst, range(dst.tp_size), bottom)
    picture.pages(above, over=True)
    picture.pages(below, over=False)
    moves = planned(src, dst, tokens, above.ranks, below.ranks)
    for move in moves:
        paint = COLOURS[colour(move) % len(COLOURS)]
        upper = above.place(move.source, move.src_offset, move.length)
        lower = below.place(move.target, move.dst_offset, move.length)
        picture.band(top + PAGE_HEIGHT, upper, bottom, lower, paint)
        picture.cell(top, upper, paint, words(move))
        picture.cell(bottom, lower, paint, words(move))
    picture.note(height - 12, text)
    return picture.svg()


def layout(kv_heads: int, page_tokens: int, order: str = "HND") -> kx.PageLayout:
    """One layer, which stands for all."""
    return kx.PageLayout(layers=1, kv_heads=kv_heads, head_dim=128, page_tokens=page_tokens, order=order)


def eight_to_four() -> str:
    """TP8 to TP4, HND."""
    src, dst = Side("P", layout(8, 16), 8, (4,)), Side("D", layout(8, 16), 4, (9,))
    return direct(
        "8 heads, TP8 to TP4, HND: a head of a page is one run on both sides",
        "K of one layer, 16 tokens a page. Each band is one write of 4 KiB, however many tokens it has.",
        src,
        dst,
        16,
        lambda move: move.source,
        lambda move: f"head {move.source}",
    )


def page_sizes() -> str:
    """Pages of 48 tokens to pages of 32."""
    src, dst = Side("P", layout(1, 48), 1, (5, 2)), Side("D", layout(1, 32), 1, (7, 0, 3))
    row = src.layout.row_bytes

    def tokens(move: Move) -> str:
        page, within = divmod(move.src_offset // row, 48)
        first = src.pages.index(page) * 48 + within
        return f"tokens {first} to {first + move.length // row - 1}"

    return direct(
        "Pages of 48 tokens to pages of 32",
        "K of one head of one layer, 96 tokens. They fall into segments, each within one page on both sides.",
        src,
        dst,
        96,
        lambda move: (
            src.pages.index(move.src_offset // src.page_bytes)
            + dst.pages.index(move.dst_offset // dst.page_bytes)
        ),
        tokens,
    )


def replicas() -> str:
    """Two heads on four ranks, to one rank."""
    src, dst = Side("P", layout(2, 64), 4, (6, 1, 8, 3)), Side("D", layout(2, 64), 1, (2, 9, 5, 0))
    return direct(
        "2 heads, TP4 to TP1: two ranks hold each head, one of them writes each block of tokens",
        "K of one layer, 256 tokens. P0 and P1 hold head 0, P2 and P3 head 1. Grey: held, not sent.",
        src,
        dst,
        256,
        lambda move: move.source,
        lambda move: f"h{move.source // 2}",
    )


def staged() -> str:
    """TP8 to TP4, NHD: packed, one write, unpacked."""
    src, dst = Side("P", layout(8, 8, "NHD"), 8, (4,)), Side("D", layout(8, 8, "NHD"), 4, (9,))
    top, slice_top, bottom, height = 84, 170, 300, 388
    picture = Picture(
        "8 heads, TP8 to TP4, NHD, staged: packed, one write, unpacked",
        "K of one layer, 8 tokens a page; two of eight sources. Directly: a write of 256 bytes a token.",
        height,
    )
    above, below = Row(src, (0, 1), top), Row(dst, (0,), bottom)
    picture.pages(above, over=True)
    picture.pages(below, over=False)
    row = src.layout.row_bytes
    for source in above.ranks:
        moves = planned(src, dst, 8, (source,), below.ranks)
        # Packed, the bytes follow each other in the order of the plan.
        paint = COLOURS[source]
        packed = [(sum(m.length for m in moves[:i]), move) for i, move in enumerate(moves)]
        for at, move in packed:
            token = f"t{move.src_offset // row % src.layout.page_tokens}"
            upper = above.place(source, move.src_offset, move.length)
            middle = above.place(source, src.pages[0] * src.page_bytes + at, move.length)
            lower = below.place(move.target, move.dst_offset, move.length)
            picture.band(slice_top + PAGE_HEIGHT, middle, bottom, lower, paint)
            picture.cell(top, upper, paint, token)
            picture.cell(slice_top, middle, paint, token)
            picture.cell(bottom, lower, paint, token)
        x, width = above.boxes[source, src.pages[0]]
        all_of_it = (x, x + width * (packed[-1][0] + packed[-1][1].length) / src.page_bytes)
        picture.band(top + PAGE_HEIGHT, all_of_it, slice_top, all_of_it, paint)
        middle_y = (top + PAGE_HEIGHT + slice_top) // 2 + 4
        words = f"head {source}: packed, then one write into the staging ring"
        picture.label(x + width / 2, middle_y, "text", words)
    picture.note(height - 12, picture.text)
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "eight-to-four-hnd.svg": eight_to_four,
    "eight-to-four-nhd-staged.svg": staged,
    "pages-48-to-32.svg": page_sizes,
    "replicated-heads.svg": replicas,
}


def main() -> int:
    """Draws them all, or looks whether they are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a picture would change")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="where they lie")
    options = parser.parse_args()
    stale = []
    for name, draw in PICTURES.items():
        path: Path = options.out / name
        drawn = draw()
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(drawn, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != drawn:
            stale.append(str(path))
    if stale:
        print(
            "kvxfer: not as the planner would have them, run `make pictures`:",
            *stale,
            sep="\n  ",
            file=sys.stderr,
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
