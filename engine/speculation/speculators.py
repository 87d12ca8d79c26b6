"""Makes the speculator that a configuration describes."""

from __future__ import annotations

import json
from typing import Any

import torch

from quire.engine.config import EngineConfig
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.speculation.draft_proposer import DraftProposer
from quire.engine.speculation.ngram_proposer import NgramProposer
from quire.engine.speculation.speculator import Speculator
from quire.engine.weights.loader import LoadedModel, load_model
from quire.models.source import find_model
from quire.settings.setting import SettingError


class DraftModelError(ValueError):
    """The draft model does not fit the model; the message says why."""


def load_draft_model(config: EngineConfig, model: LoadedModel, device: torch.device) -> LoadedModel | None:
    """Load the draft model; return None if none is configured.

    Args:
        config: names the draft model, the model that verifies, and the types of the weights.
        model: the loaded model that verifies.
        device: the device to run the draft model on.

    Raises:
        DraftModelError: the draft model has another vocabulary.
        UnsupportedModelError: its architecture cannot run over paged blocks.
        OSError: there is no such model.
    """
    if config.draft_model is None:
        return None
    check_same_tokens(config.draft_model, config.model_path)
    draft = load_model(config.draft_model, config.dtype, device, config.weight_dtype, config.arithmetic)
    if draft.vocab_size != model.vocab_size:
        raise DraftModelError(
            f"{config.draft_model} has logits for {draft.vocab_size} tokens, the model for "
            f"{model.vocab_size}: choose a draft model of the same family"
        )
    return draft


def make_speculator(
    config: EngineConfig,
    draft: LoadedModel | None,
    model: LoadedModel,
    memory: KvMemory,
    limits: SchedulerConfig,
) -> Speculator | None:
    """Return the speculator of an engine; None if speculation is off.

    Args:
        config: the kind of speculation.
        draft: the draft model, if there is one.
        model: the model that verifies.
        memory: the model's KV blocks. The draft model gets the same number, so it does not run out of blocks
            first.
        limits: limits of the engine's steps.

    Raises:
        SettingError: one of the models has layers with a state.
    """
    models = () if config.speculation == "off" else (model, draft)
    if any(each is not None and each.heads.states is not None for each in models):
        raise SettingError(
            f"{config.name_of('speculation')} must be off: the model or its draft model has layers with a "
            "state, which cannot go back behind a rejected draft token"
        )
    if draft is not None:
        draft_memory = KvMemory(draft.kv_shape(limits.block_size), memory.num_blocks, memory.device)
        drafter = DraftProposer(draft, draft_memory, limits, model.eos_token_ids)
        return Speculator(drafter, config.num_speculative_tokens)
    if config.speculation == "ngram":
        return Speculator(NgramProposer(), config.num_speculative_tokens)
    return None


def check_same_tokens(draft_model: str, model: str) -> None:
    """Raise DraftModelError if the tokenizers of two models give the same text different ids."""
    drafts, tokens = _read_tokens(draft_model), _read_tokens(model)
    if drafts is not None and tokens is not None and drafts != tokens:
        raise DraftModelError(
            f"{draft_model} and {model} have tokenizers with different vocabularies: "
            "a draft model must have the model's own"
        )


def _read_tokens(model: str) -> tuple[Any, Any] | None:
    path = find_model(model) / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = json.loads(path.read_text("utf-8"))
    return tokenizer["model"].get("vocab"), tokenizer.get("added_tokens")
