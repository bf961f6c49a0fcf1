"""Costs of `kvxfer sim` out of its arguments."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kvxfer import plan
from kvxfer.errors import BadArgument
from kvxfer.simulate import Costs
from kvxfer.simulate.calibrate import Calibration

__all__ = ["costs_of"]

# `llama-3.1-70b`, `qwen3-235b-a22b`: most names say how large a model is.
_SIZE = re.compile(r"-(\d+(?:\.\d+)?)b(?:-a(\d+(?:\.\d+)?)b)?$")


def _config(name: str) -> dict[str, Any]:
    known = plan.MODELS.get(name)
    if known is not None:
        return dict(known[1])
    path = Path(name)
    found = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    text = found.get("text_config", found)
    return text if isinstance(text, dict) else {}


def _of_model(options: argparse.Namespace) -> dict[str, tuple[float, str]]:
    shape = plan.model(options.model)
    # Latent caches lie on every rank, and move to every rank.
    tokens = 16_000
    per_token = shape.rank_bytes(tokens, options.tp) * options.tp / tokens
    out = {
        "kv_bytes_per_token": (
            per_token,
            f"kvxfer.plan.model: {shape.source}, at TP{options.tp} and 16,000 tokens",
        )
    }
    config = _config(shape.name if shape.name in plan.MODELS else options.model)
    for cost, keys in (
        ("layers", ("num_hidden_layers",)),
        ("query_heads", ("num_attention_heads",)),
        ("head_dim", ("head_dim", "qk_nope_head_dim")),
    ):
        value = next((config[key] for key in keys if config.get(key)), None)
        if value is not None:
            out[cost] = (float(value), f"{shape.name}: its config.json")
    size = _SIZE.search(shape.name)
    if options.params_b is None:
        if size is None:
            raise BadArgument(
                f"the name {shape.name} does not say how many weights the model has: give --params-b"
            )
        out["params_b"] = (float(size[1]), "the model's name")
        out["active_params_b"] = (float(size[2] or size[1]), "the model's name")
    return out


def costs_of(options: argparse.Namespace) -> tuple[Costs, dict[str, str]]:
    """The costs, and where those that are not defaults are from.

    Raises:
        ValueError: if an argument makes no sense; the message says which.
        OSError: if a file cannot be read.
    """
    given: dict[str, tuple[float, str]] = {}
    if options.model is not None:
        given |= _of_model(options)
    calibration = Calibration()
    for file in options.calibrate:
        calibration.read(file)
    given |= {name: (value, calibration.sources[name]) for name, value in calibration.values.items()}
    if options.params_b is not None:
        given["params_b"] = given["active_params_b"] = (options.params_b, "--params-b")
    if options.active_params_b is not None:
        given["active_params_b"] = (options.active_params_b, "--active-params-b")
    if options.link_gbit_s is not None:
        given["nic_gb_s"] = (plan.gb_per_s(options.link_gbit_s), "--link-gbit-s")
    names = [item.name for item in fields(Costs)]
    for text in options.set:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in names:
            raise BadArgument(f"--set {text}: there is no cost {name!r}; there are {', '.join(names)}")
        try:
            given[name] = (float(value), "--set")
        except ValueError:
            raise BadArgument(f"--set {text}: {value!r} is no number; for example --set {name}=1") from None
    costs = replace(Costs(), **{name: value for name, (value, _) in given.items()})
    return costs, {name: source for name, (_, source) in given.items()}
