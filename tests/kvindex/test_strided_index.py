"""An index in which only each k-th block is published."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from quire.kvindex.index import Holding
from quire.kvindex.membership import WorkerRecord
from quire.kvindex.strided_index import StridedIndex

WORKER = WorkerRecord("a", "prefill", "a:1", "epoch", "fingerprint")


class Held:
    """An index of one worker, which holds a number of leading blocks; ``asked`` is the last question."""

    def __init__(self, num_held: int) -> None:
        self._num_held = num_held
        self.asked: Sequence[bytes] = ()

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        self.asked = block_hashes
        num_blocks = sum(each[0] < self._num_held for each in block_hashes)
        return [Holding(WORKER, num_blocks)] if num_blocks else []


@given(num_held=st.integers(0, 40), num_asked=st.integers(0, 40), stride=st.integers(1, 9))
async def test_it_finds_fewer_than_a_stride_too_few_and_never_too_many(
    num_held: int, num_asked: int, stride: int
) -> None:
    inner = Held(num_held)
    hashes = [bytes([index]) for index in range(num_asked)]
    found = await StridedIndex(inner, stride).look_up(hashes)
    num_found = found[0].num_blocks if found else 0
    num_shared = min(num_held, num_asked)
    assert num_found % stride == 0
    assert num_shared - stride < num_found <= num_shared
    assert [each[0] + 1 for each in inner.asked] == list(range(stride, num_asked + 1, stride))
