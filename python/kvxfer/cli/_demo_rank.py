"""One prefill or decode rank of the demo: a process with a share of the model, a pool and an agent."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

import kvxfer as kx
from kvxfer.cli._worker import Link, run
from kvxfer.demo import DemoUnavailable
from kvxfer.demo.comm import CommError, LocalComm
from kvxfer.demo.gguf_file import GgufError
from kvxfer.demo.model import Model, PagedCache, generate, greedy, prefill
from kvxfer.demo.tokenizer import Tokenizer
from kvxfer.demo.weights import Weights

# Long enough for the slowest rank to compute, short enough that a demo that hangs says so.
_ROOM_S = 90.0


class _Rank:
    """What both sides have: the model's share, its pages in kvxfer's memory, and the agent."""

    def __init__(self, link: Link, config: dict[str, Any]) -> None:
        self.link, self.config = link, config
        began = time.perf_counter()
        self.weights = Weights()
        self.tp_rank, self.tp_size = config["tp_rank"], config["tp_size"]
        share = self.weights.slices // self.tp_size
        for index in range(share):
            self.weights.model_slice(self.tp_rank * share + index)
        fingerprint = self.weights.fingerprint
        link.send("loaded", ms=(time.perf_counter() - began) * 1e3)

        asked = link.receive()
        self.tokens: list[int] = asked["tokens"]
        self.eos: int = asked["eos"]
        directory = None if config["side"] == "prefill" and self.tp_rank == 0 else link.receive()["directory"]
        model = self.weights.config
        layout = kx.PageLayout(
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            page_tokens=config["page_tokens"],
            dtype="float16",
            order=config["order"],
        )
        self.layers = model.layers
        self.page_tokens: int = config["page_tokens"]
        needed = -(-(len(self.tokens) + config["max_tokens"]) // self.page_tokens)
        shard = kx.Shard(tp_rank=self.tp_rank, tp_size=self.tp_size)
        pool = kx.alloc(layout, shard, pages=2 * needed, fabric=config["fabric"])
        cache = PagedCache(
            [pool.k(i) for i in range(self.layers)], [pool.v(i) for i in range(self.layers)], layout.order
        )
        comm = None
        if self.tp_size > 1:
            comm = LocalComm.from_filenos(
                self.tp_rank, self.tp_size, config["comm_fds"], config["comm_timeout"]
            )
        self.model = Model(self.weights, cache, self.tp_rank, self.tp_size, comm)
        # Every rank has page ids of its own, in no order, as a server that has run for a while has.
        self.pages: npt.NDArray[np.int32] = (
            np.random.default_rng().permutation(2 * needed)[:needed].astype(np.int32)
        )
        self.agent = kx.Agent(
            config["name"],
            layout,
            shard,
            memory=pool,
            directory=directory,
            engine=config["side"],
            role=config["side"],
            model=fingerprint,
            fabric=config["fabric"],
            secret=config["secret"],
        )
        link.send("listening", address=self.agent.address)
        self.directory: str = self.agent.address if directory is None else directory
        link.receive()

    def prefill(self) -> None:
        """Computes the prompt and pushes each layer's pages as soon as they are written."""
        room, tokens, size = self.config["room"], self.tokens, self.page_tokens
        chunk: int = self.config["chunk"]
        push_ns: list[int] = []
        final: list[tuple[int, int]] = []

        def push(layer: int, first: int, count: int, *, meta: bytes | None = None) -> None:
            pages = self.pages[first // size : -(-(first + count) // size)]
            layers = (layer, layer + 1)
            last = meta is not None
            begin = time.perf_counter_ns()
            self.agent.push(room, pages, start=first, tokens=count, layers=layers, last=last, meta=meta)
            push_ns.append(time.perf_counter_ns() - begin)

        def on_layer(layer: int, first: int, count: int) -> None:
            if layer == self.layers - 1 and first + count == len(tokens):
                # The last push carries the first token, which is known when this layer is through.
                final.append((first, count))
            else:
                push(layer, first, count)

        begin = time.perf_counter()
        logits = prefill(
            self.model, tokens, [int(page) for page in self.pages], chunk=chunk, on_layer=on_layer
        )
        first_token = greedy(logits)
        last_push_ns = time.monotonic_ns()
        push(self.layers - 1, *final[0], meta=first_token.to_bytes(4, "little"))
        prefill_ms = (time.perf_counter() - begin) * 1e3
        self.agent.wait(room, _ROOM_S)
        self.link.send("pushed", push_ns=push_ns, last_push_ns=last_push_ns, prefill_ms=prefill_ms)

    def decode(self) -> None:
        """Grants pages, and answers out of them once they hold the prompt."""
        room, count = self.config["room"], -(-len(self.tokens) // self.page_tokens)
        granted = self.pages[:count]
        begin = time.perf_counter_ns()
        self.agent.expect(room, granted, tokens=len(self.tokens), source=self.directory)
        expect_ns = time.perf_counter_ns() - begin
        event = self.agent.wait(room, _ROOM_S)
        if event.meta is None:
            raise kx.ProtocolError("the hand-off has ended well, but without the first token")
        first_token = int.from_bytes(event.meta, "little")
        begin_s = time.perf_counter()
        tokens = list(
            generate(
                self.model,
                first_token,
                len(self.tokens),
                [int(page) for page in self.pages],
                max_tokens=self.config["max_tokens"],
                eos=self.eos,
            )
        )
        decode_ms = (time.perf_counter() - begin_s) * 1e3
        self.link.send(
            "answered",
            tokens=tokens,
            text=Tokenizer(self.weights.file).decode(tokens) if self.tp_rank == 0 else None,
            pages=count,
            bytes=event.stats.bytes,
            success_ns=event.stats.at_us * 1000,
            expect_ns=expect_ns,
            decode_ms=decode_ms,
        )


def _work(link: Link, config: dict[str, Any]) -> None:
    rank = _Rank(link, config)
    with rank.agent:
        if config["side"] == "prefill":
            rank.prefill()
        else:
            rank.decode()
        # The other side may still be at work with this one.
        link.receive()


if __name__ == "__main__":
    run(_work, (DemoUnavailable, GgufError, CommError, ValueError, kx.KvxferError))
