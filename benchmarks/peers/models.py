"""Finds the random models that the sides load."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.benchmarks.harness.program import CannotRunError
from quire.benchmarks.harness.random_llamas import SIZES, byte_tokenizer, random_llama
from quire.benchmarks.model_sizes import PEER_SIZES
from quire.benchmarks.model_survey import NotTinyError, make_tiny_model

MODELS_HELP = f"sizes of Llamas ({', '.join(SIZES)}) or architectures of transformers"

PUBLISHED_VALUES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "lfm2": dict.fromkeys(("block_dim", "conv_dim"), PEER_SIZES["hidden_size"]),
}
"""Values that published configurations have, and that vLLM reads but transformers does not."""


def random_model(name: str, folder: Path) -> tuple[Path, int]:
    """Return the folder of a random model in float32, and the size of its vocabulary.

    The model is made if it does not exist.

    Args:
        name: a size of a Llama, or an architecture of the survey.
        folder: folder of all models.

    Raises:
        CannotRunError: there is no such model.
    """
    if name in SIZES:
        return random_llama(name, folder), SIZES[name]["vocab_size"]
    path = folder / "models" / f"{name}-float32-{PEER_SIZES['num_hidden_layers']}-layers"
    if not path.exists():
        try:
            model = make_tiny_model(name, PEER_SIZES)
        except (KeyError, NotTinyError) as error:
            raise CannotRunError(f"There is no random model {name}: {error}.") from None
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        model.save_pretrained(unfinished)
        config = unfinished / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | PUBLISHED_VALUES.get(name, {})))
        byte_tokenizer().save_pretrained(unfinished)
        unfinished.rename(path)
    return path, PEER_SIZES["vocab_size"]
