"""What a model keeps of a request, read from its `config.json`.

The keys are those of Hugging Face's `transformers` and of vLLM's own configs; what each layer of a hybrid
model keeps follows the state shapes that vLLM allocates (`vllm/model_executor/layers/mamba/mamba_utils.py`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvxfer.errors import BadArgument
from kvxfer.plan._shape import KvGroup, ModelShape, dtype_bytes

__all__ = ["shape_from_config"]

# What layers are called, and what such a layer keeps.
_KINDS = {
    **dict.fromkeys(("full_attention", "attention", "global", "global_attention", "full", "*"), "full"),
    **dict.fromkeys(("sliding_attention", "sliding_window", "local_attention", "local", "sliding"), "window"),
    "chunked_attention": "chunk",
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "recurrent", "M"), "state"),
    **dict.fromkeys(("mlp", "moe", "ffn", "-", "E"), "nothing"),
}
# Every so-many-th layer is full and the others have windows, in models whose config does not say so.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}
_HOW_ELSE = (
    "describe the model by hand: `kvxfer plan --layers 64 --kv-heads 8 --head-dim 128`, or in Python "
    "`kvxfer.plan.ModelShape(name, groups=(KvGroup('full', layers=..., kv_heads=..., head_dim=...), ...))`"
)


class _Config:
    """A config whose missing keys are explained."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def get(self, *keys: str, default: Any = None) -> Any:
        for key in keys:
            value = self.values.get(key)
            if value is not None and value != "auto":
                return value
        return default

    def number(self, *keys: str, default: int | None = None) -> int:
        value = self.get(*keys, default=default)
        if value is None:
            names = " or ".join(f"'{k}'" for k in keys)
            raise BadArgument(f"{self.name}: it has no {names}; {_HOW_ELSE}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadArgument(f"{self.name}: '{keys[0]}' is {value!r}, and not a whole number above zero")
        return value


def _inner(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the language model, in configs of models that see or hear."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        part = values.get(key)
        if isinstance(part, Mapping):
            return _inner({**{k: v for k, v in values.items() if k in ("torch_dtype", "dtype")}, **part})
    return values


def _layer_types(c: _Config, layers: int) -> list[str]:
    """What each layer is called."""
    window = c.get("sliding_window", "sliding_window_size")
    given = c.get("layer_types", "layers_block_type", "block_types")
    if c.get("hybrid_override_pattern") is not None:
        given = [x for x in str(c.get("hybrid_override_pattern")) if x != "|"]
    if given is not None:
        return [str(x) for x in given]
    if c.get("attn_layer_indices") is not None:
        full = set(c.get("attn_layer_indices"))
        return ["full_attention" if i in full else "mamba" for i in range(layers)]
    if c.get("attn_layer_period") is not None:
        period, offset = c.number("attn_layer_period"), int(c.get("attn_layer_offset", default=0))
        return ["full_attention" if i % period == offset else "mamba" for i in range(layers)]
    if c.get("linear_num_value_heads") is not None or c.get("full_attention_interval") is not None:
        every = c.number("full_attention_interval", default=4)
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if c.get("hybrid_layer_pattern") is not None:
        return ["sliding_attention" if x else "full_attention" for x in c.get("hybrid_layer_pattern")]
    if window is None or c.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    pattern = c.get("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(pattern, str):
        return [
            "sliding_attention" if pattern[i % len(pattern)] == "L" else "full_attention"
            for i in range(layers)
        ]
    model_type = str(c.get("model_type", default=""))
    known = pattern if isinstance(pattern, int) else _PATTERNS.get(model_type)
    if known:
        return ["sliding_attention" if (i + 1) % known else "full_attention" for i in range(layers)]
    if c.get("max_window_layers") is not None:
        first = int(c.get("max_window_layers"))
        return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return ["sliding_attention"] * layers


def _state_bytes(c: _Config, each: float, notes: list[str]) -> int:
    """Bytes of one layer's state: the convolution's last inputs in the model's type, and the recurrent
    state."""
    state_each = _state_dtype(c, each)
    if c.get("linear_num_value_heads") is not None:  # gated delta net
        v_heads, k_heads = c.number("linear_num_value_heads"), c.number("linear_num_key_heads")
        v_dim, k_dim = c.number("linear_value_head_dim"), c.number("linear_key_head_dim")
        conv = (2 * k_heads * k_dim + v_heads * v_dim) * (c.number("linear_conv_kernel_dim", default=4) - 1)
        recurrent = v_heads * v_dim * k_dim
    elif c.get("mamba_num_heads", "mamba_n_heads", "n_mamba_heads") is not None:  # Mamba-2
        heads = c.number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
        wide = c.get("mamba_head_dim", "mamba_d_head", "mamba_headdim")
        head = (
            int(wide)
            if wide is not None
            else c.number("mamba_expand", default=2) * c.number("hidden_size") // heads
        )
        state = c.number("ssm_state_size", "mamba_d_state")
        groups = c.number("n_groups", "mamba_n_groups", "mamba_ngroups", default=1)
        conv = (heads * head + 2 * groups * state) * (c.number("conv_kernel", "mamba_d_conv", default=4) - 1)
        recurrent = heads * head * state
    elif c.get("mamba_d_state", "state_size", "ssm_state_size") is not None:  # Mamba-1
        inner = c.get("intermediate_size_mamba", "mamba_intermediate_size")
        wide = (
            int(inner)
            if inner is not None
            else c.number("mamba_expand", "expand", default=2) * c.number("hidden_size")
        )
        conv = wide * (c.number("mamba_d_conv", "conv_kernel", default=4) - 1)
        recurrent = wide * c.number("mamba_d_state", "state_size", "ssm_state_size")
    else:
        raise BadArgument(
            f"{c.name}: it has layers with a recurrent state, but no sizes of one that are known here "
            f"('linear_num_value_heads', 'mamba_num_heads', 'mamba_d_state', ...); {_HOW_ELSE}, with "
            "KvGroup('state', layers=..., state_bytes=...)"
        )
    notes.append(f"recurrent state in {state_each:g} bytes an element, its convolution in {each:g}")
    return math.ceil(conv * each + recurrent * state_each)


def _state_dtype(c: _Config, each: float) -> float:
    name = c.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    return each if name is None else dtype_bytes(str(name))


def _model_dtype(c: _Config, notes: list[str]) -> float:
    name = c.get("dtype", "torch_dtype")
    if name is None:
        notes.append("the config names no dtype: 2 bytes an element (bfloat16) were taken")
        return 2
    return dtype_bytes(str(name))


def _kv_dtype(c: _Config, given: str | None, model: float, notes: list[str]) -> float:
    if given is not None and given != "auto":
        return dtype_bytes(given)
    quantized = c.get("quantization_config", default={})
    scheme = quantized.get("kv_cache_scheme") if isinstance(quantized, Mapping) else None
    if isinstance(scheme, Mapping) and isinstance(scheme.get("num_bits"), int):
        notes.append(f"KV of {scheme['num_bits']} bits, as quantization_config.kv_cache_scheme says")
        return float(scheme["num_bits"] / 8)
    return model


def _heads(c: _Config, layers: int) -> list[int]:
    """KV heads of each layer; some models have a list."""
    given = c.get("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_groups")
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != layers:
            raise BadArgument(f"{c.name}: {len(given)} numbers of KV heads for {layers} layers")
        return [int(x or 0) for x in given]
    if c.get("multi_query") is True and given is None:
        return [1] * layers
    if given is not None:
        return [c.number("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_groups")] * layers
    return [c.number("num_attention_heads", "n_head", "num_heads")] * layers


def _head_dim(c: _Config) -> int:
    if c.get("head_dim", "attention_head_dim", "kv_channels") is not None:
        return c.number("head_dim", "attention_head_dim", "kv_channels")
    hidden = c.number("hidden_size", "n_embd", "d_model")
    heads = c.number("num_attention_heads", "n_head", "num_heads")
    if hidden % heads:
        raise BadArgument(
            f"{c.name}: no 'head_dim', and hidden_size {hidden} is no multiple of {heads} attention heads; "
            f"{_HOW_ELSE}"
        )
    return hidden // heads


def _latent_groups(c: _Config, layers: int, scale_dim: int) -> list[KvGroup]:
    """Multi-head latent attention, and the keys of a sparse indexer where there is one."""
    wide = c.number("kv_lora_rank") + c.number("qk_rope_head_dim")
    groups = [KvGroup("latent", layers=layers, head_dim=wide, scale_dim=scale_dim)]
    if c.get("index_head_dim") is not None:
        # vLLM keeps the indexer's keys in fp8, with a float32 scale for each 128 elements.
        keys = c.number("index_head_dim")
        groups.append(
            KvGroup("latent", layers=layers, head_dim=keys, dtype_bytes=1, scale_dim=math.ceil(keys / 128))
        )
    return groups


def _attention(c: _Config, kind: str, heads: int, scale_dim: int) -> KvGroup:
    dim = _head_dim(c)
    value = c.get("v_head_dim")
    window = None
    if kind == "full":
        heads = int(c.get("num_global_key_value_heads", default=heads))
        dim = int(c.get("global_head_dim", default=dim))
    elif kind == "chunk":
        window = c.number("attention_chunk_size")
    else:
        window = c.number("sliding_window", "sliding_window_size")
        heads = int(c.get("swa_num_key_value_heads", default=heads))
        dim = int(c.get("swa_head_dim", default=dim))
        value = c.get("swa_v_head_dim", default=value)
    return KvGroup(
        "full" if window is None else "window",
        layers=1,
        kv_heads=heads,
        head_dim=dim,
        v_head_dim=None if value is None or int(value) == dim else int(value),
        window_tokens=window,
        scale_dim=scale_dim,
    )


def _read(config: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, Mapping):
        return config, str(config.get("_name_or_path") or config.get("model_type") or "config")
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadArgument(
            f"{path}: {error.strerror}; give a model's config.json, or the name of one known here"
        ) from None
    except ValueError as error:
        raise BadArgument(f"{path}: it is no JSON ({error}); give a model's config.json") from None
    if not isinstance(values, dict):
        raise BadArgument(f"{path}: it holds no JSON object; give a model's config.json")
    return values, str(path)


def shape_from_config(
    config: Mapping[str, Any] | str | Path,
    *,
    kv_dtype: str | None = None,
    scale_dim: int = 0,
    name: str | None = None,
) -> ModelShape:
    """What a model keeps of a request, from its `config.json`.

    Args:
        config: the parsed config, or a path to it or to its folder.
        kv_dtype: type of the KV cache (`"fp8"`, `"bfloat16"`, ...); by default what the config says of its
            KV, else the model's own type.
        scale_dim: scales of 4 bytes beside each key and each value of a token and head; 0 for scales of whole
            tensors, which cost nothing.
        name: what to call it.
    """
    values, found = _read(config)
    c = _Config(_inner(values), name or found)
    notes: list[str] = []
    model_each = _model_dtype(c, notes)
    each = _kv_dtype(c, kv_dtype, model_each, notes)
    layers = c.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    types = _layer_types(c, layers)
    unknown = sorted(set(types) - set(_KINDS))
    if unknown:
        raise BadArgument(
            f"{c.name}: layers of the kind {', '.join(map(repr, unknown))}, of which it is not known here "
            "what they "
            f"keep; {_HOW_ELSE}"
        )
    # Layers at the end that read what an earlier one wrote keep nothing of their own.
    shared = int(c.get("num_kv_shared_layers", default=0))
    kinds = [_KINDS[t] for t in types][: len(types) - shared]
    if c.get("kv_lora_rank") is not None and c.get("qk_rope_head_dim") is not None:
        latent = sum(1 for kind in kinds if kind != "state" and kind != "nothing")
        groups = _latent_groups(c, latent, scale_dim) if latent else []
    else:
        heads = _heads(c, len(types))
        kept = [
            _attention(c, kind, heads[i], scale_dim)
            for i, kind in enumerate(kinds)
            if kind not in ("state", "nothing") and heads[i]
        ]
        groups = [KvGroup(**{**vars(group), "layers": count}) for group, count in Counter(kept).items()]
    if states := kinds.count("state"):
        groups.append(KvGroup("state", layers=states, state_bytes=_state_bytes(c, model_each, notes)))
    return ModelShape(
        name=c.name, groups=tuple(groups), dtype_bytes=each, source=str(found), notes=tuple(notes)
    )
