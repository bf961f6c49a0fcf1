"""A process that has imported vLLM, and forks servers: importing it takes half a minute of a core each time.

Reads one line of JSON for each server from standard input, `{"args": [...], "env": {...}, "log": path}`, and
answers with its process id. What a server forks belongs to its process group. When standard input ends, all
servers end.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Any

# What a server imports before it loads its model.
_NEEDED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.engine.utils",
    "vllm.v1.worker.cpu_worker",
    "kvxfer.vllm.connector",
)


def serve(order: dict[str, Any]) -> None:
    """The child's half: what `vllm serve` does with these arguments."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.update(order["env"])

    from vllm.entrypoints.launchers.api_server.entry import main as serve_api

    sys.argv = ["api_server", *order["args"]]
    serve_api()


def _obey(order: dict[str, Any], servers: list[int]) -> None:
    """Forks a server, or takes the status of one that was killed."""
    if "reap" in order:
        status = os.waitpid(order["reap"], 0)[1]
        servers.remove(order["reap"])
        print(json.dumps({"status": status}), flush=True)
        return
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            serve(order)
            code = 0
        finally:
            os._exit(code)
    servers.append(pid)
    print(json.dumps({"pid": pid}), flush=True)


def main() -> int:
    """Forks on order, and ends what it forked."""
    import multiprocessing

    import vllm.utils.system_utils as system

    for name in _NEEDED:
        importlib.import_module(name)

    # The CPU platform asks for processes that import everything anew.
    fork = multiprocessing.get_context("fork")
    for name, module in list(sys.modules.items()):
        ours = name.startswith("vllm.") and module is not system
        if ours and vars(module).get("get_mp_context") is system.get_mp_context:
            vars(module)["get_mp_context"] = lambda: fork
    system.get_mp_context = lambda: fork  # type: ignore[assignment]

    # Else each server looks at its model's class in yet another process.
    from vllm.model_executor.models.registry import ModelRegistry, _try_inspect_model_cls

    _try_inspect_model_cls("LlamaForCausalLM", ModelRegistry.models["LlamaForCausalLM"])

    print(json.dumps({"ready": True}), flush=True)
    servers: list[int] = []
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Also where a whole group of processes is told to end, the servers are not left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        for line in sys.stdin:
            _obey(json.loads(line), servers)
    finally:
        for pid in servers:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
