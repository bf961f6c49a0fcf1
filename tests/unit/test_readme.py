"""What the README shows runs as it stands there."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def test_the_readme_example_runs_and_prints_what_it_says(tmp_path: pathlib.Path) -> None:
    (code,) = blocks("python")
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # 4 layers, K and V, 2 heads, 40 tokens, 64 elements of 2 bytes.
    assert done.stdout == f"{4 * 2 * 2 * 40 * 64 * 2} bytes; pages are free again: [True]\n"


def test_the_readme_links_to_files_that_are_there() -> None:
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert len(links) >= 6
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readmes_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test", "wheel", "help"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_example_with_two_processes_runs() -> None:
    script = ROOT / "examples" / "hand_off.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # 8 layers, K and V, 2 heads, 500 tokens, 64 elements of 2 bytes.
    assert done.stdout.startswith(f"{8 * 2 * 2 * 500 * 64 * 2} bytes arrived"), done.stdout


def test_what_the_resharding_page_claims_in_code_holds() -> None:
    text = (ROOT / "docs" / "resharding.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(code) >= 3
    # One page, one namespace.
    exec("\n".join(code), {})
