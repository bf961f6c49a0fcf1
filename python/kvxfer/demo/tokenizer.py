"""SmolLM2's tokenizer, built from what the GGUF file says about it.

The file has the vocabulary, the merges and the special tokens, but names the way text is cut into words
only by a keyword (`smollm`): each digit alone, then the byte-level rule of GPT-2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from . import DemoUnavailable
from .gguf_file import GgufError, GgufFile

__all__ = ["Tokenizer"]

_CONTROL = 3
_TURN_START, _TURN_END = "<|im_start|>", "<|im_end|>"


class Tokenizer:
    """Text to tokens and back.

    Args:
        file: the model file, as in `Weights(...).file`.

    Raises:
        DemoUnavailable: if the `tokenizers` package is missing.
        GgufError: if the file's tokenizer is of another kind.
    """

    def __init__(self, file: GgufFile) -> None:
        kind = (file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str))
        if kind != ("gpt2", "smollm"):
            raise GgufError(f"{file.path}: tokenizer {kind[0]}/{kind[1]}, the demo knows gpt2/smollm only")
        tokens: list[str] = file.get("tokenizer.ggml.tokens", list)
        types: list[int] = file.get("tokenizer.ggml.token_type", list)
        self._special = {
            text: i for i, (text, t) in enumerate(zip(tokens, types, strict=True)) if t == _CONTROL
        }
        for needed in (_TURN_START, _TURN_END):
            if needed not in self._special:
                raise GgufError(f"{file.path}: the vocabulary has no special token {needed}")
        self.vocab_size = len(tokens)
        self.eos = file.get("tokenizer.ggml.eos_token_id", int)
        """The token that ends an answer."""
        self.default_system = _default_system(file)
        """What the chat template says when the chat has no system message."""
        self._tokenizer = _build(tokens, file.get("tokenizer.ggml.merges", list), list(self._special))

    def encode(self, text: str) -> list[int]:
        """The tokens of plain text. Special tokens spelt out in it are taken as text, not as tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of `tokens`, without special tokens unless `keep_special`.

        A character cut in the middle of its bytes comes out as U+FFFD.
        """
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=not keep_special)
        return text

    def chat(self, messages: str | Sequence[tuple[str, str]]) -> list[int]:
        """The tokens of a chat, up to where the assistant's answer begins.

        Args:
            messages: a single user message, or `(role, content)` pairs with roles `system`, `user` and
                `assistant`. Without a leading system message the model's default one is put first.
        """
        turns = [("user", messages)] if isinstance(messages, str) else list(messages)
        if not turns or turns[0][0] != "system":
            turns.insert(0, ("system", self.default_system))
        start, end = self._special[_TURN_START], self._special[_TURN_END]
        newline = self.encode("\n")
        ids: list[int] = []
        for role, content in turns:
            ids += [start, *self.encode(f"{role}\n{content}"), end, *newline]
        return [*ids, start, *self.encode("assistant\n")]


def _default_system(file: GgufFile) -> str:
    """The default system message, out of the file's chat template, which must be the one known here."""
    template = file.get("tokenizer.chat_template", str)
    turn = re.escape("{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}")
    found = re.search(r"<\|im_start\|>system\n(?P<system>.*?)<\|im_end\|>\n.*" + turn, template, re.DOTALL)
    if found is None:
        raise GgufError(f"{file.path}: the chat template is not SmolLM2-Instruct's: {template[:200]!r}")
    return found["system"]


def _build(tokens: list[str], merges: list[str], special: list[str]) -> Any:
    try:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend
    except ImportError as err:
        raise DemoUnavailable("the demo needs package tokenizers: pip install tokenizers") from err
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise GgufError(f"merge {merge!r} is not a pair of tokens")
        pairs.append((left, right))
    backend = Backend(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    # `chat` puts special tokens in by number; a user's text must not be able to.
    backend.encode_special_tokens = True
    return backend
