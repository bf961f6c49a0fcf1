"""A process that says, as JSON, which UCX an agent would load and whether it has RDMA.

It makes a context of every transport that there is, and what that does to a process stays in it: so an
engine starts this one.
"""

from __future__ import annotations

import json
import subprocess
import sys

from kvxfer import _kvxfer
from kvxfer._memory import ucx_wheel_dir
from kvxfer.errors import FabricError, KvxferError

__all__ = ["look", "main"]

_LIMIT_S = 60.0


def look() -> tuple[bool, str]:
    """Whether the UCX that will be loaded has RDMA, and which one it is.

    Raises:
        FabricError: if there is none, or it cannot be asked.
    """
    if not sys.executable:  # Python in another program: there is nothing to start a process with.
        found = _kvxfer._doctor_ucx(ucx_wheel_dir())
        return bool(found["rdma"]), str(found["path"])
    command = [sys.executable, "-c", "from kvxfer._ucx_look import main; main()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        found = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FabricError(f"UCX cannot be asked for its transports: {error}") from error
    except ValueError as error:
        said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise FabricError(
            f"UCX cannot be asked for its transports: the process that did ended with {done.returncode} and "
            f"said {said[0]}"
        ) from error
    if "error" in found:
        raise FabricError(found["error"])
    return bool(found["rdma"]), str(found["path"])


def main() -> None:
    """The process."""
    try:
        found = _kvxfer._doctor_ucx(ucx_wheel_dir())
        print(json.dumps({"rdma": bool(found["rdma"]), "path": str(found["path"])}))
    except KvxferError as error:
        print(json.dumps({"error": str(error)}))
