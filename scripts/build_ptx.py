"""Compiles cuda/pack.cu with NVRTC (a wheel; no GPU, no toolkit) into cuda/ptx/pack.ptx, which is committed.

    build_ptx.py           write the file
    build_ptx.py --check   exit 1 if the file is not what the source gives

One PTX of the oldest architecture serves all later ones: the driver compiles it for the GPU it finds.
`COMPILES_FOR` has those for which the tests go all the way to machine code.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "cuda" / "pack.cu"
HEADERS = (ROOT / "cuda" / "pack.cuh",)
PTX = ROOT / "cuda" / "ptx" / "pack.ptx"
PTX_ARCH = "compute_80"
COMPILES_FOR = ("sm_80", "sm_90", "sm_100")
OPTIONS = ("--std=c++17",)


class NvrtcError(Exception):
    """NVRTC is missing, or refused the source; the message has its log."""


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of the source: PTX, or machine code, and what it said."""

    code: bytes
    log: str


def find_nvrtc() -> Path:
    """The library of the wheel that the extra `kernels` installs."""
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found = sorted(Path(folder, "lib").glob("libnvrtc.so.*"))
        if found:
            return found[0]
    raise NvrtcError(
        "there is no NVRTC: `make ptx` installs it, or pip install -c constraints.txt 'kvxfer[kernels]'"
    )


class Nvrtc:
    """NVRTC by ctypes: ten C functions that have not changed since CUDA 8."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _check(self, code: int, call: str, log: str = "") -> None:
        if code != 0:
            name = self._lib.nvrtcGetErrorString(code).decode()
            raise NvrtcError(f"{call}: {name}{': ' if log else ''}{log}")

    def version(self) -> tuple[int, int]:
        """Major and minor."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        return major.value, minor.value

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(
            getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size"
        )
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
        return buffer.raw

    def compile(self, arch: str, options: tuple[str, ...] = OPTIONS, source: Path = SOURCE) -> Compiled:
        """PTX for `compute_NN`, machine code for `sm_NN`."""
        headers = [path.read_bytes() for path in HEADERS]
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*headers)
        names = (ctypes.c_char_p * len(headers))(*(path.name.encode() for path in HEADERS))
        self._check(
            self._lib.nvrtcCreateProgram(
                ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
            ),
            "nvrtcCreateProgram",
        )
        try:
            given = [f"--gpu-architecture={arch}".encode(), *(option.encode() for option in options)]
            code = self._lib.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
            log = self._text(program, "ProgramLog").rstrip(b"\0\n").decode()
            self._check(code, f"nvrtcCompileProgram for {arch}", log)
            if arch.startswith("sm_"):
                return Compiled(self._text(program, "CUBIN"), log)
            return Compiled(self._text(program, "PTX").rstrip(b"\0"), log)
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))


def main() -> int:
    """Writes the PTX, or compares it."""
    parser = argparse.ArgumentParser(description="Compiles the kernel to the PTX that is committed.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file differs")
    args = parser.parse_args()
    try:
        nvrtc = Nvrtc(find_nvrtc())
        made = nvrtc.compile(PTX_ARCH)
    except NvrtcError as error:
        print(f"build_ptx: {error}", file=sys.stderr)
        return 1
    if made.log:
        print(made.log)
    version = ".".join(map(str, nvrtc.version()))
    name = PTX.relative_to(ROOT)
    if args.check:
        same = PTX.is_file() and PTX.read_bytes() == made.code
        print(f"build_ptx: {name} is {'' if same else 'not '}what NVRTC {version} makes of the source")
        return 0 if same else 1
    PTX.parent.mkdir(exist_ok=True)
    PTX.write_bytes(made.code)
    print(f"build_ptx: NVRTC {version} wrote {name}, {len(made.code)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
