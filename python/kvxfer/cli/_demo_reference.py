"""The process of the demo that has the tokenizer, and that answers the prompt alone."""

from __future__ import annotations

from typing import Any

from kvxfer.cli._worker import Link, run
from kvxfer.demo import DemoUnavailable
from kvxfer.demo.gguf_file import GgufError
from kvxfer.demo.reference import answer
from kvxfer.demo.tokenizer import Tokenizer
from kvxfer.demo.weights import Weights


def _work(link: Link, config: dict[str, Any]) -> None:
    weights = Weights()
    tokenizer = Tokenizer(weights.file)
    tokens = tokenizer.chat(config["prompt"])
    context = weights.config.context
    if len(tokens) + config["max_tokens"] > context:
        raise ValueError(
            f"the prompt's {len(tokens)} tokens and --max-tokens {config['max_tokens']} are more than the "
            f"model's {context}: give a shorter --prompt or fewer --max-tokens"
        )
    link.send("prompt", tokens=tokens, eos=tokenizer.eos)
    for index in range(weights.slices):
        weights.model_slice(index)
    link.send("loaded")
    link.receive()
    # The same type of pages and the same chunks as the ranks have: then the tokens must be the same too.
    result = answer(
        weights,
        tokenizer,
        tokens,
        max_tokens=config["max_tokens"],
        page_tokens=config["page_tokens"],
        chunk=config["chunk"],
    )
    link.send(
        "answered",
        tokens=result.tokens,
        text=result.text,
        prefill_ms=result.prefill_ms,
        decode_ms=result.decode_ms,
    )


if __name__ == "__main__":
    run(_work, (DemoUnavailable, GgufError, ValueError))
