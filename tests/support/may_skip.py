"""The tests that may be skipped, each with the reason. Any other skip fails a run with
`KVXFER_CHECK_SKIPS=1`.

CI sets it: a machine on which the fault tests quietly do not run proves nothing.
"""

from __future__ import annotations

import fnmatch

# Patterns of pytest's node ids, without the folder of the repository.
MAY_SKIP = {
    "tests/faults/test_network.py::*": "no network namespaces or no /dev/net/tun (an unprivileged container)",
    "tests/faults/test_limits.py::test_a_full_dev_shm*": "not root: a tmpfs cannot be mounted",
    "tests/faults/test_processes.py::test_a_recycled_process_id_is_another_process*": (
        "not root: the next process id cannot be chosen"
    ),
    "tests/loopback/test_cli_bench_peers.py::test_every_library_moves_the_bytes": (
        "the other libraries are 700 MB: `make bench-peers` installs them"
    ),
    "tests/loopback/test_ipv6.py::*": "the kernel has no IPv6, or the default port is taken",
    "tests/loopback/test_prometheus_scrape.py::*": "no prometheus (no apt, or not root)",
    "tests/unit/test_monitoring.py::test_promtool_*": "no promtool (no apt, or not root)",
    "tests/unit/test_api_memory.py::*": "torch is an extra, and large",
    "tests/gpu/test_on_a_gpu.py::*gpu-*": "no NVIDIA GPU; the same scripts run on the stub driver, as stub-*",
    "tests/loopback/test_doctor.py::*": "the system has no UCX of its own (no apt, or not root)",
}


def unexpected(skipped: list[str]) -> list[str]:
    """Those of these tests that no reason covers."""
    return [name for name in skipped if not any(fnmatch.fnmatchcase(name, one) for one in MAY_SKIP)]
