"""The GPU kernel: its committed PTX is what the source gives, and it compiles for the GPUs that are meant."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_ptx", ROOT / "scripts" / "build_ptx.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_ptx"] = module
    spec.loader.exec_module(module)
    return module


build_ptx = load()
# As many as a block of 256 threads may have, with two blocks on a multiprocessor of 65,536.
MAX_REGISTERS = 128


@pytest.fixture(scope="module")
def nvrtc() -> object:
    # No skip: `make test` installs it, and the message says how else.
    return build_ptx.Nvrtc(build_ptx.find_nvrtc())


@pytest.fixture(scope="module")
def ptx() -> str:
    text: str = build_ptx.PTX.read_text()
    return text


def test_the_committed_ptx_is_what_the_source_gives(nvrtc) -> None:
    made = nvrtc.compile(build_ptx.PTX_ARCH)
    assert made.log == ""
    assert made.code == build_ptx.PTX.read_bytes(), (
        "cuda/ has changed: run `make ptx`, and commit what it writes"
    )


@pytest.mark.parametrize("arch", build_ptx.COMPILES_FOR)
def test_it_compiles_without_a_spill(nvrtc, arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = nvrtc.compile(arch, (*build_ptx.OPTIONS, "--ptxas-options=-v"))
    assert made.code[:4] == b"\x7fELF"
    registers = re.search(r"Used (\d+) registers", made.log)
    memory = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", made.log
    )
    assert registers, made.log
    assert memory, made.log
    with capsys.disabled():
        print(f"\nkvxfer_copy_stripes on {arch}: {registers[1]} registers, {memory[0]}")
    assert [int(n) for n in memory.groups()] == [0, 0, 0]
    assert int(registers[1]) <= MAX_REGISTERS


def test_one_ptx_serves_the_later_gpus(nvrtc, ptx: str) -> None:
    """Nothing in the source asks for more than the oldest: compiled for the next, only the target differs."""
    later = nvrtc.compile("compute_90").code.decode()
    assert later.replace(".target sm_90", ".target sm_80") == ptx


def test_each_width_has_its_loads_in_flight_together(ptx: str) -> None:
    moves = re.findall(r"\b(ld|st)\.global\.(v2\.u64|u64|u32|u16|u8)\b", ptx)
    runs: dict[str, list[str]] = {width: [] for width in ("v2.u64", "u32", "u16", "u8")}
    for kind, width in moves:
        if width in runs:
            runs[width].append(kind)
    assert runs == {width: ["ld"] * 4 + ["st"] * 4 for width in runs}
    # Some loads of 8 bytes are of the table.
    assert [kind for kind, width in moves if width == "u64"].count("st") == 4


def test_a_source_that_differs_or_is_wrong_is_noticed(
    nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.cu"
    bad.write_text(build_ptx.SOURCE.read_text() + "__device__ int x = y;\n")
    with pytest.raises(
        build_ptx.NvrtcError, match=r'compute_80: NVRTC_ERROR_COMPILATION: .*"y" is undefined'
    ):
        nvrtc.compile("compute_80", source=bad)
    other = tmp_path / "pack.ptx"
    other.write_bytes(build_ptx.PTX.read_bytes() + b"\n")
    monkeypatch.setattr(build_ptx, "ROOT", tmp_path)
    monkeypatch.setattr(build_ptx, "PTX", other)
    monkeypatch.setattr(sys, "argv", ["build_ptx.py", "--check"])
    assert build_ptx.main() == 1
    assert "is not what NVRTC 12.8 makes of the source" in capsys.readouterr().out
    monkeypatch.setattr(build_ptx.importlib.util, "find_spec", lambda _: None)
    assert build_ptx.main() == 1
    assert "make ptx" in capsys.readouterr().err
