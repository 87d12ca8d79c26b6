"""Ranks that share no memory with rank 0 give the same bits, and no failure of theirs is silent."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.parallel import remote_ranks
from quire.engine.parallel.collectives import RanksError
from quire.engine.parallel.link import Link, Purpose, Trust, accept
from quire.engine.parallel.remote_ranks import RankLinks, RemoteRanks
from quire.llm import LLM, BeamSearchParams, SamplingParams
from quire.llm import llm as llm_module
from quire.models.random_model import make_random_model
from tests.engine.linked_ranks import be_rank
from tests.llm.divided_model import PROMPTS, SIZES, answers

pytestmark = pytest.mark.usefixtures("restored_threads")

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.engine.linked_ranks"])


class Others:
    """The processes of the ranks from 1, and whether one of them was told to end."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.has_told = Event()

    def ends(self) -> list[int | None]:
        for each in self.processes:
            each.join(20)
        return [each.exitcode for each in self.processes]


@contextmanager
def remote(monkeypatch: pytest.MonkeyPatch, rank_model: Path | None = None) -> Iterator[Others]:
    """Let ``LLM`` have its other ranks behind connections."""
    others = Others()
    path = None if rank_model is None else str(rank_model)

    def start(config: EngineConfig, device: torch.device) -> RemoteRanks:
        with socket.create_server(("127.0.0.1", 0)) as server:
            for _ in range(1, config.tensor_parallel_size):
                process = _PROCESSES.Process(target=be_rank, args=(server.getsockname()[:2], path))
                process.start()
                others.processes.append(process)
            by_token: dict[bytes, dict[Purpose, Link]] = {}
            for _ in range(len(Purpose) * len(others.processes)):
                purpose, token, link = accept(server.accept()[0], Trust(b""))
                by_token.setdefault(token, {})[purpose] = link
        links = [RankLinks(each[Purpose.STEPS], each[Purpose.BLOCKS]) for each in by_token.values()]
        return RemoteRanks(config, links, others.has_told.set)

    with monkeypatch.context() as patch:
        patch.setattr(llm_module, "start_local_ranks", start)
        try:
            yield others
        finally:
            for each in others.processes:
                each.kill()
                each.join()


def start(folder: Path, num_ranks: int, dtype: Any = "float32", **settings: Any) -> LLM:
    settings = {"num_blocks": 128, **settings}
    return LLM(str(folder), dtype=dtype, threads=1, tensor_parallel_size=num_ranks, **settings)


@pytest.mark.parametrize(
    ("architecture", "overrides", "dtype", "sizes"),
    [
        ("llama", {}, "float32", (2, 3)),
        ("llama", {"tie_word_embeddings": True}, "bfloat16", (3,)),
        ("qwen2", {"num_key_value_heads": 1}, "bfloat16", (4,)),
        ("gemma2", {}, "float16", (2,)),
    ],
)
def test_any_number_of_ranks_gives_the_same_bits(
    divided_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    overrides: dict[str, Any],
    dtype: Any,
    sizes: tuple[int, ...],
) -> None:
    folder = divided_model(architecture, **overrides)
    with LLM(str(folder), dtype=dtype, num_blocks=128, threads=1) as llm:
        expected = answers(llm)
    for num_ranks in sizes:
        with remote(monkeypatch) as others:
            with start(folder, num_ranks, dtype) as llm:
                assert answers(llm) == expected
            assert others.ends() == [0] * (num_ranks - 1)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_blocks_are_copied_and_swapped_on_all_ranks(
    divided_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str
) -> None:
    """Samples that share a partial block copy it, beams too, and preempted requests are swapped."""
    params = SamplingParams(n=3, max_tokens=60, temperature=1.0, seed=5, ignore_eos=True)
    prompts = [list(range(5, 5 + length)) for length in (27, 42, 61)]
    settings = {"num_blocks": 24, "preemption": "swap", "kv_cache_dtype": kv_cache_dtype}
    results = []
    for num_ranks in (1, 2):
        with ExitStack() as stack:
            if num_ranks > 1:
                stack.enter_context(remote(monkeypatch))
            llm = stack.enter_context(start(divided_model("llama"), num_ranks, **settings))
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert llm.stats().num_swapped > 0
            beams = llm.beam_search(prompts[:1], BeamSearchParams(beam_width=3, max_tokens=20))
            results.append(
                (
                    [[each.token_ids for each in output.outputs] for output in outputs],
                    [[each.token_ids for each in output.outputs] for output in beams],
                )
            )
    assert results[0] == results[1]


def test_the_least_important_blocks_are_those_of_all_heads(
    divided_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, kv_budget_tokens=48)
    results = []
    for num_ranks in (1, 3):
        with ExitStack() as stack:
            if num_ranks > 1:
                stack.enter_context(remote(monkeypatch))
            llm = stack.enter_context(start(divided_model("llama"), num_ranks))
            results.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert results[0] == results[1]


def test_a_rank_with_other_weights_is_refused(
    divided_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other model has the same shape, so that nothing but its weights tells the two apart."""
    other = make_random_model("llama", tmp_path, seed=1, **SIZES)
    with remote(monkeypatch, other) as others:
        with pytest.raises(RanksError, match="has loaded another model than this worker"):
            start(divided_model("llama"), 2)
        assert others.ends() == [1]


def test_a_rank_without_the_model_tells_why(
    divided_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote(monkeypatch, Path("/no/such/folder")) as others:
        with pytest.raises(RanksError, match=r"the rank at 127.0.0.1:\d+: .*/no/such/folder"):
            start(divided_model("llama"), 2)
        assert others.ends() == [1]


def test_a_rank_of_another_version_is_refused(
    divided_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_ranks, "own_version", lambda: "0.0.1")
    with remote(monkeypatch), pytest.raises(RanksError, match=r"and the worker's has 0\.0\.1: install the"):
        start(divided_model("llama"), 2)


def test_a_rank_that_is_told_to_end_tells_rank_0(
    divided_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote(monkeypatch) as others:
        with start(divided_model("llama"), 2) as llm:
            answers(llm)
            others.processes[0].terminate()
            assert others.has_told.wait(10)
            # It stays until rank 0 ends.
            assert len(answers(llm)) == len(PROMPTS)
        assert others.ends() == [0]


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (signal.SIGKILL, r"the rank at 127.0.0.1:\d+ (is gone|has closed the connection)"),
        (signal.SIGSTOP, r"the rank at 127.0.0.1:\d+ has not answered for 5 s"),
    ],
)
def test_a_rank_that_fails_between_steps_ends_the_group(
    divided_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, problem: str
) -> None:
    with remote(monkeypatch) as others, start(divided_model("llama"), 3) as llm:
        answers(llm)
        ranks = llm._ranks
        assert isinstance(ranks, RemoteRanks)
        os.kill(others.processes[1].pid, sent)
        assert re.match(problem, ranks.failure.result(timeout=30))
        with pytest.raises(RanksError, match=problem):
            answers(llm)
        others.processes[0].join(20)
        assert others.processes[0].exitcode == 1


def test_a_rank_that_stops_in_a_step_ends_the_group(
    divided_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote(monkeypatch) as others, start(divided_model("llama"), 2) as llm:
        answers(llm)
        timer = Timer(0.05, os.kill, (others.processes[0].pid, signal.SIGSTOP))
        timer.start()
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        with pytest.raises(RanksError, match="has not answered for"):
            while True:
                llm.generate(PROMPTS, params, use_tqdm=False)
