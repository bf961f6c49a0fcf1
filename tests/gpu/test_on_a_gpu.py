"""Hand-offs on a GPU, and the same scripts on the stub driver: each case in processes of its own.

Without a GPU the cases named `gpu-` are skipped, and those named `stub-` show that the scripts run. What only
torch or cupy can show is skipped where they are not. The cases are in `tests/support/gpu_case.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_stub
import gpu_driver
import pytest

from kvxfer import _kvxfer
from kvxfer._memory import ucx_wheel_dir

CASE = Path(gpu_driver.__file__).with_name("gpu_case.py")
SKIPPED = 77
CASES = [
    "hnd",
    "all_ranks",
    "nhd",
    "nhd_direct",
    "from_pinned",
    "to_pinned",
    "from_host",
    "late_event",
    "layers",
    "capture",
    "kernels",
    "memory",
    "visible",
]
# With what torch's allocator is told.
TORCH = [
    ("taken", ""),
    ("taken", "expandable_segments:False"),
    ("refused", "expandable_segments:True"),
    ("refused", "backend:cudaMallocAsync"),
]


def run(*case: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, str(CASE), *case],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "passed"
    print(done.stdout)


@pytest.fixture
def a_gpu() -> None:
    found = _kvxfer._doctor_gpus()
    if not found["devices"]:
        pytest.skip(f"no NVIDIA GPU: {found['error']}")


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings under which kvxfer, UCX and the cases find the stub driver."""
    wheel = ucx_wheel_dir()
    if wheel is None:
        pytest.skip("the libucx wheel is not installed")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to build the stub driver with")
    folder = tmp_path_factory.mktemp("cuda")
    library = cuda_stub.build(folder, source=cuda_stub.APP)
    cuda_stub.build_nvml(folder)
    return {
        "KVXFER_CUDA_LIBRARY": str(library),
        "LD_LIBRARY_PATH": str(folder),
        "KVXFER_UCX_LIBRARY": str(wheel / "libucp.so.0"),
    }


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"gpu-{case}")
def test_on_a_gpu(case: str) -> None:
    run(case)


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(("wanted", "said"), TORCH, ids=lambda word: f"gpu-{word}")
def test_torchs_tensors(wanted: str, said: str) -> None:
    run("torch_memory", wanted, PYTORCH_CUDA_ALLOC_CONF=said)


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("case", ["cupy_memory"], ids=["gpu-cupy"])
def test_cupys_arrays(case: str) -> None:
    run(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"stub-{case}")
def test_the_script_runs_on_the_stub(stub: dict[str, str], case: str) -> None:
    run(case, **stub)
