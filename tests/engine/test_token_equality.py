"""The engine's greedy tokens equal those of transformers' generate, however the work is split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.engine.decode_graphs import CudaCapture, DecodeGraphs
from quire.engine.engine import Engine
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import load_model
from quire.engine.scheduler import SchedulerConfig
from quire.engine.sequence import Sequence
from quire.sampling.params import SamplingParams

BLOCK_SIZE = 16
NUM_NEW = 64
ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "opt", "gpt_oss"]
PROMPT_LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 50, 100]


def hash_block(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.sha256(parent + str(tokens).encode()).digest()[:16]


def make_engine(
    model: Path, *, budget: int = 512, num_blocks: int = 512, max_num_seqs: int = 64, device: str = "cpu"
) -> Engine:
    loaded = load_model(str(model), "float32", torch.device(device))
    memory = KvMemory(loaded.kv_shape(BLOCK_SIZE), num_blocks, torch.device(device))
    config = SchedulerConfig(
        BLOCK_SIZE, max_num_seqs=min(max_num_seqs, budget), max_num_batched_tokens=budget
    )
    return Engine(loaded, memory, config, hash_block)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return Random(seed * 1000 + length).choices(range(2, 320), k=length)


def make_sequence(attempt_id: str, prompt: list[int], **params: object) -> Sequence:
    values = {"temperature": 0.0, "max_tokens": NUM_NEW, "ignore_eos": True, **params}
    return Sequence(attempt_id, list(prompt), len(prompt), SamplingParams(**values), b"root")  # type: ignore[arg-type]


def run(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    for sequence in sequences:
        engine.add_request(sequence)
    while not engine.is_idle:
        engine.step()
    engine.check_conservation()
    assert engine.pool.counts.used == 0
    return [s.token_ids[s.num_prompt_tokens :] for s in sequences]


@pytest.fixture(scope="module")
def expected(tiny_model: Callable[[str], Path]) -> Callable[[str, list[int]], list[int]]:
    """Return a function from (architecture, prompt) to the tokens of transformers' generate."""
    models: dict[str, torch.nn.Module] = {}

    def generate(architecture: str, prompt: list[int]) -> list[int]:
        if architecture not in models:
            models[architecture] = AutoModelForCausalLM.from_pretrained(
                tiny_model(architecture), dtype=torch.float32, attn_implementation="eager"
            )
        ids = torch.tensor([prompt])
        output = models[architecture].generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=NUM_NEW,
            max_new_tokens=NUM_NEW,
            eos_token_id=None,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    return generate


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_prompt_length(architecture, tiny_model, expected) -> None:
    engine = make_engine(tiny_model(architecture))
    for length in PROMPT_LENGTHS:
        prompt = make_prompt(length)
        [tokens] = run(engine, [make_sequence("r", prompt)])
        assert tokens == expected(architecture, prompt), f"{length} prompt tokens"


@pytest.mark.parametrize("budget", [16, 100])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_prefill_in_chunks(architecture, budget, tiny_model, expected) -> None:
    engine = make_engine(tiny_model(architecture), budget=budget)
    prompt = make_prompt(200)
    assert run(engine, [make_sequence("r", prompt)]) == [expected(architecture, prompt)]


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_prefix_hits(architecture, tiny_model, expected) -> None:
    engine = make_engine(tiny_model(architecture))
    prompt = make_prompt(96)
    first, again, longer = (
        make_sequence("first", prompt),
        make_sequence("again", prompt),
        make_sequence("longer", prompt + make_prompt(20)),
    )
    assert run(engine, [first]) == run(engine, [again]) == [expected(architecture, prompt)]
    assert run(engine, [longer]) == [expected(architecture, prompt + make_prompt(20))]
    # A full hit still computes its last token, whose logits give the first one that is drawn.
    assert [s.num_cached_tokens for s in (first, again, longer)] == [0, 95, 96]


@pytest.mark.parametrize(("num_equal", "num_cached"), [(37, 37), (44, 44), (47, 47), (48, 48), (35, 32)])
def test_the_beginning_of_a_cached_block_is_reused(num_equal, num_cached, tiny_model, expected) -> None:
    engine = make_engine(tiny_model("llama"))
    prompt = make_prompt(64)
    forked = prompt[:num_equal] + [(token + 1) % 300 + 2 for token in prompt[num_equal:]]
    first, second, again = (make_sequence(n, p) for n, p in (("1", prompt), ("2", forked), ("3", prompt)))
    outputs = [run(engine, [sequence]) for sequence in (first, second, again)]
    assert outputs == [[expected("llama", prompt)], [expected("llama", forked)], [expected("llama", prompt)]]
    assert [s.num_cached_tokens for s in (first, second, again)] == [0, num_cached, 63]


def test_a_block_is_not_evicted_before_it_is_copied(tiny_model, expected) -> None:
    engine = make_engine(tiny_model("llama"), num_blocks=16)
    run(engine, [make_sequence("first", make_prompt(30), max_tokens=2)])
    run(engine, [make_sequence("filler", make_prompt(220), max_tokens=4)])
    assert engine.pool.counts == (2, 14, 0)  # the next eviction is the first one's block
    moved = []
    move_blocks = engine.runner.move_blocks
    engine.runner.move_blocks = lambda schedule: (moved.append(schedule), move_blocks(schedule))[1]  # type: ignore[method-assign]
    second = make_sequence("second", make_prompt(30)[:10] + make_prompt(140))
    assert run(engine, [second]) == [expected("llama", second.token_ids[:150])]
    assert second.num_cached_tokens == 10
    [(source, own)] = moved[0].copies
    assert source != own
    assert moved[0].pinned == [source]


def test_nothing_is_copied_when_the_pool_has_no_block_to_spare(tiny_model, expected) -> None:
    engine = make_engine(tiny_model("llama"), num_blocks=12)
    run(engine, [make_sequence("first", make_prompt(30), max_tokens=2)])
    second = make_sequence("second", make_prompt(30)[:10] + make_prompt(170), max_tokens=12)
    assert run(engine, [second]) == [expected("llama", second.token_ids[:180])[:12]]
    assert second.num_cached_tokens == 0


def test_blocks_of_other_roots_are_not_copied(tiny_model) -> None:
    engine = make_engine(tiny_model("llama"))
    run(engine, [make_sequence("mine", make_prompt(40))])
    other = make_sequence("other", make_prompt(40))
    other.root_hash = b"another tenant's"
    run(engine, [other])
    assert other.num_cached_tokens == 0


def test_thirty_two_requests_at_once(tiny_model, expected) -> None:
    engine = make_engine(tiny_model("llama"), budget=128)
    prompts = [make_prompt(1 + 5 * index, seed=index % 3) for index in range(32)]
    outputs = run(engine, [make_sequence(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert outputs == [expected("llama", prompt) for prompt in prompts]


def test_preempted_sequences_are_recomputed(tiny_model, expected) -> None:
    engine = make_engine(tiny_model("llama"), num_blocks=16)
    prompts = [make_prompt(40, seed=index) for index in range(4)]
    outputs = run(engine, [make_sequence(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert engine.preemption.num_preempted > 0
    assert outputs == [expected("llama", prompt) for prompt in prompts]


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize(
    ("device", "has_graphs"),
    [
        pytest.param("cpu", True, id="cpu, fixed memory"),
        pytest.param("cuda", False, id="cuda", marks=ON_GPU),
        pytest.param("cuda", True, id="cuda, graphs", marks=ON_GPU),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral"])
def test_decode_steps_in_fixed_memory(
    architecture, device, has_graphs, tiny_model, expected, monkeypatch
) -> None:
    """What a graph replays on a GPU, the CPU runs again, over the same padded tensors."""
    replays = []
    run_graph = DecodeGraphs.run
    monkeypatch.setattr(DecodeGraphs, "run", lambda self, s: (replays.append(s), run_graph(self, s))[1])
    engine = make_engine(tiny_model(architecture), device=device)
    if has_graphs:
        capture = CudaCapture() if device == "cuda" else lambda function: function
        engine.runner.capture_decode_steps(capture, 12, engine.max_model_len)
    prompts = [make_prompt(10 + 9 * index) for index in range(11)]
    for batch in (prompts[:1], prompts):  # the first rung, and one that is padded
        outputs = run(engine, [make_sequence(str(i), prompt) for i, prompt in enumerate(batch)])
        assert outputs == [expected(architecture, prompt) for prompt in batch]
    assert bool(replays) == has_graphs


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(tiny_model) -> None:
    engine = make_engine(tiny_model("llama"))
    params = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 1234}
    [alone] = run(engine, [make_sequence("alone", make_prompt(30), **params)])
    crowd = [make_sequence(f"c{i}", make_prompt(5 + i), temperature=1.0, seed=i) for i in range(31)]
    [among, *_] = run(engine, [make_sequence("among", make_prompt(30), **params), *crowd])
    assert among == alone
    assert len(set(alone)) > 10
