"""A process of `kvxfer doctor` that loads UCX or the CUDA driver: what these do to a process stays in it."""

from __future__ import annotations

from typing import Any

import kvxfer as kx
from kvxfer import _kvxfer
from kvxfer._memory import ucx_wheel_dir
from kvxfer.cli._worker import Link, run

__all__ = ["SURVIVES_TCP_WRITERS"]

SURVIVES_TCP_WRITERS = (1, 16)
"""From this UCX on a put over TCP is the transport's own. Before, it is an active message that UCX has to
acknowledge, and if the writer is dead by then UCX aborts the process (docs/ucx-notes.md).
"""


def _work(link: Link, config: dict[str, Any]) -> None:
    if config["what"] == "ucx":
        found = _kvxfer._doctor_ucx(ucx_wheel_dir())
    else:
        found = _kvxfer._doctor_gpus()
    link.send("found", found=found)


if __name__ == "__main__":
    run(_work, (kx.KvxferError,))
