"""Writes the configuration and the tokenizer of a GGUF file into a folder, as a process of its own.

A file with a setting that is not read here is refused: without it the model would compute something else.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from quire.models.file_checks import ModelFileError, damaged
from quire.models.gguf_folder import GGUF_NAME
from quire.models.gguf_header import GgufHeader, read_header

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
}
"""Transformers' names of GGUF's architectures that quire reads."""
_OWN = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Settings that transformers' mapping leaves out."""
_CHECKED = ("rope.dimension_count", "attention.key_length", "attention.value_length")
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Layers of the models with 27B parameters, which divide scores by other numbers than the head's size."""
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
)
"""Control tokens that end an answer, though a file names only one of them."""
_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens, by their numbers in ``tokenizer.ggml.token_type``."""
_BOS_AND_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""Pre-tokenizers of vocabularies that begin with BOS, and whose words need no merges if they are tokens."""


def write_folder(path: Path, folder: Path) -> None:
    """Write the files of a model's folder, and a link to its GGUF file.

    Raises:
        ModelFileError: quire cannot read the file.
    """
    header = read_header(path)
    if header.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelFileError(f"{path} has the architecture {header.architecture}: quire reads {known}")
    tokenizer = _tokenizer(path, header)
    end_ids = _end_ids(header, tokenizer)
    config = {**_config(path, header), "eos_token_id": end_ids, "dtype": _dtype(header)}
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
    (folder / GGUF_NAME).symlink_to(path)


def _config(path: Path, header: GgufHeader) -> dict[str, Any]:
    name = ARCHITECTURES[header.architecture]
    model_type = "gemma3_text" if name == "gemma3" else name
    defaults = AutoConfig.for_model(model_type)
    names: dict[str, str | None] = {key: each for key, each in _OWN.items() if hasattr(defaults, each)}
    names |= GGUF_CONFIG_MAPPING[name]
    prefix = f"{header.architecture}."
    values: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(name, {}))
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    stated = {key[len(prefix) :]: value for key, value in header.settings.items() if key.startswith(prefix)}
    scaling = stated.pop("rope.scaling.type", "none"), stated.pop("rope.scaling.factor", 1.0)
    if scaling[0] == "none":
        # Files of Phi 3 state it although nothing is scaled. Factors for long contexts are tensors.
        stated.pop("rope.scaling.original_context_length", None)
    if name == "phi3" and stated.get("attention.sliding_window") == 0:
        del stated["attention.sliding_window"]  # so the converter writes that Phi 4 has none
    local_theta = stated.pop("rope.freq_base_swa", None) if name == "gemma3" else None
    for key, value in stated.items():
        if (key not in names and key not in _CHECKED) or isinstance(value, list):
            raise ModelFileError(f"{path} has the setting {prefix}{key} = {value}, which quire does not read")
        if names.get(key):
            values[str(names[key])] = value
    try:
        num_heads, width = values["num_attention_heads"], values["hidden_size"]
        values["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
        values.setdefault("num_key_value_heads", num_heads)
        values["head_dim"] = head_dim = stated.get("attention.key_length", width // num_heads)
    except KeyError as error:
        raise damaged(path, f"has no {error}") from error
    for key in _CHECKED:
        if stated.get(key, head_dim) != head_dim:
            problem = f"quire reads only {head_dim}, the size of a head"
            raise ModelFileError(f"{path} has the setting {prefix}{key} = {stated[key]}: {problem}")
    if layers := _LARGEST_GEMMAS.get(name):
        if "sliding_window" not in values:
            raise damaged(path, f"has no {prefix}attention.sliding_window")
        is_largest = values["num_hidden_layers"] == layers
        values["query_pre_attn_scalar"] = width // num_heads if is_largest else head_dim
    for key in ("bos", "padding"):
        values[f"{key[:3]}_token_id"] = header.settings.get(f"tokenizer.ggml.{key}_token_id")
    config = AutoConfig.for_model(model_type, **values)
    if local_theta is not None:
        config.rope_parameters["sliding_attention"]["rope_theta"] = local_theta
    _scale_rope(path, header, config, *scaling)
    written: dict[str, Any] = config.to_dict()
    del written["transformers_version"]
    return written


def _scale_rope(path: Path, header: GgufHeader, config: Any, kind: str, factor: float) -> None:
    """Set how a configuration scales rotary positions; Llama 3.1 states it only as a tensor."""
    rope = config.rope_parameters
    if kind == "linear":
        # The layers of Gemma 3 with a window are never scaled.
        rope.get("full_attention", rope).update(rope_type="linear", factor=factor)
    elif kind != "none":
        raise ModelFileError(f"{path} scales positions by {kind}: quire reads linear and Llama 3's")
    if (tensor := header.tensors.get("rope_freqs.weight")) is None:
        return
    factors = np.fromfile(path, np.float32, math.prod(tensor.shape), offset=tensor.start)
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 3), **_LLAMA3_ROPE}
    if kind != "none" or not _is_llama3(factors, rope["rope_theta"], scaling):
        raise ModelFileError(f"{path} has a tensor rope_freqs.weight with other values than those of Llama 3")
    rope.update(scaling)


def _is_llama3(factors: np.ndarray[Any, Any], theta: float, scaling: dict[str, Any]) -> bool:
    """Return whether factors by which frequencies are divided are those of a scaling of Llama 3."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * np.pi)
    turns = turns * theta ** -(np.arange(len(factors)) / len(factors))
    share = np.clip((turns - low) / (high - low), 0, 1)
    return np.allclose(factors, 1 / ((1 - share) / scaling["factor"] + share), rtol=1e-3)


def _dtype(header: GgufHeader) -> str:
    """Return the dtype of most weights; quantized ones are computed in bfloat16."""
    num_weights: dict[str, int] = {}
    for tensor in header.tensors.values():
        num_weights[tensor.kind.name] = num_weights.get(tensor.kind.name, 0) + math.prod(tensor.shape)
    most = max(num_weights, key=num_weights.__getitem__)
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _tokenizer(path: Path, header: GgufHeader) -> Any:
    settings = header.settings
    kind, pre = settings.get("tokenizer.ggml.model"), settings.get("tokenizer.ggml.pre")
    if kind in (None, "none", "no_vocab") or "tokenizer.ggml.tokens" not in settings:
        raise ModelFileError(f"{path} has no tokenizer")
    if kind not in ("gpt2", "llama"):
        raise ModelFileError(f"{path} has a tokenizer {kind}: quire reads gpt2 and llama")
    if kind == "gpt2" and pre not in {*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2"}:
        raise ModelFileError(f"{path} divides text by tokenizer.ggml.pre = {pre}, which quire does not read")
    if header.architecture == "llama" and not settings.get("tokenizer.ggml.add_space_prefix", True):
        raise ModelFileError(f"{path} has tokenizer.ggml.add_space_prefix = false, which quire does not read")

    def mapping(group: str) -> dict[str, Any]:
        names = GGUF_TOKENIZER_MAPPING[group].items()
        return {name: settings[f"tokenizer.{key}"] for key, name in names if f"tokenizer.{key}" in settings}

    # Files cannot store an empty list, as that of a vocabulary of bytes.
    merges: dict[str, Any] = {"merges": []} if kind == "gpt2" else {}
    converted, _ = convert_gguf_tokenizer(header.architecture, {**merges, **mapping("tokenizer")})
    if pre in _BOS_AND_WHOLE_WORDS:
        converted.model.ignore_merges = True
    # Transformers' classes add their own special tokens, for which the model may have no logits.
    state = json.loads(converted.to_str())
    num_tokens = len(settings["tokenizer.ggml.tokens"])
    added = {each["id"]: each for each in state["added_tokens"] if each["id"] < num_tokens}
    if kind == "gpt2":
        _add_texts(settings, state["model"]["vocab"], added)
    state["added_tokens"] = [added[each] for each in sorted(added)]
    converted = Tokenizer.from_str(json.dumps(state))
    options = {"add_bos_token": kind == "llama" or pre in _BOS_AND_WHOLE_WORDS, **mapping("tokenizer_config")}
    for name in ("bos", "eos", "unknown", "padding"):
        token = settings.get(f"tokenizer.ggml.{name}_token_id")
        options[f"{name[:3]}_token"] = None if token is None else settings["tokenizer.ggml.tokens"][token]
    return PreTrainedTokenizerFast(tokenizer_object=converted, **options)


def _add_texts(settings: Mapping[str, Any], vocabulary: dict[str, int], added: dict[int, Any]) -> None:
    """Give control tokens their own text; transformers spells some in bytes, as those of DeepSeek."""
    spelled = {number: text for text, number in vocabulary.items()}
    kinds = settings.get("tokenizer.ggml.token_type", ())
    for number, (text, kind) in enumerate(zip(settings["tokenizer.ggml.tokens"], kinds, strict=False)):
        if kind in (_CONTROL, _USER_DEFINED) and number not in added:
            vocabulary.pop(spelled.get(number, ""), None)
            vocabulary[text] = number
            options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added[number] = {"id": number, "content": text, "special": kind == _CONTROL, **options}


def _end_ids(header: GgufHeader, tokenizer: Any) -> list[int]:
    stated = (header.settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    known = tokenizer.get_added_vocab()
    return sorted({*(each for each in stated if each is not None), *(known[e] for e in _ENDS if e in known)})


def main(path: Path, folder: Path) -> int:
    """Write a folder whole or not at all; return 2 if quire cannot read the file."""
    with TemporaryDirectory(dir=folder.parent) as unfinished:
        try:
            write_folder(path, written := Path(unfinished, "written"))
        except ModelFileError as error:
            print(error, file=sys.stderr)
            return 2
        os.rename(written, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
