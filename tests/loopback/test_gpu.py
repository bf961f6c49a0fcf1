"""GPU events and memory without a GPU: kvxfer on a stub driver, each case in a process of its own.

A process keeps the driver that it has loaded. What the stub cannot show is in docs/gpu.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cuda_stub
import pytest

CHILD = Path(cuda_stub.__file__).with_name("gpu_child.py")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_stub.build(tmp_path_factory.mktemp("cuda"))


def run(library: Path, case: str) -> str:
    done = subprocess.run(
        [sys.executable, str(CHILD), case],
        env=os.environ | {"KVXFER_CUDA_LIBRARY": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "passed"
    return done.stdout


CASES = [
    "late_events",
    "done_already",
    "pinned_pages",
    "layers",
    "failing_query",
    "retracted",
    "refused",
    "memory",
    "first_write_after_a_late_event",
]


@pytest.mark.parametrize("case", CASES)
def test_gpu_work_and_memory_on_a_stub(library: Path, case: str) -> None:
    print(run(library, case))


NO_DRIVER = """
import sys
import kvxfer as kx
layout = kx.PageLayout(layers=1, kv_heads=2, head_dim=16, page_tokens=4, dtype="float16")
pool = kx.alloc(layout, kx.Shard(), pages=4)
agent = kx.Agent("p", layout, kx.Shard(), memory=pool, fabric="shm")
for call in (
    lambda: agent.push(kx.new_room(), [1], tokens=4, event=12345),
    lambda: kx.Agent("d", layout, kx.Shard(), memory=[(kx.DeviceMemory(4096, 1024, 0), pool.v(0))]),
):
    try:
        call()
    except kx.FabricError as error:
        assert sys.argv[1] in str(error), error
    else:
        raise AssertionError("no FabricError")
# Host memory without events goes on as ever.
room = kx.new_room()
agent.push(room, [1], tokens=4)
agent.cancel(room)
assert agent.close() == []
"""


@pytest.mark.parametrize(
    ("lacks", "text"),
    [
        (None, "no CUDA driver"),
        (["cuPointerGetAttributes", "cuCtxGetDevice"], "lacks cu"),
        (["cuInit"], "lacks cuInit"),
    ],
)
def test_a_driver_that_is_missing_or_broken_is_a_typed_error(
    tmp_path: Path, lacks: list[str] | None, text: str
) -> None:
    library = tmp_path / "none.so"
    if lacks is not None:
        library = cuda_stub.build(tmp_path, defines=[f"-D{call}=gone_{call}" for call in lacks])
    done = subprocess.run(
        [sys.executable, "-c", NO_DRIVER, text],
        env=os.environ | {"KVXFER_CUDA_LIBRARY": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
