"""vLLM's real scheduler with the real connector, over CPU tensors whose "KV" a function of tokens and
positions stands for.

Nothing is computed: a step writes what a model would have written, so that what arrives can be compared, and
a token that is "sampled" from pages that do not hold the prompt is wrong.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.vllm.connector import KvxferConnector

LAYERS, HEADS, DIM = 3, 4, 8
VOCAB = 50_000
_names = itertools.count()


def tiny_model(folder: Path, heads: int = HEADS) -> Path:
    """A Llama of which there is nothing but its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 12 * DIM,
        "intermediate_size": 64,
        "num_attention_heads": 12,
        "num_key_value_heads": heads,
        "num_hidden_layers": LAYERS,
        "head_dim": DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def next_token(tokens: list[int]) -> int:
    """The token that the "model" answers after these."""
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + len(tokens)) % VOCAB


class Engine:
    """A scheduler and the connectors of its ranks, which the test steps."""

    def __init__(
        self,
        folder: Path,
        role: str,
        /,
        *,
        tp: int = 1,
        block: int = 16,
        blocks: int = 64,
        order: str = "HND",
        cross_layer: bool = False,
        prefix_cache: bool = False,
        batch: int = 512,
        policy: str = "fail",
        ahead: bool = False,
        heads: int = HEADS,
        **extra: Any,
    ) -> None:
        self.block, self.tp, self.heads = block, tp, heads
        config = EngineArgs(
            model=str(tiny_model(folder / f"heads-{heads}", heads)),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            block_size=block,
            max_model_len=1024,
            max_num_batched_tokens=batch,
            max_num_seqs=16,
            enable_prefix_caching=prefix_cache,
            enforce_eager=True,
            async_scheduling=ahead,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvxferConnector",
                kv_connector_module_path="kvxfer.vllm",
                kv_role=role,
                kv_load_failure_policy=policy,
                kv_connector_extra_config=extra,
            ),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        self.config: VllmConfig = config
        names = [f"layer.{i}" for i in range(LAYERS)]
        mine = max(1, heads // tp)
        spec = FullAttentionSpec(block_size=block, num_kv_heads=mine, head_size=DIM, dtype=torch.float32)
        self.cache = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(block, sha256) if prefix_cache else None
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            config, self.cache, StructuredOutputManager(config), block_size=block, log_stats=True
        )
        # With asynchronous scheduling, the default of vLLM's servers, the next step is scheduled before the
        # scheduler has seen what came of the last one.
        self.ahead = ahead
        self._under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.tables: dict[str, list[int]] = {}
        # As the workers know them, which is before the scheduler does.
        self.tokens: dict[str, list[int]] = {}
        self.tensors: list[list[torch.Tensor]] = []
        self.workers: list[KvxferConnector] = []
        parallel = config.parallel_config
        parallel.tensor_parallel_size = tp
        for rank in range(tp):
            tensors = self._memory(mine, blocks, order, cross_layer)
            worker = KvxferConnector(config, KVConnectorRole.WORKER, self.cache)
            worker._tp_rank = lambda rank=rank: rank  # type: ignore[method-assign, misc]
            worker._pp_rank = lambda: 0  # type: ignore[method-assign]
            worker.register_kv_caches(dict(zip(names, tensors, strict=True)))
            self.tensors.append(tensors)
            self.workers.append(worker)
        self.names = names
        self.aggregator = KVOutputAggregator(tp)
        self.answers: dict[str, list[int]] = {}
        self.errors: set[str] = set()
        # What 0.33 says of them.
        self.words: dict[str, str] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.sent: list[str] = []
        self.received: list[str] = []
        self.on_output: Callable[[KVConnectorOutput], None] = lambda output: None

    def _memory(self, heads: int, blocks: int, order: str, cross_layer: bool) -> list[torch.Tensor]:
        """Each layer's tensor, of shape [blocks, heads, tokens, 2 * dim] whatever the order in memory."""
        inside = (heads, self.block, 2 * DIM) if order == "HND" else (self.block, heads, 2 * DIM)
        if cross_layer:
            whole = torch.zeros(blocks, LAYERS, *inside)
            layers = [whole[:, i] for i in range(LAYERS)]
        else:
            layers = [torch.zeros(blocks, *inside) for _ in range(LAYERS)]
        return layers if order == "HND" else [layer.permute(0, 2, 1, 3) for layer in layers]

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()

    def kill(self) -> None:
        """Ends without a word to vLLM; the agents say farewell to their peers, as a server's shutdown
        does.
        """
        self.close()

    def add(
        self,
        tokens: list[int],
        params: dict[str, Any] | None,
        *,
        max_tokens: int = 3,
        name: str | None = None,
        logprobs: int | None = None,
    ) -> str:
        """A request as the server's front end makes it: its id has a suffix of its own on each server."""
        name = name or f"req-{next(_names):08x}"
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0,
            prompt_logprobs=logprobs,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        sampling.update_from_generation_config({}, VOCAB - 1)
        request = Request(name, list(tokens), sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        self.answers[name] = []
        return name

    def preempt(self) -> None:
        """Takes the pages of all that run, as vLLM does where they are short."""
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError as error:
            # Pages of hand-offs stay where they are; what ran was preempted all the same.
            if "remote KV transfer" not in str(error):
                raise

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One turn of the engine's loop, as EngineCore does it."""
        if not self.ahead or self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._under_way.append((output, self.execute(output)))
            if self.ahead and len(self._under_way) < 2 and self.scheduler.has_requests():
                return
        if self._under_way:
            self.finish(*self._under_way.popleft())

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The workers' half of a step, in the order in which the CPU's runner calls."""
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.tokens[new.req_id] = list(new.prompt_token_ids)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            fresh = cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                self.tables[name] = []
                # Tokens that were sampled before it was preempted may not have counted.
                self.tokens[name] = list(self.scheduler.requests[name].all_token_ids)
            if fresh:
                self.tables[name].extend(fresh[0])
        outputs = []
        ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = [[] for _ in ids]
        for rank, worker in enumerate(self.workers):
            worker.bind_connector_metadata(output.kv_connector_metadata)
            if ids:
                for layer, name in enumerate(self.names):
                    for request in ids:
                        self._compute(rank, layer, request, output)
                    worker.save_kv_layer(name, self.tensors[rank][layer], None)
                for i, request in enumerate(ids):
                    sampled[i] = self._sample(rank, request, output)
            worker.start_load_kv(None)
            worker.wait_for_save()
            results = worker.get_transfer_results(output.finished_req_ids)
            outputs.append(
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={name: i for i, name in enumerate(ids)},
                    sampled_token_ids=sampled,
                    kv_connector_output=KVConnectorOutput(
                        finished_sending=results.finished_sending,
                        finished_recving=results.finished_recving,
                        failed_recving=results.failed_recving,
                        kv_connector_stats=worker.get_kv_connector_stats(),
                        kv_connector_worker_meta=worker.build_connector_worker_meta(),
                    ),
                )
            )
            worker.clear_connector_metadata()
        for request, tokens in zip(ids, sampled, strict=True):
            self.tokens[request] += tokens
        result = self.aggregator.aggregate(outputs)
        assert result is not None
        return result

    def finish(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """The scheduler's half of a step's end."""
        seen = result.kv_connector_output
        if seen is not None:
            self.sent += seen.finished_sending or ()
            self.received += seen.finished_recving or ()
            self.on_output(seen)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for item in outputs.outputs:
                self.answers[item.request_id] += item.new_token_ids
                if item.kv_transfer_params:
                    self.params[item.request_id] = item.kv_transfer_params
                if item.finish_reason is not None and str(item.finish_reason) == "error":
                    self.errors.add(item.request_id)
                    self.words[item.request_id] = getattr(getattr(item, "error", None), "message", "")

    def _span(self, request: str, output: SchedulerOutput) -> range:
        count = output.num_scheduled_tokens[request]
        for new in output.scheduled_new_reqs:
            if new.req_id == request:
                return range(new.num_computed_tokens, new.num_computed_tokens + count)
        i = output.scheduled_cached_reqs.req_ids.index(request)
        start = output.scheduled_cached_reqs.num_computed_tokens[i]
        return range(start, start + count)

    def _value(self, rank: int, layer: int, token: int, position: int) -> torch.Tensor:
        """What the "model" writes for a token: [heads of the rank, 2 * dim]."""
        mine = max(1, self.heads // self.tp)
        first = rank * self.heads // self.tp
        heads = torch.arange(first, first + mine).unsqueeze(1)
        return (
            (token % 1009) + position * 0.25 + layer * 4096.0 + heads * 16384.0 + torch.arange(2 * DIM) / 64
        )

    def _compute(self, rank: int, layer: int, request: str, output: SchedulerOutput) -> None:
        tokens, table = self.tokens[request], self.tables[request]
        for position in self._span(request, output):
            page = self.tensors[rank][layer][table[position // self.block]]
            page[:, position % self.block] = self._value(rank, layer, tokens[position], position)

    def wrong(self, request: str, end: int, rank: int = 0) -> int:
        """How many of a request's first tokens have other KV than their own."""
        tokens, table = self.tokens[request], self.tables[request]
        bad = 0
        for position in range(end):
            for layer in range(LAYERS):
                page = self.tensors[rank][layer][table[position // self.block]]
                bad += not torch.equal(
                    page[:, position % self.block], self._value(rank, layer, tokens[position], position)
                )
        return bad

    def _sample(self, rank: int, request: str, output: SchedulerOutput) -> list[int]:
        tokens = self.tokens[request]
        span = self._span(request, output)
        if span.stop < len(tokens):
            return []
        if self.wrong(request, span.stop, rank):
            return [VOCAB - 1]
        return [next_token(tokens)]

    @property
    def used(self) -> int:
        """Pages that are not free."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return self.cache.num_blocks - 1 - pool.get_num_free_blocks()

    @property
    def idle(self) -> bool:
        """Whether vLLM would stop stepping this engine."""
        return not self._under_way and not self.scheduler.has_requests()


def answer_of(tokens: list[int], count: int) -> list[int]:
    """What a plain server answers."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[-count:]


def facts(engine: Engine) -> SimpleNamespace:
    """Counters of an engine's agents, added up."""
    total: dict[str, int] = {}
    for worker in engine.workers:
        assert worker._agent is not None
        for name, value in worker._agent.stats().items():
            total[name] = total.get(name, 0) + value
    return SimpleNamespace(**total)
