"""Lets PyTorch's ordinary build, which links CUDA's libraries, be imported without them: 3.5 GB less in a
venv.

`import torch` loads cuBLAS, cuDNN, NCCL and so on, and calls nothing in them on a machine without a GPU. This
puts libraries of the same names beside PyTorch's that have the versions and symbols the loader looks for, and
whose functions end the process. It is for venvs that run on the CPU only.

    stub_cuda.py .venv/lib/python3.11/site-packages/torch/lib
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

# The driver's own library: PyTorch looks for it at run time to learn whether there is a GPU.
NEVER = "libcuda.so.1"


def output(*command: str) -> str:
    """What a command prints; ldd exits with 1 on files it cannot read, which is no matter here."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def missing(folder: Path) -> dict[str, set[str]]:
    """The libraries that the loader does not find, each with the versions that are asked of it."""
    needed: dict[str, set[str]] = {}
    files = sorted(folder.glob("*.so*"))
    for file in files:
        for name in re.findall(r"(\S+) => not found", output("ldd", str(file))):
            if name != NEVER:
                needed.setdefault(name, set())
    for file in files:
        name = ""
        for line in output("readelf", "-VW", str(file)).splitlines():
            if found := re.search(r"File: (\S+)", line):
                name = found[1]
            elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and name in needed:
                needed[name].add(found[1])
    return needed


def symbols(folder: Path) -> dict[str, set[str]]:
    """The symbols that are looked for, by version; those without one under the empty name."""
    found: dict[str, set[str]] = {}
    for file in sorted(folder.glob("*.so*")):
        text = output("nm", "-D", "--undefined-only", "--with-symbol-versions", str(file))
        for symbol, version in re.findall(r"\sU (\w+)(?:@(\S+))?", text):
            found.setdefault(version, set()).add(symbol)
    return found


def main() -> int:
    """Compiles a stub for each missing library."""
    folder = Path(sys.argv[1])
    wanted = symbols(folder)
    for name, versions in missing(folder).items():
        with tempfile.TemporaryDirectory() as scratch:
            source, script = Path(scratch, "stub.c"), Path(scratch, "versions.map")
            inside = {version: sorted(wanted.get(version, ())) for version in sorted(versions)}
            bare = name.removeprefix("lib").split(".so")[0].lower()
            names = {symbol for group in inside.values() for symbol in group}
            if not versions:
                names |= {symbol for symbol in wanted.get("", ()) if symbol.lower().startswith(bare)}
            source.write_text(
                "".join(f"void {symbol}(void) {{ __builtin_trap(); }}\n" for symbol in sorted(names))
            )
            script.write_text(
                "".join(
                    f"{version} {{ {'global: ' + '; '.join(group) + ';' if group else ''} }};\n"
                    for version, group in inside.items()
                )
            )
            command = ["cc", "-shared", "-fPIC", "-nostdlib", str(source), "-o", str(folder / name)]
            command.append(f"-Wl,-soname,{name}")
            if inside:
                command.append(f"-Wl,--version-script={script}")
            subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
