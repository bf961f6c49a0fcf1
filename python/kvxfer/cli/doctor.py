"""`kvxfer doctor`: what this host can do, and what to do about what it cannot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvxfer.cli import _doctor_rdma as rdma
from kvxfer.cli import _doctor_tests as tests
from kvxfer.cli._doctor_look import SURVIVES_TCP_WRITERS
from kvxfer.cli._errors import CommandError
from kvxfer.cli._text import print_json, progress, size, table

__all__ = ["run"]

Found = dict[str, Any]

# The release that kvxfer's figures and settings come from, and the oldest that it takes.
_KNOWN_GOOD = (1, 22)
_OLDEST = (1, 13)
_GET_UCX = "install the wheel libucx-cu12 (pip install 'kvxfer[ucx]'), or set KVXFER_UCX_LIBRARY to a newer "
"libucp.so.0"
# UCX's shared memory lives in /dev/shm; containers often get 64 MiB.
_SHM_BYTES = 1 << 30
# What the looks at UCX, the host and the GPUs have said already.
_SAID_BEFORE = ("NVIDIA's driver", "RDMA in UCX", "locked memory")
# With RDMA every registered byte is locked.
_LOCKED_BYTES = 64 << 30


def _dotted(version: tuple[int, ...] | list[int]) -> str:
    return ".".join(str(number) for number in version)


def _rdma_devices() -> list[str]:
    """Names of the host's RDMA devices, as the kernel lists them."""
    try:
        return sorted(path.name for path in Path("/sys/class/infiniband").iterdir())
    except OSError:
        return []


def _look_at_ucx(problems: list[str]) -> Found:
    devices = _rdma_devices()
    found: Found = {"path": None, "version": None, "transports": [], "rdma": False, "rdma_devices": devices}
    try:
        found.update(tests.look("ucx"))
    except CommandError as error:
        found["error"] = str(error).removeprefix("ucx: ")
        problems.append(
            "UCX cannot be used, so only peers on this host are reached, by shared memory: "
            f"{found['error']}; kvxfer needs UCX {_dotted(_OLDEST)} or later: {_GET_UCX}"
        )
        return found
    version = tuple(found["version"])
    found["version"] = _dotted(version)
    if version[:2] < _KNOWN_GOOD:
        problems.append(
            f"UCX {found['version']} is older than {_dotted(_KNOWN_GOOD)}, with which kvxfer is known to be "
            f"good and fast (it works from {_dotted(_OLDEST)} on): {_GET_UCX}"
        )
    if version[:2] < SURVIVES_TCP_WRITERS:
        problems.append(
            f"over TCP, UCX {found['version']} can abort a process when the peer that writes to it dies; UCX "
            f"{_dotted(SURVIVES_TCP_WRITERS)} and later do not: {_GET_UCX}"
        )
    if not found["rdma"]:
        where = f"this host has {', '.join(devices)}" if devices else "the kernel lists no RDMA device here"
        problems.append(
            f"the UCX at {found['path']} has no RDMA transport that works here ({where}), so other hosts are "
            "reached by TCP: with RDMA NICs, install their driver and a UCX that is built with verbs "
            "(Debian's libucx0, or the vendor's; the wheel libucx-cu12 is built without) and set "
            "KVXFER_UCX_LIBRARY to its libucp.so.0"
        )
    return found


def _look_at_host(ucx: Found, problems: list[str]) -> Found:
    from kvxfer import _kvxfer

    host: Found = _kvxfer._doctor_host()
    scope = host["ptrace_scope"]
    if scope is not None and scope >= 2:
        problems.append(
            f"kernel.yama.ptrace_scope is {scope}, so only {'no process' if scope > 2 else 'CAP_SYS_PTRACE'} "
            "may read another process's memory: allocate pages with kvxfer.alloc, which needs no such right, "
            "or set it to 1 or 0"
        )
    locked = host["memlock_bytes"]
    if ucx["rdma"] and locked is not None and locked < _LOCKED_BYTES:
        problems.append(
            f"this process may lock {size(locked)} of memory, and RDMA locks all that is registered: raise "
            "it (ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1)"
        )
    free = host["dev_shm_free_bytes"]
    if free is None:
        problems.append("/dev/shm is not mounted, and UCX's shared memory needs it: mount a tmpfs there")
    elif free < _SHM_BYTES:
        problems.append(
            f"/dev/shm has {size(free)} free, and pools that UCX allocates for its shared memory lie there: "
            "make it larger (mount -o remount,size=, or docker run --shm-size=)"
        )
    return host


def _look_at_gpus(problems: list[str]) -> Found:
    try:
        found = tests.look("gpus")
    except CommandError as error:
        found = {"version": None, "devices": [], "error": str(error).removeprefix("gpus: ")}
        problems.append(f"the CUDA driver cannot be asked: {found['error']}; see what nvidia-smi says")
        return found
    if found["error"] is not None and not found["error"].startswith("no CUDA driver"):
        problems.append(f"the CUDA driver does not work: {found['error']}; see what nvidia-smi says")
    return found


def _test_fabrics(ucx: Found, problems: list[str]) -> Found:
    progress("testing shm between two processes, 64 MiB in pieces of 4 KiB")
    shm = tests.transfer("shm")
    if not shm["ok"]:
        problems.append(
            f"shared memory does not work: {shm['error']}; kvxfer needs memfd, abstract sockets and /proc"
        )
    shm["engine_memory"] = tests.transfer("shm", pooled=False)
    if shm["ok"] and not shm["engine_memory"]["ok"]:
        problems.append(
            "memory that kvxfer did not allocate cannot be read from another process: "
            f"{shm['engine_memory']['error']}; allocate pages with kvxfer.alloc, or allow process_vm_readv "
            "(ptrace rules, seccomp: docker run --cap-add SYS_PTRACE)"
        )
    found: Found = {
        "ok": False,
        "gbytes_per_s": None,
        "error": "there is no UCX",
        "one_sided": {},
        "probes": {},
    }
    if ucx["path"] is None:
        return {"shm": shm, "ucx": found}
    progress("testing ucx in the same way")
    found.update(tests.transfer("ucx"))
    if not found["ok"]:
        problems.append(
            f"UCX is there, but moved nothing: {found['error']}; try other transports (UCX_TLS=tcp,self)"
        )
    for transport in ucx["transports"]:
        # Within a process, and between GPUs: not for host memory of two processes.
        if transport == "self" or transport.startswith(("cuda", "gdr", "rocm", "ze_")):
            continue
        progress(f"testing whether writes over UCX's {transport} are one-sided")
        probe = tests.probe(transport)
        found["probes"][transport] = probe
        found["one_sided"][transport] = probe["ucx_memory"]
        if probe["error"] is not None:
            problems.append(
                f"UCX lists {transport}, but two processes cannot use it: {probe['error']}; leave it out "
                f"with UCX_TLS=^{transport} if it is slow to fail"
            )
    return {"shm": shm, "ucx": found}


def _rows_of_host(host: Found) -> list[tuple[str, str]]:
    scope = host["ptrace_scope"]
    rules = {
        None: "no Yama: a process may read others of the same user",
        0: "scope 0: a process may read others of the same user",
        1: "scope 1: a process may read those that let it; kvxfer does, for its authenticated peers",
        2: "scope 2: only with CAP_SYS_PTRACE",
    }

    def limit(value: int | None) -> str:
        return "unlimited" if value is None else size(value)

    pools = [
        f"{pool['free']} of {pool['total']} free of {size(pool['page_bytes'])}" for pool in host["huge_pages"]
    ]
    shm = "not mounted"
    if host["dev_shm_bytes"] is not None:
        shm = f"{size(host['dev_shm_bytes'])}, {size(host['dev_shm_free_bytes'] or 0)} free"
    return [
        ("process_vm_readv", rules.get(scope, f"scope {scope}: no process may read another")),
        ("locked memory", f"{limit(host['memlock_bytes'])} (at most {limit(host['memlock_hard_bytes'])})"),
        ("huge pages", f"{'; '.join(pools) or 'none'}; in shared memory: {host['shmem_huge'] or 'unknown'}"),
        ("/dev/shm", shm),
        ("descriptors", "unlimited" if host["descriptor_limit"] is None else str(host["descriptor_limit"])),
    ]


def _rows_of_gpus(gpus: Found) -> list[tuple[str, str]]:
    if not gpus["devices"]:
        return [("GPUs", "none" if gpus["error"] is None else f"none: {gpus['error']}")]
    return [
        (
            f"GPU {gpu['ordinal']}",
            f"{gpu['name']}, {size(gpu['total_bytes'])}, compute capability "
            f"{_dotted(gpu['compute_capability'])}",
        )
        for gpu in gpus["devices"]
    ]


def _rows_of_ucx(ucx: Found) -> list[tuple[str, str]]:
    if ucx["path"] is None:
        return [("UCX", "none")]
    return [
        ("UCX", f"{ucx['version']} from {ucx['path']} ({ucx['source']})"),
        ("transports", ", ".join(ucx["transports"])),
        ("RDMA", "yes" if ucx["rdma"] else "no: other hosts are reached by TCP"),
        ("CUDA in UCX", "yes" if ucx["cuda"] else "no"),
    ]


def _speed(result: Found) -> str:
    return f"{result['gbytes_per_s']:.2f} GB/s" if result["ok"] else f"FAILED: {result['error']}"


def _rows_of_fabrics(fabrics: Found) -> list[tuple[str, str]]:
    shm, ucx = fabrics["shm"], fabrics["ucx"]
    rows = [
        (
            "shm",
            f"{_speed(shm)} out of kvxfer.alloc's memory, {_speed(shm['engine_memory'])} out of other memory",
        ),
        ("ucx", _speed(ucx)),
    ]
    answers = {
        (True, True): "one-sided",
        (True, False): "one-sided into kvxfer.alloc's memory, not into other memory",
        (False, True): "not one-sided into kvxfer.alloc's memory, but into other memory",
        (False, False): "not one-sided: the receiver has to take part",
    }
    for transport, probe in ucx["probes"].items():
        said = answers[probe["ucx_memory"], probe["other_memory"]]
        if probe["error"] is not None:
            said = f"FAILED: {probe['error']}"
        elif probe["lanes"] and transport not in probe["lanes"]:
            said = f"not used: for host memory of two processes UCX takes {', '.join(probe['lanes'])}"
        rows.append((f"ucx {transport}", said))
    return rows


def _look_at_rdma(ucx: Found, host: Found, gpus: Found, problems: list[str]) -> Found:
    """Lines that do not apply, to a host without a GPU or without a card, are no problems."""
    found = rdma.look(ucx, host, gpus)
    problems += [
        f"{line['name']}: {line['found']}; {line['advice']}"
        for line in found["lines"]
        if line["state"] in ("warn", "fail") and line["name"] not in _SAID_BEFORE
    ]
    return found


def _show_rdma(found: Found) -> None:
    rows = [
        (line["name"], line["state"], line["found"])
        for line in found["lines"]
        if line["state"] != "not applicable"
    ]
    if not rows:
        print("\nGPUDirect RDMA: not applicable, for this host has neither an NVIDIA GPU nor an RDMA card.")
        return
    rows += [
        (f"rail of GPU {rail['gpu']}", ", ".join(rail["names"]) or "none", rail["why"])
        for rail in found["rails"]
    ]
    print("\nWhat must be true for cards to read and write the memory of GPUs (docs/rdma.md):\n")
    print(table(rows))


def _show(found: Found) -> None:
    print(
        table(
            _rows_of_ucx(found["ucx"]) + _rows_of_host(found["host"]) + _rows_of_gpus(found["gpus"]),
            indent="",
        )
    )
    print("\nBetween two processes on this host, 64 MiB in pieces of 4 KiB, from push to Success:\n")
    print(table(_rows_of_fabrics(found["fabrics"])))
    _show_rdma(found["rdma"])
    if not found["problems"]:
        print("\nNo problem was found.")
        return
    print("\nWhat limits this host, and what to do:\n")
    for number, problem in enumerate(found["problems"], 1):
        print(f"  {number}. {problem}")


def run(options: argparse.Namespace) -> int:
    """The command; 1 if shared memory itself fails."""
    problems: list[str] = []
    progress("looking at UCX, the host and the GPUs")
    ucx = _look_at_ucx(problems)
    host = _look_at_host(ucx, problems)
    gpus = _look_at_gpus(problems)
    gpudirect = _look_at_rdma(ucx, host, gpus, problems)
    fabrics = _test_fabrics(ucx, problems)
    found = {
        "ucx": ucx,
        "host": host,
        "gpus": gpus,
        "rdma": gpudirect,
        "fabrics": fabrics,
        "problems": problems,
    }
    if options.json:
        print_json(found)
    else:
        _show(found)
    return 0 if fabrics["shm"]["ok"] else 1
