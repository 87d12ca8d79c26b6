"""Tests with tiny random models whether quire serves each causal architecture of transformers, also on ranks.

    python -m quire.benchmarks.model_survey
    python -m quire.benchmarks.model_survey llama mixtral --ranks 2,3,4

A model is served if it gives the greedy tokens of transformers' ``generate``. With ``--ranks``, models that
four ranks can divide instead answer prompts in one process and on each number of ranks. Tokens and logprobs
must be equal to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.benchmarks.harness.engines import CPU, as_sequence, make_engine, run_to_end
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.random_llamas import byte_tokenizer
from quire.benchmarks.harness.rounds import show_progress
from quire.benchmarks.harness.tables import table
from quire.engine.model.check import UnsupportedModelError
from quire.engine.weights.loader import load_model
from quire.llm import LLM
from quire.llm import SamplingParams as LlmSamplingParams
from quire.sampling.params import SamplingParams
from quire.settings.setting import SettingError

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
    # Other names of these values in some architectures.
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


RANK_SIZES = {
    **SIZES,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}
"""Sizes that four ranks can divide."""
RANK_PROMPTS = [list(range(5, 5 + length)) for length in (3, 40, 150)]
RANK_PARAMS = LlmSamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True, logprobs=3)


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    names: Annotated[tuple[str, ...], "architectures; all if none is named"]
    ranks: Annotated[tuple[int, ...], "numbers of ranks to compare with one process"] = ()


class TooLargeError(Exception):
    """The architecture has other names for sizes."""


def make_tiny_model(name: str, sizes: Mapping[str, object] = SIZES) -> PreTrainedModel:
    """Return a random model of an architecture; sizes that it does not have are ignored.

    Raises:
        TooLargeError: it would not be tiny.
        Exception: the architecture's own code refuses these sizes.
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
    engine = make_engine(load_model(folder, "float32", CPU), 64, max_num_seqs=8, max_num_batched_tokens=20)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    sequence = as_sequence(0, prompt.tolist(), params)
    run_to_end(engine, [sequence])
    return sequence.token_ids[len(prompt) :]


def served(name: str) -> str:
    """Return whether an architecture is served with correct tokens, or the reason why not."""
    try:
        model = make_tiny_model(name)
        prompt = torch.randint(3, model.config.get_text_config().vocab_size, (PROMPT_TOKENS,))
        expected = generated_by_transformers(model, prompt)
    except Exception as error:  # whatever the architecture's own code has against the sizes
        return f"not tried: {_first_line(error)}"
    with TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        try:
            tokens = generated_by_quire(folder, prompt)
        except UnsupportedModelError as error:
            return f"refused: {error}"
    return "served" if tokens == expected else "WRONG TOKENS"


def answers(folder: Path, num_ranks: int) -> list[Any]:
    """Return all tokens, and the exact logprobs of the best ones.

    Raises:
        UnsupportedModelError: ranks do not divide the model, or the architecture cannot be served.
    """
    with LLM(str(folder), dtype="float32", num_blocks=64, threads=1, tensor_parallel_size=num_ranks) as llm:
        outputs = llm.generate(RANK_PROMPTS, RANK_PARAMS, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def divided(name: str, numbers: Sequence[int]) -> str:
    """Return whether all numbers of ranks give the same bits as one process, or the reason why not."""
    try:
        model = make_tiny_model(name, RANK_SIZES)
    except Exception as error:  # whatever the architecture's own code has against the sizes
        return f"not tried: {_first_line(error)}"
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        try:
            expected = answers(Path(folder), 1)
        except UnsupportedModelError as error:
            return f"not served: {_first_line(error)}"
        for number in numbers:
            try:
                found = answers(Path(folder), number)
            except (UnsupportedModelError, SettingError) as error:
                return f"refused: {_first_line(error)}"
            if found != expected:
                return f"OTHER BITS on {number} ranks"
    return "same bits"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@program
def main(options: Options) -> Report:
    """Try the architectures."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows, kinds = [], dict[str, list[str]]()
    for name in options.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        result = divided(name, options.ranks) if options.ranks else served(name)
        show_progress(f"{name}: {result}")
        rows.append({"architecture": name, "result": result})
        kinds.setdefault(result.partition(":")[0], []).append(name)
    counts = ", ".join(f"{kind}: {len(names)}" for kind, names in kinds.items())
    columns = {"architecture": "{architecture}", "result": "{result}"}
    return Report([table("Architectures of transformers", rows, columns), counts], {"architectures": kinds})


if __name__ == "__main__":
    main()
