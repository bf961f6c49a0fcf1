"""One process that does it all: what a disaggregated answer is compared with.

`python -m kvxfer.demo.reference "What is the capital of France?"` prints the answer as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from . import DemoUnavailable
from .gguf_file import GgufError
from .model import Model, Order, PagedCache, generate, greedy, prefill
from .tokenizer import Tokenizer
from .weights import Weights

__all__ = ["Reference", "answer", "main"]


@dataclass(frozen=True)
class Reference:
    """An answer and how long it took."""

    prompt_tokens: int
    tokens: list[int]
    """The answer's tokens, without the one that ends it."""
    text: str
    prefill_ms: float
    decode_ms: float


def answer(
    weights: Weights,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    *,
    max_tokens: int = 64,
    page_tokens: int = 16,
    dtype: npt.DTypeLike = np.float16,
    order: Order = "HND",
    chunk: int | None = None,
) -> Reference:
    """Answers a prompt with one rank and ordinary memory.

    For an answer that must equal another engine's bit for bit, give the same `dtype` and `chunk`.

    Args:
        weights: the model.
        tokenizer: its tokenizer.
        prompt: the prompt's tokens, as from `Tokenizer.chat`.
        max_tokens: at most so many tokens are written.
        page_tokens: tokens a page.
        dtype: float16 or float32 pages.
        order: HND or NHD pages.
        chunk: tokens a prefill chunk; `None` takes the prompt at once.
    """
    count = -(-(len(prompt) + max_tokens) // page_tokens)
    cache = PagedCache.allocate(
        weights.config, pages=count, page_tokens=page_tokens, dtype=dtype, order=order
    )
    model = Model(weights, cache)
    pages = list(range(count))
    begin = time.perf_counter()
    first = greedy(prefill(model, prompt, pages, chunk=chunk))
    middle = time.perf_counter()
    eos = tokenizer.eos
    tokens = list(generate(model, first, len(prompt), pages, max_tokens=max_tokens, eos=eos))
    end = time.perf_counter()
    return Reference(
        prompt_tokens=len(prompt),
        tokens=tokens,
        text=tokenizer.decode(tokens),
        prefill_ms=(middle - begin) * 1e3,
        decode_ms=(end - middle) * 1e3,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvxfer.demo.reference", description=__doc__)
    parser.add_argument("question", help="what the user says")
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="length of the answer at most (default 64)"
    )
    parser.add_argument("--page-tokens", type=int, default=16, help="tokens a page (default 16)")
    parser.add_argument(
        "--chunk", type=int, default=None, help="tokens a prefill chunk (default: all at once)"
    )
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="of the pages")
    parser.add_argument("--order", choices=("HND", "NHD"), default="HND", help="of the pages")
    options = parser.parse_args(arguments)
    try:
        weights = Weights()
        tokenizer = Tokenizer(weights.file)
        result = answer(
            weights,
            tokenizer,
            tokenizer.chat(options.question),
            max_tokens=options.max_tokens,
            page_tokens=options.page_tokens,
            dtype=options.dtype,
            order=options.order,
            chunk=options.chunk,
        )
    except (DemoUnavailable, GgufError, ValueError) as err:
        print(f"kvxfer demo: {err}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
