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

from kvxfer._memory import ucx_wheel_dir

CHILD = Path(cuda_stub.__file__).with_name("gpu_child.py")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_stub.build(tmp_path_factory.mktemp("cuda"))


def run(library: Path, *case: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(CHILD), *case],
        env=os.environ | {"KVXFER_CUDA_LIBRARY": str(library)} | environment,
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


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The UCX of the wheel, which has CUDA transports; they find the stub by the linker's path."""
    folder = ucx_wheel_dir()
    if folder is None:
        pytest.skip("the libucx wheel is not installed")
    return folder / "libucp.so.0"


@pytest.mark.parametrize(
    ("case", "defines"),
    [
        (["over_ucx", "1"], []),
        (["over_ucx", "0"], ["-DWRITES_ORDERING=100"]),
        (["over_ucx", "0"], ["-DRDMA=0"]),
        (["cannot_flush"], ["-DFLUSH_OPTIONS=2"]),
    ],
    ids=["flushed", "ordered", "no-rdma", "cannot-flush"],
)
def test_pages_on_a_device_go_over_ucx(
    tmp_path: Path, wheel: Path, case: list[str], defines: list[str]
) -> None:
    library = cuda_stub.build(tmp_path, defines=defines)
    cuda_stub.build_nvml(tmp_path)
    run(library, *case, LD_LIBRARY_PATH=str(tmp_path), KVXFER_UCX_LIBRARY=str(wheel))


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
