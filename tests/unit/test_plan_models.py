"""What models keep of a request, by name and from config.json: GQA, MLA, windows, recurrent state, fp8,
scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvxfer as kx
from kvxfer import plan
from kvxfer.plan import KvGroup, ModelShape

KIB = 1024


def llama(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
        **more,
    }


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("qwen3-32b", 256 * KIB),
        ("llama-3.1-70b", 320 * KIB),
        ("llama-3.1-8b", 128 * KIB),
        ("deepseek-v3", 61 * (512 + 64) * 2),
        ("gpt-oss-120b", 36 * 2 * 8 * 64 * 2),
        ("gemma-3-27b", 62 * 2 * 16 * 128 * 2),
        ("smollm2-135m", 30 * 2 * 3 * 64 * 2),
    ],
)
def test_models_known_by_name(name: str, per_token: int) -> None:
    assert plan.model(name).bytes_per_token == per_token


def test_every_known_model_says_where_its_numbers_come_from() -> None:
    assert len(plan.MODELS) >= 12
    for name, (source, _) in plan.MODELS.items():
        shape = plan.model(name)
        assert "config.json" in source
        assert shape.source == source
        assert shape.bytes_per_token > 0
        assert plan.model(name, kv_dtype="fp8").bytes_per_token <= shape.bytes_per_token


def test_the_demos_model_has_the_shape_that_its_file_says() -> None:
    from kvxfer.demo.gguf_file import GgufFile
    from kvxfer.demo.weights import ModelConfig, find_model_file

    config = ModelConfig.from_gguf(GgufFile(find_model_file()))
    shape = plan.model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert shape.groups == (
        KvGroup("full", layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim),
    )


def test_spelling_does_not_matter_and_a_typo_is_explained() -> None:
    assert plan.model("Qwen/Qwen3-32B") == plan.model("qwen3-32b")
    assert plan.model("meta-llama/Llama-3.1-70B-Instruct").name == "llama-3.1-70b"
    with pytest.raises(kx.BadArgument, match=r"did you mean qwen3-32b\?.*or one of: llama-3.1-8b"):
        plan.model("qwen-32b")


def test_gqa_and_defaults_of_old_configs(tmp_path: Path) -> None:
    shape = plan.shape_from_config(llama())
    assert shape.groups == (KvGroup("full", layers=80, kv_heads=8, head_dim=128),)
    assert shape.kv_bytes(32_768) == 10 * 2**30
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    assert (
        plan.model(tmp_path).kv_bytes(1) == plan.model(str(tmp_path / "config.json")).kv_bytes(1) == 320 * KIB
    )
    many = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
    found = plan.shape_from_config(many)
    assert found.bytes_per_token == 12 * 2 * 12 * 64 * 2
    assert found.notes == ("the config names no dtype: 2 bytes an element (bfloat16) were taken",)
    old = {"n_layer": 24, "n_embd": 1024, "n_head": 16, "multi_query": True, "torch_dtype": "float32"}
    assert plan.shape_from_config(old).bytes_per_token == 24 * 2 * 1 * 64 * 4


def test_a_number_of_heads_for_each_layer() -> None:
    shape = plan.shape_from_config(llama(num_hidden_layers=4, num_key_value_heads=[4, 2, 2, 0], head_dim=64))
    assert {(g.layers, g.kv_heads) for g in shape.groups} == {(1, 4), (2, 2)}
    with pytest.raises(kx.BadArgument, match="2 numbers of KV heads for 4 layers"):
        plan.shape_from_config(llama(num_hidden_layers=4, num_key_value_heads=[4, 2]))


def test_mla_is_one_vector_a_token_and_whole_on_every_rank() -> None:
    shape = plan.model("deepseek-v3")
    assert shape.kv_bytes(1000) == 1000 * 61 * 576 * 2
    assert shape.rank_bytes(1000, tp=8) == shape.kv_bytes(1000)
    # The sparse indexer's keys: 128 of fp8 and a float32 scale a token and layer.
    sparse = plan.model("deepseek-v3.2")
    assert sparse.bytes_per_token - shape.bytes_per_token == 61 * (128 + 4)
    # They stay fp8 whatever the cache is.
    assert plan.model("deepseek-v3.2", kv_dtype="fp8").bytes_per_token == 61 * (576 + 132)


def test_ranks_split_heads_and_repeat_the_last_one() -> None:
    shape = plan.model("qwen3-32b")
    assert shape.rank_bytes(16_000, tp=8) * 8 == shape.kv_bytes(16_000)
    # 8 heads over 16 ranks: each head is on two of them.
    assert shape.rank_bytes(16_000, tp=16) == shape.rank_bytes(16_000, tp=8)
    # 3 heads over 2 ranks: the fuller one has two.
    assert plan.model("smollm2-135m").rank_bytes(10, tp=2) * 3 == plan.model("smollm2-135m").kv_bytes(10) * 2


def test_windows_keep_no_more_than_their_length() -> None:
    shape = plan.model("gemma-3-27b")
    assert {(g.kind, g.layers, g.window_tokens) for g in shape.groups} == {
        ("window", 52, 1024),
        ("full", 10, None),
    }
    each = 2 * 16 * 128 * 2
    assert shape.kv_bytes(1000) == 62 * each * 1000
    assert shape.kv_bytes(16_000) == each * (10 * 16_000 + 52 * 1024)
    # Every other layer of gpt-oss has a window of 128.
    oss = plan.model("gpt-oss-120b")
    assert oss.kv_bytes(10_000) == 2 * 8 * 64 * 2 * (18 * 10_000 + 18 * 128)


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({"sliding_window": 512}, {"window": 80}),
        ({"sliding_window": 512, "use_sliding_window": False}, {"full": 80}),
        ({"sliding_window": None}, {"full": 80}),
        (
            {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 70},
            {"full": 70, "window": 10},
        ),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, {"window": 60, "full": 20}),
        ({"sliding_window": 512, "sliding_window_pattern": "LLLG"}, {"window": 60, "full": 20}),
        ({"sliding_window": 512, "model_type": "gemma2"}, {"window": 40, "full": 40}),
        (
            {
                "attention_chunk_size": 8192,
                "layer_types": ["chunked_attention"] * 60 + ["full_attention"] * 20,
            },
            {"window": 60, "full": 20},
        ),
        ({"sliding_window": 512, "hybrid_layer_pattern": [1] * 70 + [0] * 10}, {"window": 70, "full": 10}),
        ({"num_kv_shared_layers": 20}, {"full": 60}),
    ],
)
def test_the_ways_in_which_configs_say_windows(more: dict[str, Any], kinds: dict[str, int]) -> None:
    shape = plan.shape_from_config(llama(**more))
    assert {g.kind: g.layers for g in shape.groups} == kinds


def test_full_and_window_layers_with_heads_of_their_own() -> None:
    shape = plan.shape_from_config(
        llama(
            num_hidden_layers=6,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
            sliding_window=1024,
            head_dim=256,
            num_key_value_heads=16,
            global_head_dim=512,
            num_global_key_value_heads=4,
        )
    )
    assert {(g.kind, g.layers, g.kv_heads, g.head_dim) for g in shape.groups} == {
        ("window", 5, 16, 256),
        ("full", 1, 4, 512),
    }
    uneven = plan.shape_from_config(llama(head_dim=192, v_head_dim=128))
    assert uneven.bytes_per_token == 80 * 8 * (192 + 128) * 2


def test_hybrid_state_costs_the_same_at_any_length() -> None:
    shape = plan.model("nemotron-h-8b")
    assert {g.kind: g.layers for g in shape.groups} == {"full": 4, "state": 24}
    # Mamba-2: the convolution's last 3 inputs (x, B, C), and heads x dim x state; both in bfloat16 here.
    state = 24 * 2 * ((128 * 64 + 2 * 8 * 128) * 3 + 128 * 64 * 128)
    assert shape.state_bytes == state
    assert shape.kv_bytes(2000) - shape.kv_bytes(1000) == 1000 * 4 * 2 * 8 * 128 * 2
    assert shape.kv_bytes(1000) == 1000 * shape.bytes_per_token + state
    assert shape.kv_bytes(0) == 0
    assert shape.rank_bytes(1000, tp=8) * 8 == shape.kv_bytes(1000)
    # fp8 is for keys and values; the state keeps its type.
    assert plan.model("nemotron-h-8b", kv_dtype="fp8").state_bytes == state


def test_the_states_that_configs_describe() -> None:
    delta = plan.model("qwen3-next-80b-a3b")
    assert {g.kind: g.layers for g in delta.groups} == {"full": 12, "state": 36}
    assert delta.state_bytes == 36 * 2 * ((2 * 16 * 128 + 32 * 128) * 3 + 32 * 128 * 128)
    jamba = plan.shape_from_config(
        llama(
            num_hidden_layers=32,
            hidden_size=4096,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
        )
    )
    assert {g.kind: g.layers for g in jamba.groups} == {"full": 4, "state": 28}
    assert jamba.state_bytes == 28 * 2 * (8192 * 3 + 8192 * 16)
    bamba = plan.shape_from_config(
        llama(
            num_hidden_layers=32,
            hidden_size=4096,
            attn_layer_indices=[9, 18, 27],
            mamba_n_heads=128,
            mamba_d_head="auto",
            mamba_n_groups=1,
            mamba_d_state=128,
            mamba_ssm_cache_dtype="float32",
        )
    )
    assert {g.kind: g.layers for g in bamba.groups} == {"full": 3, "state": 29}
    assert bamba.state_bytes == 29 * ((8192 + 2 * 128) * 3 * 2 + 8192 * 128 * 4)


def test_fp8_and_scales() -> None:
    assert plan.model("qwen3-32b", kv_dtype="fp8").bytes_per_token == 128 * KIB
    # A float32 scale beside each key and value of a head: 4 bytes for 128.
    scaled = plan.model("qwen3-32b", kv_dtype="fp8", scale_dim=1)
    assert scaled.bytes_per_token == 64 * 2 * 8 * (128 + 4)
    said = plan.shape_from_config(
        llama(quantization_config={"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    )
    assert said.bytes_per_token == 160 * KIB
    assert "kv_cache_scheme" in said.notes[0]
    assert (
        plan.shape_from_config(llama(quantization_config={"quant_method": "fp8"})).bytes_per_token
        == 320 * KIB
    )
    with pytest.raises(kx.BadArgument, match="KV type 'fp9' is not known; there are: bfloat16"):
        plan.model("qwen3-32b", kv_dtype="fp9")


def test_the_language_model_inside_a_model_that_sees() -> None:
    text = llama()
    del text["torch_dtype"]
    outer = {
        "model_type": "x_vl",
        "torch_dtype": "float32",
        "vision_config": {"num_hidden_layers": 3},
        "text_config": text,
    }
    assert plan.shape_from_config(outer).bytes_per_token == 640 * KIB


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "no 'num_hidden_layers' or 'n_layer'"),
        ({"num_hidden_layers": 2, "hidden_size": 8}, "'num_attention_heads'"),
        ({"num_hidden_layers": "many"}, "'num_hidden_layers' is 'many'"),
        (llama(layer_types=["telepathy"] * 80), "layers of the kind 'telepathy'"),
        (llama(layer_types=["mamba"] * 80), "no sizes of one that are known here"),
        (llama(hidden_size=100), "hidden_size 100 is no multiple of 64"),
        (llama(torch_dtype="bfloat17"), "'bfloat17' is not known"),
        (llama(layer_types=["mlp"] * 80), "nothing to hand off"),
    ],
)
def test_configs_that_say_too_little_are_explained(config: dict[str, Any], said: str) -> None:
    with pytest.raises(kx.BadArgument) as raised:
        plan.shape_from_config(config, name="it")
    assert said in str(raised.value)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    listed = tmp_path / "listed.json"
    listed.write_text("[]")
    for path, said in (
        (tmp_path / "none.json", "No such file"),
        (broken, "it is no JSON"),
        (listed, "no JSON object"),
        (tmp_path, "config.json: No such file"),
    ):
        with pytest.raises(kx.BadArgument, match=said):
            plan.model(path)


def test_a_shape_by_hand() -> None:
    shape = ModelShape(
        "mine",
        (KvGroup("full", layers=2, kv_heads=2, head_dim=64), KvGroup("state", layers=3, state_bytes=100)),
    )
    assert shape.kv_bytes(10) == 10 * 2 * 2 * 2 * 64 * 2 + 300
    with pytest.raises(kx.BadArgument, match="nothing to hand off"):
        ModelShape("none", ())
