"""The adapters of the tokens of a step."""

from __future__ import annotations

import numpy as np

from quire.engine.model.step_tensors import RowAdapters
from quire.engine.sequences.sequence import ScheduledSequence


def row_adapters(scheduled: list[ScheduledSequence]) -> RowAdapters | None:
    """Return the adapter of each token, or None if no sequence has one."""
    adapters = [sequence.adapter for sequence, _ in scheduled]
    if not any(adapters):
        return None
    addresses = np.array([adapter.address if adapter else 0 for adapter in adapters])
    max_rank = max(adapter.rank for adapter in adapters if adapter)
    return RowAdapters(np.repeat(addresses, [num_tokens for _, num_tokens in scheduled]), max_rank)
