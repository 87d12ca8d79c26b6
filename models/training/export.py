"""Write the demo model as a Hugging Face checkpoint."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import GenerationConfig, LlamaForCausalLM


def export(model: LlamaForCausalLM, out: Path) -> None:
    """Write the model in bfloat16 to the folder of its tokenizer; each file is replaced atomically."""
    config = model.config
    rounded = deepcopy(model).to(torch.bfloat16)
    rounded.config.dtype = torch.bfloat16
    rounded.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=False,
    )
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as folder:
        rounded.save_pretrained(folder)
        for path in Path(folder).iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)
