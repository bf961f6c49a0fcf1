"""The model behind `kvxfer demo`: SmolLM2-135M-Instruct in plain numpy, with its KV cache in pages.

The parts, from the bottom up:

* `gguf_file` reads the model file, `weights` dequantises it;
* `tokenizer` turns a chat into tokens and tokens into text;
* `comm` sums arrays over the ranks of one tensor-parallel engine;
* `model` is the forward pass over KV pages that the caller owns;
* `reference` answers a prompt in one process, as the truth to compare with.

Nothing here transfers anything: the pages are numpy views that the caller may have put in `kvxfer` memory.
Importing the package needs numpy only; the packages of the `demo` extra are imported where they are used,
and their absence is a `DemoUnavailable` that says what to install.
"""

from __future__ import annotations

import os

__all__ = ["DemoUnavailable", "blas_env"]


class DemoUnavailable(RuntimeError):
    """A package or the model file that the demo needs is missing; the message says what to install."""


def blas_env(threads: int = 1) -> dict[str, str]:
    """Environment for a process that is about to import numpy: how many threads its BLAS may use.

    BLAS reads these variables once, when it is loaded, so they must be set by whoever starts the process.
    Use one thread wherever ranks share the machine: it avoids more threads than cores, and it lets results
    be compared bit for bit, because a BLAS may add up in another order when it has more threads.

    Args:
        threads: threads per process, at least 1.

    Returns:
        A copy of `os.environ` with the variables of the common BLAS libraries set.

    Raises:
        ValueError: if `threads` is below 1.
    """
    if threads < 1:
        raise ValueError(f"a process needs at least 1 BLAS thread, got {threads}")
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(threads))}
