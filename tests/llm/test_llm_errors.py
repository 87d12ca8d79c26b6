"""What LLM refuses, before anything runs; and what Ctrl-C leaves behind."""

from __future__ import annotations

import pickle
import signal
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from quire.engine.errors import NoTokenLeftError, RequestFailedError
from quire.engine.sequences import sampler
from quire.engine.sequences.sequence import Sequence
from quire.engine.structured_output.grammar import FormatFailedError
from quire.llm import LLM, BeamSearchParams, RequestOutput, RequestsFailedError, SamplingParams
from quire.llm import llm as llm_module
from quire.llm.batch import uninterrupted
from quire.llm.config import LLMConfig
from quire.llm.prompts import with_texts
from quire.tokenization.chat_template import ChatTemplateError
from quire.tokenization.tokenizer import MissingTokenizerError

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 0}, "n must be from 1 to 64; got 0"),
        ({"temperature": -1.0}, "temperature must be from 0 to 1000000; got -1"),
        ({"top_k": -2}, "top_k must be at least 1, or 0 or -1 for off; got -2"),
        ({"n": 0, "best_of": 5}, "n must be from 1 to 64; got 0"),
        ({"best_of": 65}, "best_of must be from n = 1 to 64; got 65"),
        ({"stop": ["a", ""]}, "stop must be strings that are not empty"),
        ({"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        ({"max_tokens": 3.5}, "max_tokens must be a whole number; got 3.5"),
        ({"seed": True}, "seed must be a whole number; got True"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False; got 'no'"),
        ({"min_tokens": 17}, "min_tokens must be from 0 to max_tokens = 16; got 17"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20; got 21"),
        ({"logit_bias": {1: 101.0}}, r"logit_bias\[1\] must be from -100 to 100; got 101"),
        ({"bad_words": "word"}, "bad_words must be texts that are not blank; got 'word'"),
        ({"bad_words": [" "]}, "bad_words must be texts that are not blank"),
    ],
)
def test_parameters_name_field_limit_and_value(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 1}, "beam_width must be from 2 to 64; got 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        ({"length_penalty": 2000.0}, "length_penalty must be from -10 to 10; got 2000"),
        ({"early_stopping": "soon"}, "early_stopping must be True, False or 'never'; got 'soon'"),
    ],
)
def test_beam_parameters_too(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 4, "max_tokens": 8, **params})


@pytest.mark.parametrize(
    "error",
    [
        NoTokenLeftError("bad_words", 3),
        FormatFailedError("format.regex", "cannot be continued"),
        RequestsFailedError([RequestFailedError("too bad")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_other_processes(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert repr(vars(copy)) == repr(vars(error))


@pytest.mark.parametrize(
    ("conversation", "problem"),
    [
        ([], r"messages\[0\] must be a list of messages"),
        ("hello", r"messages\[0\] must be a list of messages"),
        ([{"role": "user"}], r"messages\[0\]\[0\].content must be a text; got None"),
        ([{"role": "user", "content": b"hello"}], "must be a text; got b'hello'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "must be a text; got .*image"),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\]\[0\].content is no Unicode text"),
        (["hello"], r"messages\[0\]\[0\] must be a message with role and content"),
    ],
)
def test_conversations_consist_of_texts(conversation: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        with_texts(conversation, 0)


def test_parts_of_a_content_are_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert with_texts([{"role": "user", "content": parts}], 0) == [{"role": "user", "content": "a b"}]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["fine", "x" * 400], GREEDY, r"prompts\[1\] must hold from 1 to 399 tokens.*; got 400"),
        (["fine", ""], GREEDY, r"prompts\[1\] must hold from 1 to 399 tokens.*; got 0"),
        (b"fine", GREEDY, r"prompts\[0\] must be a text or a list of token ids; got int"),
        (["fine", None], GREEDY, r"prompts\[1\] must be a text or a list of token ids; got NoneType"),
        (["fine", "\ud800"], GREEDY, r"prompts\[1\] is no Unicode text"),
        ([[5, 320]], GREEDY, r"prompts\[0\] must be token ids below 320; got 320"),
        (["fine", "fine"], [GREEDY], "there are 2 prompts, but parameters for 1"),
        (["fine"], [], "there are 1 prompts, but parameters for 0"),
        (["fine"], SamplingParams(n=64, max_tokens=300), r"prompts\[0\]: 64 sequences .* blocks"),
        (["fine"], SamplingParams(max_tokens=None, min_tokens=399), "min_tokens must be at most 396"),
        (["fine"], SamplingParams(stop_token_ids=[-1]), r"sampling_params\[0\].stop_token_ids must be token"),
        (["fine"], SamplingParams(logit_bias={999: 1.0}), r"sampling_params\[0\].logit_bias must be token"),
        (
            ["fine"],
            SamplingParams(allowed_token_ids=[1], min_tokens=3),
            r"sampling_params\[0\].min_tokens leaves no token",
        ),
    ],
)
def test_one_bad_request_is_refused_before_any_runs(
    tiny: LLM, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.generate(prompts, params)
    assert tiny.engine.is_idle
    assert tiny.stats().num_requests == tiny.stats().num_cached_blocks == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda; got 'tpu'"),
        ({"dtype": "int4"}, "dtype must be one of auto, float32, bfloat16, float16; got 'int4'"),
        ({"num_blocks": 4, "kv_memory_bytes": 1 << 20}, "give num_blocks or kv_memory_bytes, not both"),
        ({"kv_memory_bytes": 1}, "the pool must hold at least two blocks of .* raise kv_memory_bytes"),
        ({"num_blocks": 1}, "num_blocks must be at least 2; got 1"),
        ({"swap_space_bytes": -1}, "swap_space_bytes must be at least 0; got -1"),
        ({"max_num_seqs": 600}, "max_num_batched_tokens"),
    ],
)
def test_settings_that_contradict_each_other(
    tiny_folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_folder), **settings)


def test_the_arguments_are_the_fields_of_the_configuration(tiny_folder: Path) -> None:
    """Type checkers read the same signature."""
    parameters = signature(LLM).parameters
    assert list(parameters) == [field.name for field in fields(LLMConfig)]
    assert {name: each.default for name, each in parameters.items()} == {
        field.name: field.default for field in fields(LLMConfig)
    }
    with pytest.raises(TypeError, match="blocks"):
        LLM(str(tiny_folder), blocks=4)  # type: ignore[call-arg]


def test_models_without_tokenizer_or_template(tiny: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat template: use generate"):
        tiny.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(MissingTokenizerError, match="save_pretrained"):
        LLM(str(tmp_path))


def test_a_template_that_refuses(demo: LLM) -> None:
    with pytest.raises(ChatTemplateError, match="unknown role: critic"):
        demo.chat([{"role": "critic", "content": ""}])


def test_a_closed_llm_raises_an_error(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), num_blocks=8) as llm:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")


# --- Ctrl-C -----------------------------------------------------------------------------------------------


def test_a_prompt_that_fails_does_not_fail_others(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny.generate(["fine", "also fine"], GREEDY)

    def breaking(sequence: Sequence) -> bytes:
        if not sequence.params.is_greedy:
            raise OverflowError("scripted")
        return fine(sequence)

    fine = sampler._draw
    monkeypatch.setattr(sampler, "_draw", breaking)
    with pytest.raises(
        RequestsFailedError, match=r"prompts\[1\]: OverflowError: scripted \(1 of 3"
    ) as failed:
        tiny.generate(["fine", "drawn", "also fine"], [GREEDY, SamplingParams(), GREEDY])
    first, error, last = failed.value.outputs
    assert isinstance(error, RequestFailedError)
    for output, single in zip((first, last), expected, strict=True):
        assert isinstance(output, RequestOutput)
        assert output.outputs == single.outputs


def test_ctrl_c_ends_all_requests_between_steps(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, num_steps, num_finished = tiny.engine, 0, 0
    step = engine.step

    def interrupted_step() -> Any:
        nonlocal num_steps, num_finished
        num_steps += 1
        if num_steps == 3:
            signal.raise_signal(signal.SIGINT)
        updates = step()
        num_finished += 1
        return updates

    expected = tiny.generate("the code", GREEDY, use_tqdm=False)[0].outputs
    monkeypatch.setattr(engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        tiny.generate(["the code", "of the", "lantern is"], SamplingParams(n=3, max_tokens=100))
    assert (num_steps, num_finished) == (3, 3)
    assert engine.is_idle
    assert not engine.groups
    engine.check_conservation()
    assert engine.pool.counts.used == 0
    monkeypatch.undo()
    assert tiny.generate("the code", GREEDY, use_tqdm=False)[0].outputs == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("device", "kind"), [("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_a_model_is_loaded_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, device: Literal["auto", "cpu", "cuda"], kind: str
) -> None:
    class Loaded(Exception):
        """Ends the start, for there may be no GPU."""

    def load_model(source: str, dtype: str, device: torch.device, *others: object) -> None:
        raise Loaded(device.type)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(llm_module, "load_model", load_model)
    with pytest.raises(Loaded, match=kind):
        LLM(device=device)


def test_the_second_ctrl_c_interrupts_at_once() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        reached.append("first")
        signal.raise_signal(signal.SIGINT)
        reached.append("second")
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_ctrl_c_remains_ignored() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_container_with_a_smaller_quota_computes_with_fewer_threads(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    monkeypatch.setattr(llm_module, "num_cores", lambda: 2)
    own = torch.get_num_threads()
    try:
        for started_with, asked, used in ((8, None, 2), (1, None, 1), (1, 3, 3)):
            torch.set_num_threads(started_with)
            with LLM(str(tiny_folder), num_blocks=16, max_model_len=64, threads=asked):
                assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(own)
