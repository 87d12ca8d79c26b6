"""Tests with tiny random models whether quire serves each causal architecture of transformers, also on ranks.

    python -m quire.benchmarks.model_survey --page docs/models.md
    python -m quire.benchmarks.model_survey llama mixtral --ranks 2,3,4
    python -m quire.benchmarks.model_survey minimax bamba --speed

A model is served if it gives the greedy tokens of ``generate``. The survey fails if a model gets
other tokens, if it lacks a kind of layer that published models have, or if there is neither a model nor a
reason why not. With ``--ranks``, models that four ranks can divide instead answer prompts in one process and
on each number of ranks. Tokens and logprobs must be equal to the last bit. With ``--speed``, larger models
compute a prompt and decode steps in turns with transformers' own code, on 2 threads.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, cycle, islice, product, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.benchmarks.harness.engines import CPU, as_sequence, make_engine, run_to_end
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.random_llamas import byte_tokenizer
from quire.benchmarks.harness.rounds import show_progress, turns
from quire.benchmarks.harness.tables import table
from quire.benchmarks.model_sizes import (
    KINDS,
    NUM_LAYERS,
    OVERRIDES,
    PART_SIZES,
    REASONS,
    SIZES,
    SPEED_SIZES,
    UNTRIED,
    WINDOW,
)
from quire.benchmarks.models_page import Result, Status, write_page
from quire.engine.engine import Engine
from quire.engine.model.check import UnsupportedModelError
from quire.engine.weights.loader import load_model
from quire.llm import LLM
from quire.llm import SamplingParams as LlmSamplingParams
from quire.sampling.params import SamplingParams
from quire.settings.setting import SettingError

MAX_PARAMETERS_PER_LAYER = 15_000_000
PROMPT_TOKENS, NEW_TOKENS = 90, 24

RANK_SIZES = {
    **SIZES,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
"""Sizes that four ranks can divide."""
RANK_PROMPTS = [list(range(5, 5 + length)) for length in (3, 40, 150)]
RANK_PARAMS = LlmSamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True, logprobs=3)

SPEED_TOKENS, SPEED_STEPS, SPEED_ROUNDS = 384, 16, 5


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    names: Annotated[tuple[str, ...], "architectures; all if none is named"]
    ranks: Annotated[tuple[int, ...], "numbers of ranks to compare with one process"] = ()
    page: Annotated[Path | None, "the page to write the results to"] = None
    speed: Annotated[bool, "compare the speed with that of transformers"] = False


class NotTinyError(Exception):
    """There is no tiny model that stands for the architecture; the message says why."""


def make_tiny_config(name: str, sizes: Mapping[str, Any] = SIZES) -> PreTrainedConfig:
    """Return the configuration of a tiny model with all kinds of layers of an architecture.

    Raises:
        NotTinyError: it lacks a kind of layer.
        Exception: the architecture's own code refuses these sizes.
    """
    config_class = CONFIG_MAPPING[name]
    default = config_class()
    if "text_config" in config_class.sub_configs:
        parts = {part: getattr(default, part) for part in config_class.sub_configs}
        values = {
            part: {
                "model_type": each.model_type,
                **_values(each, sizes if part == "text_config" else PART_SIZES),
            }
            for part, each in parts.items()
            if each is not None
        }
    else:
        values = _values(default, sizes)
    config: PreTrainedConfig = config_class(**values)
    if lacking := _kinds(default.get_text_config()) - set(_layer_types(config.get_text_config())):
        raise NotTinyError(f"the tiny model lacks layers of type {sorted(lacking)}")
    return config


def _values(default: PreTrainedConfig, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration, or of a part of one, that differ from the default."""
    own = OVERRIDES.get(default.model_type, {})
    values = {**sizes, **_layer_values(default, sizes["num_hidden_layers"])}
    return {**{key: value for key, value in values.items() if _is_settable(default, key)}, **own}


def make_tiny_model(name: str, sizes: Mapping[str, Any] = SIZES) -> PreTrainedModel:
    """Return a random model of an architecture with all its kinds of layers.

    Raises:
        NotTinyError: it would not be tiny, or would lack a kind of layer.
        Exception: the architecture's own code refuses these sizes.
    """
    config = make_tiny_config(name, sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    most = MAX_PARAMETERS_PER_LAYER * sizes["num_hidden_layers"]
    if (size := sum(each.numel() for each in model.parameters())) > most:
        raise NotTinyError(f"{size:,} parameters")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0.0, 0.15)
    output = model.get_output_embeddings()
    if output is not None:
        output.weight.data.normal_(0.0, 2.0)
    return model


def _is_settable(config: PreTrainedConfig, name: str) -> bool:
    names = {field.name for field in fields(config)}
    if name == "head_dim" and "qk_rope_head_dim" in names and name not in names:
        return False  # Latent attention derives it from the size of what it rotates.
    return name in names or (hasattr(config, name) and not hasattr(type(config), name))


def _kinds(default: PreTrainedConfig) -> set[str]:
    """Return the kinds of layers that the published models of an architecture have."""
    return {*KINDS.get(default.model_type, "").split(), *_layer_types(default)}


def _layer_types(config: Any) -> list[str]:
    """Return the type of each layer's attention and of each layer's MLP."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or [
        "full_attention" if window is None else "sliding_attention"
    ]
    return [*types, *(getattr(config, "mlp_layer_types", None) or ())]


def _layer_values(default: PreTrainedConfig, fewest: int) -> dict[str, Any]:
    """Return values with which a configuration has each kind of layer, in as few layers as possible."""
    names = {field.name for field in fields(default)}
    lists = {
        each: list(dict.fromkeys([*(getattr(default, each) or ()), *added]))
        for each, added in (
            ("layer_types", KINDS.get(default.model_type, "").split()),
            ("mlp_layer_types", []),
        )
        if each in names
    }
    count = max([fewest, *map(len, lists.values())])
    # Kinds of attention take turns. MLPs do not: published models have a few dense ones before all others.
    values: dict[str, Any] = {
        key: list(islice(cycle(types) if key == "layer_types" else chain(types, repeat(types[-1])), count))
        for key, types in lists.items()
        if types
    }
    if getattr(default, "sliding_window", None):
        values["sliding_window"] = WINDOW
    return values | dict.fromkeys(NUM_LAYERS, count)


def generated_by_transformers(model: Any, prompt: torch.Tensor) -> list[int]:
    """Return the greedy tokens of ``generate``, or of the model itself if ``generate`` misleads it."""
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        # To RoBERTa's kind, ``generate`` gives positions that begin at that of padding.
        for _ in range(NEW_TOKENS):
            logits = model(prompt[None], use_cache=False).logits[0, -1]
            prompt = torch.cat([prompt, logits.argmax()[None]])
        return prompt[-NEW_TOKENS:].tolist()
    output = model.generate(
        prompt[None],
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        forced_eos_token_id=None,
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


def served(name: str) -> Result:
    """Return whether an architecture is served with correct tokens, or the reason why not."""
    if name in UNTRIED:
        return Result(Status.UNTRIED, UNTRIED[name])
    try:
        model = make_tiny_model(name)
        prompt = torch.randint(3, model.config.get_text_config().vocab_size, (PROMPT_TOKENS,))
        expected = generated_by_transformers(model, prompt)
    except Exception as error:  # whatever the architecture's own code has against the sizes
        return Result(Status.FAILED, _first_line(error))
    with TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        make_tiny_config(name).save_pretrained(folder)
        try:
            tokens = generated_by_quire(folder, prompt)
        except UnsupportedModelError as error:
            reason = next(
                (reason for pattern, reason in REASONS.items() if re.search(pattern, str(error))), ""
            )
            return Result(Status.REFUSED if reason else Status.FAILED, reason or str(error))
    return Result(Status.SERVED) if tokens == expected else Result(Status.FAILED, "WRONG TOKENS")


def answers(folder: Path, num_ranks: int) -> list[Any]:
    """Return all tokens, and the exact logprobs of the best ones.

    Raises:
        UnsupportedModelError: ranks do not divide the model, or the architecture cannot be served.
    """
    with LLM(str(folder), dtype="float32", num_blocks=64, threads=1, tensor_parallel_size=num_ranks) as llm:
        outputs = llm.generate(RANK_PROMPTS, RANK_PARAMS, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def divided(name: str, numbers: Sequence[int]) -> Result:
    """Return whether all numbers of ranks give the same bits as one process, or the reason why not."""
    try:
        model = make_tiny_model(name, RANK_SIZES)
    except Exception as error:  # whatever the architecture's own code has against the sizes
        return Result(Status.UNTRIED, _first_line(error))
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        try:
            expected = answers(Path(folder), 1)
        except UnsupportedModelError as error:
            return Result(Status.REFUSED, f"also in one process: {_first_line(error)}")
        for number in numbers:
            try:
                found = answers(Path(folder), number)
            except (UnsupportedModelError, SettingError) as error:
                return Result(Status.REFUSED, _first_line(error))
            if found != expected:
                return Result(Status.FAILED, f"OTHER BITS on {number} ranks")
    return Result(Status.SERVED)


class Times(NamedTuple):
    """Milliseconds of one prompt of 384 tokens, and of one decode step of one sequence after it."""

    prompt: float
    step: float


def times_of_transformers(model: PreTrainedModel, prompt: list[int]) -> Times:
    """Measure a prompt and steps of transformers."""
    tokens, cache, seconds = torch.tensor([prompt]), None, []
    for _ in range(1 + SPEED_STEPS):
        start = time.perf_counter()
        output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens, cache = output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values
        seconds.append(time.perf_counter() - start)
    return Times(1000 * seconds[0], 1000 * min(seconds[1:]))


def times_of_quire(engine: Engine, prompt: list[int], index: int) -> Times:
    """Measure a prompt and steps of the engine."""
    params = SamplingParams(temperature=0.0, max_tokens=1 + SPEED_STEPS, ignore_eos=True)
    engine.add_request(as_sequence(index, prompt, params))
    seconds = []
    while not engine.is_idle:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return Times(1000 * seconds[0], 1000 * min(seconds[1:]))


@torch.inference_mode()
def speeds(name: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shortest times of both, which take turns."""
    model = make_tiny_model(name, sizes)
    prompt = torch.randint(3, 320, (SPEED_TOKENS,)).tolist()
    with TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        make_tiny_config(name, sizes).save_pretrained(folder)
        engine = make_engine(load_model(folder, "float32", CPU), 256)
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    calls: dict[str, Callable[[int], Times]] = {
        "transformers": lambda _: times_of_transformers(own, prompt),
        "quire": lambda index: times_of_quire(engine, prompt, index),
    }
    times: dict[str, list[Times]] = {each: [] for each in calls}
    for index, contender in turns(calls, SPEED_ROUNDS):
        times[contender].append(calls[contender](index + 1))
    best = {each: Times(*map(min, zip(*rounds, strict=True))) for each, rounds in times.items()}
    row: dict[str, Any] = {"architecture": name, "width": sizes["hidden_size"]}
    for part in Times._fields:
        own_time, time_here = (getattr(best[each], part) for each in calls)
        row |= {f"{part}_ms": time_here, f"{part}_own_ms": own_time, f"{part}_ratio": own_time / time_here}
    return row


SPEED_COLUMNS = {
    "architecture": "{architecture}",
    "width": "{width}",
    "prompt: ms": "{prompt_ms:.1f}",
    "transformers": "{prompt_own_ms:.1f}",
    "ratio": "{prompt_ratio:.2f}",
    "step: ms": "{step_ms:.2f}",
    "transformers ": "{step_own_ms:.2f}",
    "ratio ": "{step_ratio:.2f}",
}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@program
def main(options: Options) -> Report:
    """Try the architectures."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(2 if options.speed else 1)
    if options.speed:
        rows = []
        for name, sizes in product(options.names, (SIZES, SPEED_SIZES)):
            try:
                rows.append(speeds(name, sizes))
                show_progress(f"{name}: {rows[-1]}")
            except UnsupportedModelError as error:
                show_progress(f"{name}: {_first_line(error)}")
        return Report([table("Speed beside transformers", rows, SPEED_COLUMNS)], {"speeds": rows})
    results = {}
    for name in options.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        results[name] = divided(name, options.ranks) if options.ranks else served(name)
        show_progress(f"{name}: {': '.join(filter(None, results[name]))}")
    if options.page:
        write_page(options.page, results, transformers.__version__)
    rows = [
        {"architecture": name, "result": f"{each.status}: {each.reason}"} for name, each in results.items()
    ]
    counts = Counter(each.status for each in results.values())
    columns = {"architecture": "{architecture}", "result": "{result}"}
    return Report(
        [
            table("Architectures of transformers", rows, columns),
            ", ".join(f"{status}: {count}" for status, count in counts.items()),
        ],
        {"architectures": results},
        is_failed=Status.FAILED in counts,
    )


if __name__ == "__main__":
    main()
