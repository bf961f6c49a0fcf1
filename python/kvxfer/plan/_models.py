"""Shapes of well-known models, by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvxfer.errors import BadArgument
from kvxfer.plan._config import shape_from_config
from kvxfer.plan._shape import ModelShape

__all__ = ["MODELS", "model"]


def _gqa(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": "bfloat16",
        **more,
    }


def _mla(layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": 7168,
        "num_attention_heads": heads,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "dtype": "bfloat16",
        **more,
    }


# (where the numbers are published, the fields of config.json that decide what is kept)
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B, config.json", _gqa(32, 4096, 32, 8, 128)),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B, config.json", _gqa(80, 8192, 64, 8, 128)),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B, config.json", _gqa(126, 16384, 128, 8, 128)),
    "qwen3-8b": ("Qwen/Qwen3-8B, config.json", _gqa(36, 4096, 32, 8, 128)),
    "qwen3-32b": ("Qwen/Qwen3-32B, config.json", _gqa(64, 5120, 64, 8, 128)),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B, config.json", _gqa(94, 4096, 64, 4, 128)),
    "qwen3-next-80b-a3b": (
        "Qwen/Qwen3-Next-80B-A3B-Instruct, config.json; transformers, Qwen3NextConfig's defaults",
        _gqa(
            48,
            2048,
            16,
            2,
            256,
            full_attention_interval=4,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
        ),
    ),
    "glm-4.5": ("zai-org/GLM-4.5, config.json", _gqa(92, 5120, 96, 8, 128)),
    "gpt-oss-20b": (
        "openai/gpt-oss-20b, config.json (every other layer has a window)",
        _gqa(24, 2880, 64, 8, 64, model_type="gpt_oss", sliding_window=128),
    ),
    "gpt-oss-120b": (
        "openai/gpt-oss-120b, config.json; github.com/openai/gpt-oss, gpt_oss/torch/model.py, ModelConfig",
        _gqa(36, 2880, 64, 8, 64, model_type="gpt_oss", sliding_window=128),
    ),
    "gemma-3-27b": (
        "google/gemma-3-27b-it, config.json (every sixth layer is full)",
        _gqa(62, 5376, 32, 16, 128, model_type="gemma3_text", sliding_window=1024, sliding_window_pattern=6),
    ),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3, config.json; also R1", _mla(61, 128)),
    "deepseek-v3.2": (
        "deepseek-ai/DeepSeek-V3.2, config.json (with the keys of the sparse indexer)",
        _mla(61, 128, index_head_dim=128),
    ),
    "kimi-k2": ("moonshotai/Kimi-K2-Instruct, config.json", _mla(61, 64)),
    "nemotron-h-8b": (
        "nvidia/Nemotron-H-8B-Base-8K, config.json; vLLM's NemotronHConfig's defaults",
        _gqa(
            52,
            4096,
            32,
            8,
            128,
            hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            mamba_num_heads=128,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            conv_kernel=4,
        ),
    ),
    "smollm2-135m": (
        "HuggingFaceTB/SmolLM2-135M, config.json; what `kvxfer demo` runs",
        _gqa(30, 576, 9, 3, 64),
    ),
}


def _plain(name: str) -> str:
    """`Qwen/Qwen3-32B` is `qwen3-32b`."""
    return name.rsplit("/", 1)[-1].lower().replace("_", "-").removesuffix("-instruct").removesuffix("-it")


def model(name: str | Path, *, kv_dtype: str | None = None, scale_dim: int = 0) -> ModelShape:
    """A model's shape: one of `MODELS` by its name (also as `Qwen/Qwen3-32B`), or from a path to its
    `config.json`.

    Args:
        name: the name or the path.
        kv_dtype: type of the KV cache, if not the model's own; `"fp8"` halves it.
        scale_dim: scales of 4 bytes beside each key and value of a token and head.
    """
    text = str(name)
    known = MODELS.get(_plain(text))
    if known is not None and not Path(text).exists():
        source, config = known
        shape = shape_from_config(config, kv_dtype=kv_dtype, scale_dim=scale_dim, name=_plain(text))
        return ModelShape(shape.name, shape.groups, shape.dtype_bytes, source, shape.notes)
    if Path(text).exists() or text.endswith(".json"):
        return shape_from_config(text, kv_dtype=kv_dtype, scale_dim=scale_dim)
    near = difflib.get_close_matches(_plain(text), MODELS, n=1, cutoff=0.6)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise BadArgument(
        f"no model {text!r} is known here{hint}; give the path of its config.json, or one of: "
        f"{', '.join(MODELS)}"
    )
