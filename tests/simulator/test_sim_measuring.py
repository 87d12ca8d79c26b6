"""What a calibration asks of a cluster, and that it leaves nothing running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

from quire.client import AsyncClient
from quire.simulator.calibrate import SHARE_BATCH, calibrate

MAX_TOKENS = 1000


class FakeCluster:
    """A cluster of two decode workers that answers at once, but ends no answer of the greatest length."""

    def __init__(self) -> None:
        self.num_open = 0
        self.most_unending = 0

    async def __aenter__(self) -> FakeCluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def model_info(self) -> Any:
        return SimpleNamespace(
            max_model_len=MAX_TOKENS,
            vocab_size=300,
            eos_token_ids=[0],
            block_size=16,
            num_prefill_workers=2,
            num_decode_workers=2,
        )

    async def stream(self, prompt: list[int], *, max_tokens: int, **_: object) -> AsyncIterator[Any]:
        assert len(prompt) + max_tokens <= MAX_TOKENS
        self.num_open += 1
        try:
            for _token in range(max_tokens):
                await asyncio.sleep(0)
                yield SimpleNamespace(token_ids=[1], usage=None)
                if max_tokens > 100:
                    self.most_unending = max(self.most_unending, self.num_open)
                    await asyncio.Event().wait()
            yield SimpleNamespace(
                token_ids=[], usage=SimpleNamespace(blocks_shipped=2, bytes_shipped=2 * 4096)
            )
        finally:
            self.num_open -= 1


def test_a_calibration_fills_every_field_and_ends_its_sequences() -> None:
    cluster = FakeCluster()
    costs = asyncio.run(calibrate(lambda: cast("AsyncClient", cluster), num_blocks=100, max_num_seqs=4))
    assert cluster.num_open == 0
    assert cluster.most_unending >= 2 * SHARE_BATCH
    assert [tokens for tokens, _ in costs.prefill] == [64, 128, 256, 512]
    assert [sequences for sequences, _ in costs.decode_step] == [1, 2, 4]
    assert (costs.block_tokens, costs.block_bytes, costs.pull_bytes_per_second) == (16, 4096, None)
    assert 0 < costs.prefill_share <= 1
    assert 0 <= costs.decode_share <= 1
    assert costs.context_seconds >= 0
