"""Embeddings in the engine: equal to those of torch, with the same bits in every batch and every division."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.engine import Engine
from quire.engine.sequences.pooling import PooledPrompt
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import LoadedModel, load_model
from quire.models.embeddings import Pooling
from tests.testing.embedding_models import expected_embedding
from tests.testing.tiny_engine import CPU, make_engine, make_prompt, make_request, run

KINDS = list(Pooling)
LENGTHS = (1, 15, 16, 40, 100)


def embedding_request(
    name: str, prompt: list[int], pooling: Pooling, *, normalizes: bool = True, dimensions: int = 64
) -> Sequence:
    pooled = PooledPrompt.of(pooling, len(prompt), dimensions, normalizes=normalizes)
    return replace(make_request(name, prompt, max_tokens=1), samples_tokens=False, pooled=pooled)


def embed(engine: Engine, *requests: Sequence) -> list[bytes]:
    outputs = run(engine, *requests)
    assert not any(outputs[request.attempt_id, 0] for request in requests if request.pooled is not None)
    return [bits(request) for request in requests if request.pooled is not None]


def bits(request: Sequence) -> bytes:
    assert request.pooled is not None
    return np.array(request.pooled.embedding(), np.float32).tobytes()


@pytest.fixture(scope="module", params=["program", "modules"])
def model(request: Any, tiny_model: Callable[..., Path]) -> LoadedModel:
    loaded = load_model(str(tiny_model("qwen3")), "float32", CPU)
    assert loaded.recipe is not None
    return loaded if request.param == "program" else replace(loaded, recipe=None)


@pytest.mark.parametrize("pooling", KINDS)
def test_embeddings_are_those_of_torch(model: LoadedModel, pooling: Pooling) -> None:
    for length in LENGTHS:
        prompt = make_prompt(length)
        for normalizes, dimensions in ((True, 64), (False, 64), (True, 8)):
            options: dict[str, Any] = {"normalizes": normalizes, "dimensions": dimensions}
            request = embedding_request("a", prompt, pooling, **options)
            embed(make_engine(model), request)
            assert request.pooled is not None
            expected = expected_embedding(model.folder, prompt, pooling, **options)
            assert request.pooled.embedding() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    "architecture", ["gpt2", "opt", "gemma3", "mistral", "gpt_neox", "granite", "mixtral", "qwen3_next"]
)
def test_other_architectures(architecture: str, tiny_model: Callable[..., Path]) -> None:
    loaded = load_model(str(tiny_model(architecture)), "float32", CPU)
    prompt = make_prompt(90)
    for pooling in KINDS:
        request = embedding_request("a", prompt, pooling)
        embed(make_engine(loaded, max_num_batched_tokens=37), request)
        assert request.pooled is not None
        expected = expected_embedding(loaded.folder, prompt, pooling)
        assert request.pooled.embedding() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("pooling", KINDS)
def test_the_same_bits_alone_in_a_batch_and_in_chunks(model: LoadedModel, pooling: Pooling) -> None:
    prompts = [make_prompt(length) for length in LENGTHS]

    def requests() -> list[Sequence]:
        return [embedding_request(str(at), prompt, pooling) for at, prompt in enumerate(prompts)]

    alone = [embed(make_engine(model), request)[0] for request in requests()]
    assert embed(make_engine(model), *requests()) == alone
    for num_tokens in (7, 16, 37):
        chunked = make_engine(model, max_num_batched_tokens=num_tokens)
        others = [make_request("writer", make_prompt(20, seed=3), max_tokens=9)]
        others.append(make_request("scored", make_prompt(30, seed=4), max_tokens=2, num_prompt_logprobs=1))
        assert embed(chunked, others[0], *requests(), others[1]) == alone


@pytest.mark.parametrize("pooling", KINDS)
def test_the_same_bits_after_a_cached_prefix(model: LoadedModel, pooling: Pooling) -> None:
    prompt = make_prompt(100)
    engine = make_engine(model)
    [first] = embed(engine, embedding_request("first", prompt, pooling))
    run(engine, make_request("writer", prompt[:80], max_tokens=1))
    again = embedding_request("again", prompt, pooling)
    assert embed(engine, again) == [first]
    # Only the state of the last token needs no others.
    assert again.num_cached_tokens == (96 if pooling is Pooling.LAST else 0)


@pytest.mark.parametrize("pooling", KINDS)
def test_the_same_bits_after_a_preemption(model: LoadedModel, pooling: Pooling) -> None:
    prompts = [make_prompt(length, seed=length) for length in (60, 70, 80, 90)]
    alone = [embed(make_engine(model), embedding_request("a", each, pooling))[0] for each in prompts]
    engine = make_engine(model, num_blocks=12, max_num_batched_tokens=16, prefers_swap=False)
    writers = [make_request(f"w{at}", make_prompt(40, seed=at), max_tokens=60) for at in range(2)]
    requests = [embedding_request(str(at), each, pooling) for at, each in enumerate(prompts)]
    assert embed(engine, *writers, *requests) == alone
    assert engine.preemption.num_preempted


def test_embeddings_with_one_beginning_share_their_steps(model: LoadedModel) -> None:
    """They compute the same blocks anew, so none of them waits for another one's."""
    beginning = make_prompt(32)
    engine = make_engine(model, max_num_batched_tokens=512)
    for at in range(4):
        prompt = beginning + make_prompt(20, seed=at)
        engine.add_request(embedding_request(str(at), prompt, Pooling.MEAN))
    assert len(engine.step()) == 4
    assert engine.is_idle


def test_states_that_are_not_finite_end_the_request_only(model: LoadedModel) -> None:
    engine = make_engine(model)
    hidden_states = engine.runner.hidden_states

    def broken(step: Any) -> Any:
        states = hidden_states(step)
        if states is None:
            return None
        states = states.clone()
        states[0] = np.nan
        return states

    engine.runner.hidden_states = broken  # type: ignore[method-assign]
    requests = [embedding_request(str(at), make_prompt(20, seed=at), Pooling.LAST) for at in range(2)]
    for request in requests:
        engine.add_request(request)
    errors = [update.error for update in engine.step()]
    assert sum(error is not None for error in errors) == 1
    assert engine.is_idle
    engine.check_conservation()
    assert requests[0].pooled is not None
    assert not requests[0].pooled.num_pooled
    assert bits(requests[1])
