"""What servers are asked, and what a plain server answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from servers import Answer, Server, post, question

# In natural logarithms. Weights and KV are bfloat16, whose rounding moves the model's logits by up to about
# this.
TIE = 0.25

SHORT = "The capital of France is"
STORY = "Once upon a time there was a small dog who lived in a big house near the sea. " * 24
LIST = "Count on: one, two, three, four, five,"


@dataclass(frozen=True)
class Truth:
    """What the plain server answers when asked alone."""

    tokens: list[int]
    # How much likelier each token was than the next best, in natural logarithms.
    margins: list[float]

    def check(self, tokens: list[int]) -> bool:
        """Whether an answer is the same. It may depart from the truth only at a tie: what else a batch or a
        prefix cache holds changes how the CPU's kernels round, and a tie is what rounding decides.
        """
        assert len(tokens) == len(self.tokens)
        if tokens == self.tokens:
            return True
        first = next(i for i, (a, b) in enumerate(zip(tokens, self.tokens, strict=True)) if a != b)
        assert self.margins[first] < TIE, (tokens, self)
        return False


class Plain:
    """The plain server's answers; each is asked for once, and alone."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._known: dict[tuple[str, int], Truth] = {}

    def __call__(self, prompt: str, tokens: int = 16) -> Truth:
        if (prompt, tokens) not in self._known:
            answer = post(self.server.port, {**question(prompt, tokens), "logprobs": 2})
            assert answer.status == 200, answer.body
            best = answer.body["choices"][0]["logprobs"]["top_logprobs"]
            margins = [max(item.values()) - min(item.values()) for item in best]
            self._known[prompt, tokens] = Truth(answer.tokens, margins)
        return self._known[prompt, tokens]


def whole(answer: Answer) -> list[int]:
    """The tokens of an answer that came to its end, as it was to."""
    assert answer.status == 200, answer.body
    assert answer.whole, answer.body
    assert answer.body["choices"][0]["finish_reason"] == "length"
    return answer.tokens


def together(
    ask: Callable[[str], Answer], truth: Callable[[str, int], Truth], prompts: Sequence[str], tokens: int
) -> None:
    """Many at once: none fails, and each answer is the plain server's. That pages arrived whole, checksums
    say.
    """
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    same = sum(truth(one, tokens).check(whole(found)) for one, found in zip(prompts, answers, strict=True))
    assert same >= 0.7 * len(prompts)
