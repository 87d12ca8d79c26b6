"""A draft model beside the model: what it proposes, and the blocks that it holds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from quire.engine.config import EngineConfig
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import SequenceStatus
from quire.engine.speculation.draft_proposer import DraftProposer
from quire.engine.speculation.speculator import DraftRequest, Speculator
from quire.engine.speculation.speculators import DraftModelError, load_draft_model
from quire.engine.structured_output import grammar
from quire.engine.structured_output.grammar import GrammarCompiler
from quire.engine.structured_output.logits_rules import LogitsRules
from quire.engine.weights.loader import LoadedModel
from quire.sampling.output_format import OutputFormat
from tests.testing.tiny_engine import BLOCK_SIZE, CPU, make_engine, make_prompt, make_request, output, run
from tests.testing.tiny_models import make_random_model

Load = Callable[[str], LoadedModel]


def make_proposer(model: LoadedModel, num_blocks: int = 32, budget: int = 64) -> DraftProposer:
    memory = KvMemory(model.kv_shape(BLOCK_SIZE), num_blocks, CPU)
    return DraftProposer(model, memory, SchedulerConfig(BLOCK_SIZE, 4, budget), frozenset())


def test_the_model_as_its_own_draft_is_always_right(load: Load) -> None:
    model = load("llama")
    for temperature in (0.0, 1.0):
        speculator = Speculator(make_proposer(model), 4)
        engine = make_engine(model, speculator=speculator)
        num_steps = 0
        engine.add_request(make_request("r", make_prompt(15), temperature=temperature, seed=1, max_tokens=41))
        while not engine.is_idle:
            num_steps += bool(engine.step())
        drafted, accepted = speculator.counts
        assert drafted == accepted > 30
        # 1 token with the prompt, then 5 a step.
        assert num_steps <= 1 + 8


def test_a_draft_that_finished_sequences_used_has_its_blocks_again(load: Load) -> None:
    model = load("llama")
    proposer = make_proposer(model)
    engine = make_engine(model, speculator=Speculator(proposer, 4))
    for seed in range(5):
        engine.add_request(make_request(str(seed), make_prompt(90, seed), max_tokens=9))
        while not engine.is_idle:
            engine.step()
            proposer.pool.check_conservation()
    assert proposer.propose([]) == []
    assert proposer.pool.counts.used == 0


def test_a_long_prompt_has_no_draft_tokens_until_all_of_it_is_computed(load: Load) -> None:
    proposer = make_proposer(load("llama"), budget=32)
    sequence = make_request("r", make_prompt(90), temperature=0.0)
    drafts = [proposer.propose([DraftRequest(sequence, 3)])[0] for _ in range(3)]
    assert [len(draft) for draft in drafts] == [0, 0, 3]


def test_draft_tokens_continue_the_accepted_tokens(load: Load) -> None:
    model = load("llama")
    expected = make_request("r", make_prompt(20), temperature=0.0, max_tokens=12)
    run(make_engine(model), expected)
    following = output(expected)
    proposer = make_proposer(model)
    sequence = make_request("r", make_prompt(20), temperature=0.0)
    assert proposer.propose([DraftRequest(sequence, 4)]) == [following[:4]]
    # Two draft tokens were right, and then the model sampled another token than the third.
    sequence.token_ids += [*following[:2], following[2] + 1]
    [other] = proposer.propose([DraftRequest(sequence, 4)])
    fresh = make_proposer(model).propose([DraftRequest(sequence, 4)])
    assert fresh == [other]


def test_a_sequence_without_blocks_gets_no_draft_tokens(load: Load) -> None:
    proposer = make_proposer(load("llama"), num_blocks=2)
    large, small = make_request("large", make_prompt(60)), make_request("small", make_prompt(20))
    requests = [DraftRequest(large, 2), DraftRequest(small, 2)]
    assert [len(draft) for draft in proposer.propose(requests)] == [0, 2]
    small.status = SequenceStatus.FINISHED_STOPPED
    proposer.propose([])
    assert proposer.pool.counts.used == 0


def test_masks_of_draft_tokens_do_not_count_as_the_requests(
    load: Load, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(20)
    sequence = make_request("r", prompt, temperature=0.0)
    matcher = compiler.compile(OutputFormat("regex", "[a-z]{30}"), len(prompt))
    sequence.logits_rules = LogitsRules(sequence.params, len(prompt), matcher)
    seconds = count()
    monkeypatch.setattr(grammar, "thread_time", lambda: next(seconds))
    monkeypatch.setattr(grammar, "MASK_SECONDS", 3)
    [draft] = make_proposer(load("llama")).propose([DraftRequest(sequence, 3)])
    assert len(draft) == 3
    assert matcher.allowed(prompt).any()


def test_another_vocabulary_is_refused(tmp_path: Path, load: Load, tiny_model: Callable[[str], Path]) -> None:
    other = make_random_model("llama", tmp_path / "other", vocab_size=400)
    model = load("llama")
    config = EngineConfig(str(tiny_model("llama")), dtype="float32", speculation=str(other))
    with pytest.raises(DraftModelError, match="has logits for 400 tokens, the model for 320"):
        load_draft_model(config, model, CPU)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<bos>"', '"<begin>"'))
    with pytest.raises(DraftModelError, match="different vocabularies"):
        load_draft_model(config, model, CPU)
