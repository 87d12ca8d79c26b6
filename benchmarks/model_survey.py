"""Try a tiny random model of every causal architecture in transformers: which can be served, and why not.

python -m quire.benchmarks.model_survey
python -m quire.benchmarks.model_survey llama mamba
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.engine.engine import Engine
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.check import UnsupportedModelError
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import load_model
from quire.kvindex.block_hash import block_hash
from quire.sampling.params import SamplingParams

MAX_PARAMETERS = 30_000_000
PROMPT_TOKENS, NEW_TOKENS = 90, 24

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Longer than the prompts of the check at load, shorter than the prompts of the survey.
    "sliding_window": 48,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    # Names that single architectures have for the same.
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "n_inner": 96,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "rotary_dim": 16,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "is_decoder": True,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


class TooLargeError(Exception):
    """The architecture has sizes under other names."""


def make_tiny_model(name: str, sizes: Mapping[str, object] = SIZES) -> PreTrainedModel:
    """Return a random model of an architecture; sizes that it does not have are ignored.

    Raises:
        TooLargeError: it would not be tiny.
        Exception: whatever the architecture's own code has against these sizes.
    """
    config_class = CONFIG_MAPPING[name]
    default = config_class()
    config: PreTrainedConfig = config_class(
        **{key: value for key, value in sizes.items() if hasattr(default, key)}
    )
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise TooLargeError(f"{size:,} parameters")
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0.0, 0.15)
    output = model.get_output_embeddings()
    if output is not None:
        output.weight.data.normal_(0.0, 2.0)
    return model


def generated_by_transformers(model: Any, prompt: torch.Tensor) -> list[int]:
    """Return the greedy tokens of ``generate``."""
    output = model.generate(
        prompt[None],
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def generated_by_quire(folder: str, prompt: torch.Tensor) -> list[int]:
    """Return the greedy tokens of the engine, with chunks of 20 tokens.

    Raises:
        UnsupportedModelError: the architecture cannot be served.
    """
    model = load_model(folder, "float32", torch.device("cpu"))
    memory = KvMemory(model.kv_shape(16), 64, torch.device("cpu"))
    engine = Engine(model, memory, SchedulerConfig(16, 8, 20), block_hash)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    sequence = Sequence("survey", prompt.tolist(), len(prompt), params, b"")
    engine.add_request(sequence)
    while not engine.is_idle:
        engine.step()
    return sequence.token_ids[len(prompt) :]


def survey(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each architecture's name and what came of it."""
    for name in names:
        try:
            model = make_tiny_model(name)
            prompt = torch.randint(3, model.config.get_text_config().vocab_size, (PROMPT_TOKENS,))
            expected = generated_by_transformers(model, prompt)
        except Exception as error:
            yield (
                name,
                f"not tried: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            )
            continue
        with TemporaryDirectory() as folder:
            model.save_pretrained(Path(folder))
            try:
                tokens = generated_by_quire(folder, prompt)
            except UnsupportedModelError as error:
                yield name, f"refused: {error}"
                continue
        yield name, "served" if tokens == expected else "WRONG TOKENS"


def main() -> None:
    """Print a line for each architecture, and the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="architectures; all if none is named")
    names = parser.parse_args().names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    for name, result in survey(names):
        print(f"{name:28} {result}", flush=True)
        kind = result.split(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
    print(counts)


if __name__ == "__main__":
    main()
