"""KV budgets: what is kept, what is shared, what is refused, and that what is kept is attended rightly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.engine.errors import KvBudgetError, RequestTooLongError
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.sequences.paged_eviction import importance
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import NO_BLOCK, Sequence
from quire.engine.weights.loader import LoadedModel
from quire.kvindex.kv_layout import KvShape
from quire.sampling.params import BeamParams, SamplingParams
from tests.testing.tiny_engine import BLOCK_SIZE, CPU, make_engine, make_prompt, run, run_in_order
from tests.testing.tiny_engine import make_request as make_any_request

BUDGET = 64
LoadTiny = Callable[[str], LoadedModel]


def make_request(name: str, length: int = 200, budget: int | None = BUDGET, **params: Any) -> Sequence:
    values = {"temperature": 0.0, "max_tokens": 80, "kv_budget_tokens": budget, **params}
    return make_any_request(name, make_prompt(length), **values)


def test_a_block_matters_by_its_values_and_keys() -> None:
    memory = KvMemory(KvShape(2, 2, 4, 8, "float32"), 3, CPU)
    memory.blocks[:, :, 0] = 2.0
    memory.blocks[:, :, 1] = 1.0
    memory.blocks[1, :, 1] = 3.0
    memory.blocks[2, :, 0] = 4.0
    assert importance(memory, [0, 1, 2]) == pytest.approx([0.5, 1.5, 0.25])
    assert importance(memory, [2, 0]) == pytest.approx([0.25, 0.5])


def test_the_budget_holds_from_the_prompts_end_on(model: LoadedModel) -> None:
    engine = make_engine(model)
    request = make_request("r")
    engine.add_request(request)
    while not engine.is_idle:
        engine.step()
        if request.num_computed_tokens >= request.num_prompt_tokens and request.block_table:
            assert len(request.held_blocks) <= BUDGET // BLOCK_SIZE
            newest = (request.num_computed_tokens - 1) // BLOCK_SIZE
            assert NO_BLOCK not in request.block_table[newest:]
    engine.check_conservation()


def test_a_budget_that_holds_all_changes_nothing(model: LoadedModel) -> None:
    [exact] = run_in_order(make_engine(model), make_request("r", budget=None))
    assert run_in_order(make_engine(model), make_request("r", budget=304)) == [exact]
    assert run_in_order(make_engine(model), make_request("r")) != [exact]


def test_kept_blocks_are_attended_at_their_own_positions(model: LoadedModel) -> None:
    """Dropping all but the latest blocks of a Llama is a sliding window cut at blocks: torch can show it."""
    engine = make_engine(model, score=lambda _, block_ids: list(map(float, range(len(block_ids)))))
    request = make_request("r", max_tokens=40)
    [tokens] = run_in_order(engine, request)
    sequence = torch.tensor([request.token_ids])
    positions = torch.arange(sequence.shape[1])
    num_prompt = request.num_prompt_tokens
    # A token after the prompt sees its own block and the three full ones before; all of it in one pass.
    first_seen = (positions // BLOCK_SIZE - (BUDGET // BLOCK_SIZE - 1)) * BLOCK_SIZE
    first_seen = torch.where(positions < num_prompt, 0, first_seen)
    is_seen = (positions[None, :] <= positions[:, None]) & (positions[None, :] >= first_seen[:, None])
    mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, float("-inf"))[None, None]
    model.module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = model.module(input_ids=sequence, attention_mask=mask, use_cache=False).logits[0]
    finally:
        model.module.set_attn_implementation("quire")
    assert logits[num_prompt - 1 : -1].argmax(dim=-1).tolist() == tokens


def test_only_the_prompt_is_shared(model: LoadedModel) -> None:
    engine = make_engine(model)
    first = make_request("first")
    [tokens] = run_in_order(engine, first)
    held = len(engine.pool.look_up(first.block_hashes))
    assert held == first.num_prompt_tokens // BLOCK_SIZE
    after = Sequence("after", first.token_ids[:], 280, SamplingParams(max_tokens=1), b"root")
    after.extend_hashes(BLOCK_SIZE)
    assert len(engine.pool.look_up(after.block_hashes)) == held
    assert run_in_order(engine, make_request("again")) == [tokens]


@pytest.mark.parametrize("is_swapped", [True, False])
def test_preempted_requests_continue_unchanged(model: LoadedModel, is_swapped: bool) -> None:
    lengths = [100, 120, 140]
    expected = [run_in_order(make_engine(model), make_request("r", length, n=3))[0] for length in lengths]
    engine = make_engine(model, num_blocks=22, num_swap_blocks=64, prefers_swap=is_swapped)
    requests = [make_request(str(length), length, n=3) for length in lengths]
    assert run_in_order(engine, *requests) == expected
    assert engine.preemption.counts[not is_swapped] > 0


def test_a_request_is_cut_again_though_its_whole_prompt_is_cached(model: LoadedModel) -> None:
    """Its prompt ends with a block, so that nothing of it would have to be computed again."""
    length = 7 * BLOCK_SIZE
    [expected] = run_in_order(make_engine(model), make_request("r", length))
    engine = make_engine(model)
    request = make_request("r", length)
    engine.add_request(request)
    while request.num_tokens < length + 2:
        engine.step()
    [group] = engine.queues.running
    engine.preemption.preempt(group, Schedule())
    run(engine)
    assert request.token_ids[length:] == expected


def test_a_transferred_prompt_is_cut_where_it_arrives(model: LoadedModel) -> None:
    [expected] = run_in_order(make_engine(model), make_request("r"))
    prefill, decode = make_engine(model), make_engine(model)
    there, here = make_request("r"), make_request("r")
    there.stops_after_prefill = True
    decode.transfers.accept(here)
    prefill.add_request(there)
    while not there.status.is_finished:
        prefill.step()
    assert NO_BLOCK not in there.block_table
    decode.transfers.reserve("r", lambda _: None)
    decode.transfers.grant_blocks()
    for source, target in zip(there.block_table, here.block_table, strict=True):
        decode.memory.write(target, prefill.memory.read(source))
    decode.transfers.admit("r", there.token_ids[-1])
    assert len(here.held_blocks) <= BUDGET // BLOCK_SIZE
    run(decode)
    assert here.token_ids[here.num_prompt_tokens :] == expected
    prefill.abort("r")
    prefill.check_conservation()
    decode.check_conservation()


def test_the_limit_is_that_of_the_prompt_and_the_budget(model: LoadedModel) -> None:
    """The prompt has 13 blocks; three answers to it have 25 each at their ends and keep 4."""
    engine = make_engine(model, num_blocks=32)
    with pytest.raises(RequestTooLongError, match="take 51 blocks; this worker has 32"):
        engine.add_request(make_request("r", n=3, max_tokens=200, budget=None))
    assert len(run_in_order(engine, make_request("r", n=3, max_tokens=200))[0]) == 200


def test_unsupported_kv_budgets_are_refused(model: LoadedModel, load: LoadTiny) -> None:
    with pytest.raises(KvBudgetError, match="must be at least 48, 3 blocks; got 47"):
        make_engine(model).add_request(make_request("r", budget=47))
    for architecture in ("mistral", "gemma2"):
        with pytest.raises(KvBudgetError, match="sliding windows"):
            make_engine(load(architecture)).add_request(make_request("r"))
    with pytest.raises(ValueError, match="kv_budget_tokens"):
        SamplingParams(kv_budget_tokens=64, beam=BeamParams(2))
