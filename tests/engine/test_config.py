"""Settings of an engine: what is out of range or contradicts itself is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1; got 0"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, "or a full batch cannot decode in one step"),
        ({"num_blocks": 8, "kv_memory_bytes": 1}, "not both"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 16"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens must be from 1 to 16"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**values)
