"""kvxfer's connector for vLLM.

    --kv-transfer-config '{"kv_connector": "KvxferConnector", "kv_connector_module_path": "kvxfer.vllm",
                           "kv_role": "kv_producer"}'

and `"kv_consumer"` on the other side; docs/vllm.md has the settings. The parts, from the bottom up:

* `meta` is what the scheduler's half tells the worker's half in a step;
* `settings` reads the configuration, and refuses by name what it cannot honour;
* `scheduler` keeps the books of requests and rooms, and knows nothing of vLLM;
* `layout` finds out how pages lie in vLLM's tensors;
* `worker` has the agent of one rank;
* `stats` is what the log line and the metrics say;
* `connector` is the class that vLLM loads.

Importing this package does not import vLLM; taking `KvxferConnector` from it does.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvxferConnector"]


def __getattr__(name: str) -> Any:
    """`KvxferConnector`, whose module needs vLLM."""
    if name == "KvxferConnector":
        from kvxfer.vllm.connector import KvxferConnector

        return KvxferConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
