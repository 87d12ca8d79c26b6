"""What a rank needs to know at its start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from transformers import AutoConfig

from quire.engine.config import EngineConfig
from quire.engine.model.collectives import SharedSizes
from quire.engine.ranks.messages import message_bytes
from quire.models.source import find_model
from quire.settings.setting import SettingError

_LEAST_ROWS = 64
"""Rows of the steps that check a model at load time."""
_LONGEST = 1 << 20
"""Messages have room for the block table of a sequence with this many tokens. Unused pages cost no memory."""


@dataclass(frozen=True)
class RankSettings:
    """The settings of a rank process.

    Attributes:
        model: the model's folder.
        num_threads: threads of each rank.
        sizes: the sizes of the shared memory.
        memory, pool, control, life: file descriptors of the shared memory, the KV blocks, the socket with
            messages for this rank, and a pipe that closes when rank 0 ends.
    """

    rank: int
    model: str
    dtype: str
    weight_dtype: str
    arithmetic: str
    block_size: int
    kv_cache_dtype: str
    num_threads: int
    sizes: SharedSizes
    memory: int
    pool: int
    control: int
    life: int

    def to_json(self) -> str:
        """Return the settings as text."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> RankSettings:
        """Return the settings that a text contains."""
        values = json.loads(text)
        return cls(**{**values, "sizes": SharedSizes(**values["sizes"])})


def shared_sizes(config: EngineConfig, num_ranks: int) -> SharedSizes:
    """Return the sizes of the memory that the ranks of an engine share."""
    text_config = AutoConfig.from_pretrained(find_model(config.model_path)).get_text_config()
    # In addition to the rows that score a prompt's tokens, each sequence has one row to sample from.
    max_rows = max(config.max_num_batched_tokens + config.max_num_seqs, _LEAST_ROWS)
    width = -(-(config.max_model_len or _LONGEST) // config.block_size) + 1
    has_windows = "sliding_attention" in (getattr(text_config, "layer_types", None) or ())
    return SharedSizes(
        num_ranks,
        max_rows,
        text_config.hidden_size,
        text_config.vocab_size,
        message_bytes(
            max_rows, config.max_num_seqs, width, text_config.num_hidden_layers if has_windows else 1
        ),
    )


def check_device(config: EngineConfig, device: torch.device) -> None:
    """Raise SettingError if a model cannot be divided among processes on a device."""
    if device.type != "cpu":
        size = config.name_of("tensor_parallel_size")
        raise SettingError(
            f"{size} {config.tensor_parallel_size} runs on CPUs only, and the device is {device.type!r}: "
            f"leave {size} at 1, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
