"""The class that vLLM loads: its hooks, each of which hands on to `scheduler` or `worker`.

Supports vLLM 0.32 and 0.33. Of 0.33's hooks for sleep mode it says that it does not take part, since the
agent's peers know the memory for as long as the engine lives.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

import kvxfer as kx
from kvxfer.vllm import layout as forms
from kvxfer.vllm.meta import Orders
from kvxfer.vllm.prometheus import KvxferPromMetrics, KvxferStats
from kvxfer.vllm.scheduler import Books, Scheduled
from kvxfer.vllm.settings import Settings, read_settings, refuse_fields
from kvxfer.vllm.worker import Rank, Results

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KvxferConnector", "KvxferMetadata", "KvxferRefusals"]

_log = logging.getLogger("vllm.kvxfer")


class KvxferMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, in the class that vLLM asks for."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class KvxferRefusals(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Requests whose rooms the workers' agents refused, and why, in the class that vLLM asks for."""

    def __init__(self, why: dict[str, str]) -> None:
        self.why = why

    def aggregate(self, other: KvxferRefusals) -> KvxferRefusals:
        """All ranks'."""
        return KvxferRefusals({**other.why, **self.why})


class _Copied:
    """Pages whose tiles are kept apart in memory of the agent's own (see `layout`)."""

    def __init__(self, native: list[torch.Tensor], first: int, isa: str) -> None:
        self._native, self._first, self._isa = native, first, isa
        blocks, heads, tokens, content = native[0].shape
        shape = (blocks, heads, tokens // forms.TILE, 2, forms.TILE * content // 2)
        self.memory = [torch.zeros(shape, dtype=native[0].dtype) for _ in native]

    def out(self, layer: int, blocks: npt.NDArray[np.int32]) -> None:
        """A layer's blocks, converted into the agent's memory."""
        ids = torch.from_numpy(blocks).long()
        layer -= self._first
        self.memory[layer][ids] = forms.tiles_of(self._native[layer][ids], self._isa)

    def into(self, blocks: npt.NDArray[np.int32]) -> None:
        """Blocks that have come, converted into the engine's memory."""
        ids = torch.from_numpy(blocks).long()
        for native, memory in zip(self._native, self.memory, strict=True):
            native[ids] = forms.blocks_of(memory[ids], self._isa, native.shape[2])


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands prompts' KV pages from vLLM to vLLM through kvxfer."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.kv_transfer_config
        refuse_fields(config)
        parallel = vllm_config.parallel_config
        self._kx: Settings = read_settings(
            config.kv_connector_extra_config,
            role=config.kv_role,
            engine=config.engine_id,
            dp_index=parallel.data_parallel_index,
            dp_size=parallel.data_parallel_size,
        )
        groups = len(kv_cache_config.kv_cache_groups)
        if groups > 1:
            raise kx.NotSupported(
                f"the model has {groups} groups of KV pages, and KvxferConnector hands off one so far: start"
                " vLLM with --disable-hybrid-kv-cache-manager"
            )
        for group in kv_cache_config.kv_cache_groups:
            _needs_all_pages(group.kv_cache_spec)
        self._block_size: int = vllm_config.cache_config.block_size
        self._books: Books | None = None
        self._rank: Rank | None = None
        self._agent: kx.Agent | None = None
        self._layers: dict[str, int] = {}
        self._tensors: list[torch.Tensor] = []
        self._saved_s = 0.0
        self._began_s = 0.0
        self._worked = False
        self._refused: dict[str, str] = {}
        self._recomputes: bool = config.kv_load_failure_policy == "recompute"
        if role == KVConnectorRole.SCHEDULER:
            self._books = Books(self._kx, self._block_size)
            self._told = (0, 0)
            # Requests that the agents refused, until vLLM asks about them again.
            self._to_fail: dict[str, str] = {}

    # Scheduler's side

    def on_new_request(self, request: Request) -> None:
        """Looks at what a request asks for."""
        books, name, params = self._its_books(), request.request_id, request.kv_transfer_params
        if request.abort_immediately:
            books.rejected(name, params)
        elif (why := books.new_request(name, params, request.num_prompt_tokens)) is not None:
            _fail(request, why)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How much of the prompt comes from the prefill engine."""
        if (why := self._to_fail.pop(request.request_id, None)) is not None:
            _fail(request, why)
            # It is not scheduled now, and never again.
            return None, False
        return self._its_books().matched(request.request_id, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The pages are there: they can be granted."""
        self._its_books().allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A hand-off fills the request's own pages, of every group."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """This step's orders."""
        counts = scheduler_output.num_scheduled_tokens
        orders = self._its_books().step(
            _scheduled(scheduler_output, counts), scheduler_output.preempted_req_ids or ()
        )
        return KvxferMetadata(orders)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether a request's pages must stay, and the room for the proxy."""
        self._to_fail.pop(request.request_id, None)
        aborted = request.status in (
            RequestStatus.FINISHED_ABORTED,
            RequestStatus.FINISHED_IGNORED,
            RequestStatus.FINISHED_ERROR,
        )
        return self._its_books().finished(request.request_id, aborted=aborted)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers report of a step."""
        books, failed = self._its_books(), connector_output.failed_recving or set()
        for name in connector_output.finished_recving or ():
            if name not in failed:
                books.loaded(name)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvxferRefusals):
            for name, why in meta.why.items():
                if (text := books.refused_by_agent(name, why)) is not None and self._recomputes:
                    self._to_fail[name] = text

    def has_pending_push_work(self) -> bool:
        """Whether another step must bring orders to the workers. Pushes themselves need no steps."""
        return self._its_books().pending

    # Worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Starts this rank's agent on the engine's memory."""
        parallel = self._vllm_config.parallel_config
        model = self._vllm_config.model_config
        shard = kx.Shard(
            tp_rank=self._tp_rank(),
            tp_size=parallel.tensor_parallel_size,
            pp_rank=self._pp_rank(),
            pp_size=parallel.pipeline_parallel_size,
        )
        tensors = list(kv_caches.values())
        facts = forms.Model(
            layers=model.get_total_num_hidden_layers(),
            kv_heads=model.get_total_num_kv_heads(),
            head_dim=model.get_head_size(),
        )
        form = forms.form_of(self._cache(kv_caches), facts, shard, self._kx.unit)
        held = shard.layers(form.layout)
        if len(held) != len(tensors):
            raise kx.NotSupported(
                f"{len(tensors)} KV cache tensors for {len(held)} layers of this rank: layers that share"
                " pages, or that have none, are not supported yet"
            )
        copied = None
        if form.converts is not None:
            copied = _Copied(tensors, held.start, form.converts)
            _log.info(
                "kvxfer: blocks of %d tokens are kept a second time with their tiles apart (%.0f MB); blocks"
                " of %d tokens need no copy",
                self._block_size,
                sum(item.nbytes for item in copied.memory) / 1e6,
                forms.TILE,
            )
        # As addresses, since the axes of some are not in the order of memory; we keep the tensors alive.
        self._tensors = tensors if copied is None else copied.memory
        memory = [(tensor.data_ptr(), _extent(tensor)) for tensor in self._tensors]
        if form.layout.cross_layer:
            first = min(tensors, key=lambda tensor: tensor.data_ptr())
            memory = [(first.data_ptr(), first.stride(0) * first.element_size() * first.shape[0])]
        rank = shard.pp_rank * shard.tp_size + shard.tp_rank
        secret = None
        if self._kx.secret_file is not None:
            with open(self._kx.secret_file, "rb") as file:
                secret = file.read().rstrip(b"\r\n")
        self._agent = kx.Agent(
            f"{self._kx.role}-{self._kx.engine[-24:]}-{rank}",
            form.layout,
            shard,
            memory=memory,
            listen=self._kx.agent_listen(rank),
            directory=self._kx.directory if self._kx.prefills and rank != 0 else None,
            engine=self._kx.engine,
            role=self._kx.agent_role,
            model=f"{self._model_name()} {form.mode}",
            fabric=self._kx.fabric,
            secret=secret,
            insecure=self._kx.insecure,
            ucx_tls=self._kx.ucx_tls,
            staging=self._kx.staging,
            cpu=self._kx.cpu,
            quarantine_limit=self._kx.quarantine_limit,
        )
        self._layers = {name: held.start + i for i, name in enumerate(kv_caches)}
        self._rank = Rank(
            self._agent,
            self._kx,
            unit=form.unit,
            block_size=tensors[0].shape[2],
            layers=held,
            pages=copied,
        )
        _log.info(
            "kvxfer: %s agent of rank %d listens on %s, %s, %s pages of %d tokens%s",
            self._kx.agent_role,
            rank,
            self._agent.address,
            "+".join(self._agent.fabrics),
            form.mode,
            tensors[0].shape[2],
            f"; its directory is {self._kx.directory}" if self._kx.prefills else "",
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Takes a step's orders before it computes: pages that were taken away must be back before they are
        written (the CPU's runner does not call `handle_preemptions`), and grants that wait for a step cost
        the first token.
        """
        super().bind_connector_metadata(connector_metadata)
        if self._rank is not None and isinstance(connector_metadata, KvxferMetadata):
            began = time.perf_counter()
            self._worked = bool(connector_metadata.orders)
            self._rank.begin_step(connector_metadata.orders)
            self._began_s = time.perf_counter() - began

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Pages that vLLM has taken away are back before anything writes or zeroes them."""
        if self._rank is not None and isinstance(kv_connector_metadata, KvxferMetadata):
            self._rank.take_back(kv_connector_metadata.orders.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Grants went out when the step began."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No step waits for a load: vLLM schedules a request when its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A layer is computed: it is pushed while the next one is."""
        if self._rank is not None and self._rank.pushing:
            began = time.perf_counter()
            self._rank.save_layer(self._layers[layer_name])
            self._saved_s += time.perf_counter() - began

    def wait_for_save(self) -> None:
        """No step waits for its pushes: pages stay until they are reported as sent."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has ended; the one `poll` of a step."""
        if self._rank is None:
            return KVConnectorTransferResults()
        began = time.perf_counter()
        results: Results = self._rank.end_step()
        if self._worked or results:
            # Steps with nothing to hand off are not counted: an engine that waits takes a thousand a second.
            self._rank.stats.hook("step", self._began_s)
            if self._saved_s:
                self._rank.stats.hook("save", self._saved_s)
            self._rank.stats.hook("poll", time.perf_counter() - began)
        self._saved_s = 0.0
        self._refused.update(results.refused)
        return KVConnectorTransferResults(
            finished_sending=results.sent,
            finished_recving=results.received,
            failed_recving=results.failed,
        )

    def build_connector_worker_meta(self) -> KvxferRefusals | None:
        """What the scheduler's half must know of this step."""
        refused, self._refused = self._refused, {}
        return KvxferRefusals(refused) if refused else None

    def shutdown(self) -> None:
        """Gives every room up and stops the agent."""
        if self._agent is not None:
            for room in self._agent.close():
                _log.warning("kvxfer: room %d ends with pages that %s may still touch", room.room, room.peers)
            self._agent = None
            self._rank = None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are pushed one by one, which a graph of the whole model would skip."""
        return True

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Sleep mode maps the pages anew, and peers know them where they are."""
        return False

    # Both sides

    def get_kv_connector_stats(self) -> KvxferStats | None:
        """What happened since the last step."""
        if self._rank is not None:
            return KvxferStats(data=data) if (data := self._rank.stats.take()) else None
        if self._books is not None:
            now = (self._books.missing_rooms, self._books.refused_requests)
            if now != self._told:
                data = {"missing_rooms": now[0] - self._told[0], "refused": now[1] - self._told[1]}
                self._told = now
                return KvxferStats(data={name: value for name, value in data.items() if value})
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxferStats:
        """The numbers that another process sent."""
        return KvxferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvxferPromMetrics:
        """The metrics on vLLM's endpoint."""
        return KvxferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _its_books(self) -> Books:
        assert self._books is not None, "a worker's connector was asked what only the scheduler's knows"
        return self._books

    def _cache(self, kv_caches: dict[str, torch.Tensor]) -> forms.Cache:
        """The facts of the tensors; all layers must agree."""
        tensors = list(kv_caches.values())
        first = tensors[0]
        for name, tensor in kv_caches.items():
            if (tensor.shape, tensor.stride(), tensor.dtype) != (first.shape, first.stride(), first.dtype):
                raise kx.NotSupported(
                    f"KV cache of {name} has shape {list(tensor.shape)}, and the first layer's"
                    f" {list(first.shape)}: layers that differ are not supported yet"
                )
        steps = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(tensors)}
        return forms.Cache(
            shape=tuple(first.shape),
            strides=tuple(first.stride()),
            dtype=str(first.dtype).removeprefix("torch."),
            layer_bytes=steps.pop() if len(steps) == 1 else None,
            item_bytes=first.element_size(),
            isa=self._isa(next(iter(kv_caches))),
        )

    def _isa(self, layer_name: str) -> str | None:
        """The CPU kernel that vLLM has chosen for a layer."""
        layers = self._vllm_config.compilation_config.static_forward_context
        isa = getattr(layers.get(layer_name), "isa", None)
        return None if isa is None else str(isa)

    def _tp_rank(self) -> int:
        from vllm.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())

    def _pp_rank(self) -> int:
        from vllm.distributed import get_pp_group

        return int(get_pp_group().rank_in_group)

    def _model_name(self) -> str:
        """What both sides must have in common: the model's name and what its configuration says of its
        sizes.
        """
        if self._kx.model is not None:
            return self._kx.model
        model = self._vllm_config.model_config
        text = model.hf_text_config.to_dict()
        sizes = {
            key: value for key, value in text.items() if isinstance(value, (int, float)) and key[0] != "_"
        }
        digest = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:12]
        return f"{PurePath(model.model).name}:{digest}"


def _needs_all_pages(spec: Any) -> None:
    """Refuses groups whose pages vLLM frees while their request runs, since a peer may be reading them."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    # Layers of one kind that differ in size come as one.
    for one in getattr(spec, "kv_cache_specs", {"": spec}).values():
        if not isinstance(one, FullAttentionSpec):
            raise kx.NotSupported(
                f"the model's KV pages are of kind {type(one).__name__}, which vLLM frees while a request"
                " runs; KvxferConnector hands off full attention so far: start vLLM with"
                " --disable-hybrid-kv-cache-manager if the model has full attention too"
            )


class _Refusal:
    """What stands in a request for a grammar that did not compile."""

    def __init__(self, why: str) -> None:
        self.grammar = kx.BadArgument(f"no fault of the grammar, but of the KV hand-off: {why}")


def _fail(request: Request, why: str) -> None:
    """Ends a request with an error when it is its turn.

    vLLM has one way for a connector to fail a request: a load that failed. That is no error with
    `kv_load_failure_policy` 'recompute', nor where the prompt is computed anyway for its logprobs. So the
    request goes the way of one whose grammar did not compile: it gets no pages, and ends with FINISHED_ERROR;
    0.33 also says why.
    """
    request.structured_output_request = _Refusal(why)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


def _scheduled(output: SchedulerOutput, counts: dict[str, int]) -> Iterable[Scheduled]:
    """What a step computes, from vLLM's two lists."""
    for new in output.scheduled_new_reqs:
        yield Scheduled(
            new.req_id, tuple(new.block_ids[0]), True, new.num_computed_tokens, counts.get(new.req_id, 0)
        )
    cached = output.scheduled_cached_reqs
    for i, request in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[i]
        yield Scheduled(
            request,
            tuple(blocks[0]) if blocks else (),
            request in cached.resumed_req_ids,
            cached.num_computed_tokens[i],
            counts.get(request, 0),
        )
