"""How much memory the ranks of an engine need for what they exchange."""

from __future__ import annotations

from transformers import AutoConfig

from quire.engine.config import EngineConfig
from quire.engine.parallel.collectives import SharedSizes
from quire.engine.parallel.messages import message_bytes
from quire.models.source import find_model

_LEAST_ROWS = 64
"""Rows of the steps with which a model is checked at load time."""
_LONGEST = 1 << 20
"""Tokens of a sequence whose block table fits into a message; pages are taken only when written."""


def shared_sizes(config: EngineConfig, num_ranks: int) -> SharedSizes:
    """Return the sizes of the memory that the ranks of an engine share."""
    text_config = AutoConfig.from_pretrained(find_model(config.model_path)).get_text_config()
    # Besides the rows that score a prompt's tokens, each sequence has one to sample from.
    max_rows = max(config.max_num_batched_tokens + config.max_num_seqs, _LEAST_ROWS)
    width = -(-(config.max_model_len or _LONGEST) // config.block_size) + 1
    return SharedSizes(
        num_ranks,
        max_rows,
        text_config.hidden_size,
        text_config.vocab_size,
        message_bytes(max_rows, config.max_num_seqs, width),
    )
