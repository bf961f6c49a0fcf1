"""The pictures of docs/resharding.md show what the planner does now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "draw_plans.py"


def draw(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_committed_pictures_are_those_of_the_planner() -> None:
    done = draw("--check")
    assert done.returncode == 0, done.stderr


def test_another_picture_is_noticed(tmp_path: Path) -> None:
    assert draw("--out", str(tmp_path)).returncode == 0
    assert draw("--check", "--out", str(tmp_path)).returncode == 0
    changed = sorted(tmp_path.iterdir())[0]
    changed.write_text(changed.read_text(encoding="utf-8").replace("page 4", "page 5"), encoding="utf-8")
    done = draw("--check", "--out", str(tmp_path))
    assert done.returncode == 1
    assert changed.name in done.stderr


def test_every_picture_is_shown_small_and_well_formed() -> None:
    text = (ROOT / "docs" / "resharding.md").read_text(encoding="utf-8")
    pictures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    assert len(pictures) == 4
    for picture in pictures:
        assert f"](pictures/{picture.name})" in text
        assert picture.stat().st_size < 16_384
        root = ElementTree.parse(picture).getroot()
        assert root.tag.endswith("}svg")
        assert "prefers-color-scheme:dark" in picture.read_text(encoding="utf-8")
