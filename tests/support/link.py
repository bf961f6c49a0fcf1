"""Two network namespaces and the bad line between them, for tests."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from link_child import ADDRESSES

HERE = pathlib.Path(__file__).parent


class BadLine:
    """A context manager; skips the test where the system allows no such namespaces."""

    near, far = ADDRESSES

    def __init__(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, str(HERE / "link_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout
        said = json.loads(self.child.stdout.readline())
        if "error" in said:
            self.__exit__()
            pytest.skip(f"no network namespaces with TUN devices here: {said['error']}")
        enter = ["nsenter"]
        if said["user"]:
            enter += [f"--user=/proc/{self.child.pid}/ns/user", "--preserve-credentials"]
        # UCX looks for devices in /sys, which shows those of the namespace in which it was mounted.
        mount = ["unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$0" "$@"']
        self.near_prefix, self.far_prefix = ([*enter, f"--net={space}", *mount] for space in said["spaces"])

    def set(self, **given: Any) -> dict[str, int]:
        """`delay_ms` (but not for TCP's `spare_ports`), `loss` (0 to 1), `dead`; what is not given is off.
        Returns the counts.
        """
        assert self.child.stdin
        assert self.child.stdout
        self.child.stdin.write(json.dumps(given) + "\n")
        self.child.stdin.flush()
        counts: dict[str, int] = json.loads(self.child.stdout.readline())
        return counts

    def __enter__(self) -> BadLine:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.child.stdin
        assert self.child.stdout
        self.child.stdin.close()
        self.child.wait(10)
        self.child.stdout.close()
