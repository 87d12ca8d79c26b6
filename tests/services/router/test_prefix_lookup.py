"""The look-up of a prompt: its hashes, and the difference between no holders and no answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from quire.kvindex.block_hash import CacheScope, block_hashes, root_hash
from quire.kvindex.guarded_index import GuardedIndex
from quire.kvindex.index import Holding
from quire.kvindex.worker_record import WorkerRecord
from quire.services.router.execution import prefix_lookup
from quire.services.router.execution.prefix_lookup import PrefixLookup

BLOCK_SIZE = 4
SCOPE, OTHER = CacheScope("tenant", "salt"), CacheScope("other", "salt")
PROMPT = list(range(11))
DESCRIPTOR = b"model"


def root_of(descriptor: bytes, scope: CacheScope) -> bytes:
    return root_hash(descriptor, b"secret", scope)


class Index:
    """Gives one answer, and keeps what it was asked."""

    def __init__(self, answer: dict[str, int] | None) -> None:
        self._answer = answer
        self.asked: list[Sequence[bytes]] = []

    async def look_up(self, hashes: Sequence[bytes]) -> list[Holding] | None:
        self.asked.append(hashes)
        if self._answer is None:
            return None
        return [
            Holding(WorkerRecord(name, "prefill", f"{name}:1", "epoch", "fingerprint"), num_blocks)
            for name, num_blocks in self._answer.items()
        ]


def lookup(index: Index | None) -> PrefixLookup:
    return PrefixLookup(cast("GuardedIndex | None", index), root_of, BLOCK_SIZE)


@pytest.mark.parametrize("is_long", [False, True])
async def test_full_blocks_are_hashed_in_their_scope(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_long:
        monkeypatch.setattr(prefix_lookup, "INLINE_HASHED_TOKENS", 3)
    index = Index({"a": 2, "b": 1})
    prompt = await lookup(index).look_up(PROMPT, SCOPE, [DESCRIPTOR])
    hashes = prompt.block_hashes
    assert hashes == block_hashes(root_of(DESCRIPTOR, SCOPE), PROMPT, BLOCK_SIZE)
    assert len(hashes) == 2
    assert index.asked == [hashes]
    assert prompt.cached_by_worker == {"a": 8, "b": 4}, "in tokens"
    assert (await lookup(None).look_up(PROMPT, OTHER, [DESCRIPTOR])).block_hashes[0] != hashes[0]


@pytest.mark.parametrize(
    ("index", "num_tokens", "expected"),
    [(Index({}), 11, {}), (Index(None), 11, None), (None, 11, None), (Index(None), BLOCK_SIZE - 1, {})],
)
async def test_no_holders_differ_from_no_answer(
    index: Index | None, num_tokens: int, expected: dict[str, int] | None
) -> None:
    assert (
        await lookup(index).look_up(PROMPT[:num_tokens], SCOPE, [DESCRIPTOR])
    ).cached_by_worker == expected
    if index is not None and num_tokens < BLOCK_SIZE:
        assert index.asked == [], "a prompt without a full block needs no question"


async def test_each_revision_is_asked_for_its_own_hashes() -> None:
    class Indexes(Index):
        async def look_up(self, hashes: Sequence[bytes]) -> list[Holding] | None:
            name = "old" if not self.asked else "new"
            return [each for each in await super().look_up(hashes) or () if each.worker.worker_id == name]

    index = Indexes({"old": 1, "new": 2})
    prompt = await lookup(index).look_up(PROMPT, SCOPE, [DESCRIPTOR, b"next"])
    roots = [root_of(each, SCOPE) for each in (DESCRIPTOR, b"next")]
    assert index.asked == [block_hashes(each, PROMPT, BLOCK_SIZE) for each in roots]
    assert prompt.block_hashes == index.asked[0]
    assert prompt.cached_by_worker == {"old": 4, "new": 8}
    unknown = await lookup(Index(None)).look_up(PROMPT, SCOPE, [DESCRIPTOR, b"next"])
    assert unknown.cached_by_worker is None
