"""LLM answers as transformers does, for one prompt and for many."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest

from quire.engine.config import MAX_SPECULATIVE_TOKENS
from quire.llm import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from quire.sampling.params import EarlyStopping

GREEDY = SamplingParams(temperature=0, max_tokens=40)
WORDS = "the code of the lantern is four hundred and seventeen as all of us know".split()  # noqa: SIM905


def prompt(length: int, seed: int = 0) -> str:
    """Return a text of ``length`` characters, which are the tokens of the tiny model."""
    rng = Random(1000 * seed + length)
    return " ".join(rng.choice(WORDS) for _ in range(length))[:length]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [answer.text for output in outputs for answer in output.outputs]


def logprob_of(answer: CompletionOutput) -> float:
    assert answer.cumulative_logprob is not None
    return answer.cumulative_logprob


# --- greedy -----------------------------------------------------------------------------------------------


def test_prompts_of_all_lengths_equal_transformers(tiny: LLM, reference: Any) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 33, 100, 300)]
    outputs = tiny.generate(prompts, GREEDY, use_tqdm=False)
    expected = [reference.generate(each, max_new_tokens=40)[0] for each in prompts]
    assert tokens(outputs) == expected
    assert texts(outputs) == [reference.text(each) for each in expected]
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.prompt_token_ids) for output in outputs] == [len(each) for each in prompts]


def test_a_prompt_is_a_text_or_its_tokens_single_or_in_a_list(tiny: LLM) -> None:
    text = prompt(30)
    [ids] = tiny.tokenizer.encode_batch([text])
    expected = tokens(tiny.generate(text, GREEDY, use_tqdm=False))
    assert tokens(tiny.generate(ids, GREEDY, use_tqdm=False)) == expected
    prompts: list[str | list[int]] = [text, ids]
    mixed = tiny.generate(prompts, [GREEDY, GREEDY], use_tqdm=False)
    assert tokens(mixed) == expected * 2
    assert [output.prompt for output in mixed] == [text, None]
    assert tiny.generate([], GREEDY, use_tqdm=False) == []


def test_without_parameters_the_models_own_apply(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((folder / "generation_config.json").read_text())
    own = {"temperature": 0.0, "repetition_penalty": 1.5, "max_new_tokens": 12}
    (folder / "generation_config.json").write_text(json.dumps({**config, **own}))
    said = SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=12)
    with LLM(str(folder), num_blocks=64) as llm:
        assert llm.get_default_sampling_params() == said
        assert tokens(llm.generate("the code", use_tqdm=False)) == tokens(
            llm.generate("the code", said, False)
        )


def test_each_prompt_may_have_its_own_parameters(tiny: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 7, 20)]
    outputs = tiny.generate([prompt(20)] * 3, params, use_tqdm=False)
    assert list(map(len, tokens(outputs))) == [1, 7, 20]
    assert {answer.finish_reason for output in outputs for answer in output.outputs} == {"length"}


def test_typical_tokens_are_sampled(tiny: LLM) -> None:
    """With almost no probability there is one typical token at each position, whatever the seed is."""
    drawn = [
        tiny.generate(prompt(20), SamplingParams(seed=seed, typical_p=1e-6, ignore_eos=True), use_tqdm=False)
        for seed in range(4)
    ]
    assert all(tokens(outputs) == tokens(drawn[0]) for outputs in drawn)
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    assert tokens(drawn[0]) != tokens(tiny.generate(prompt(20), greedy, use_tqdm=False))


def test_the_best_of_several_answers(tiny: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    [drawn] = tiny.generate(prompt(20), replace(params, n=6, logprobs=2), use_tqdm=False)
    ranked = sorted(drawn.outputs, key=lambda answer: -logprob_of(answer))
    [best] = tiny.generate(prompt(20), replace(params, n=2, best_of=6), use_tqdm=False)
    assert [answer.token_ids for answer in best.outputs] == [answer.token_ids for answer in ranked[:2]]
    assert [answer.index for answer in best.outputs] == [0, 1]
    assert [answer.logprobs for answer in best.outputs] == [None, None]
    logprobs = [answer.cumulative_logprob for answer in best.outputs]
    assert logprobs == pytest.approx([answer.cumulative_logprob for answer in ranked[:2]])
    with pytest.raises(ValueError, match="best_of must be from n = 3 to 64; got 2"):
        SamplingParams(n=3, best_of=2)


def test_a_kv_budget(tiny: LLM) -> None:
    [full] = tiny.generate(prompt(150), GREEDY, use_tqdm=False)
    [cut] = tiny.generate(prompt(150), replace(GREEDY, kv_budget_tokens=48), use_tqdm=False)
    assert tokens([cut])[0][0] == tokens([full])[0][0]  # drawn when all of the prompt is there still
    assert tokens([cut]) != tokens([full])
    with pytest.raises(
        ValueError, match=re.escape("sampling_params[0].kv_budget_tokens must be at least 48")
    ):
        tiny.generate(prompt(150), replace(GREEDY, kv_budget_tokens=47), use_tqdm=False)


def test_a_prompt_seen_before_is_not_computed_again(tiny: LLM) -> None:
    first, second = (tiny.generate(prompt(100), GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
    assert tokens([first]) == tokens([second])
    stats = tiny.stats()
    assert (stats.num_requests, stats.num_prompt_tokens, stats.num_cached_tokens) == (2, 200, 96)
    assert stats.num_generated_tokens == sum(map(len, tokens([first, second])))


def test_without_a_limit_an_answer_ends_at_the_models_length(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [output] = tiny.generate(prompt(30), params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 400 - 30
    assert output.outputs[0].finish_reason == "length"


def test_the_model_and_its_answers_can_be_used_in_any_thread(tiny: LLM) -> None:
    found: list[RequestOutput] = []
    thread = Thread(target=lambda: found.extend(tiny.generate(prompt(20), GREEDY)))
    thread.start()
    thread.join(timeout=60)
    assert tokens(found) == tokens(tiny.generate(prompt(20), GREEDY))


# --- samples and beams ------------------------------------------------------------------------------------


def test_each_of_n_samples_equals_a_request_with_its_seed(tiny: LLM) -> None:
    several = tiny.generate(prompt(40), SamplingParams(n=5, seed=3, max_tokens=30), use_tqdm=False)
    params = [SamplingParams(seed=3 + index, max_tokens=30) for index in range(5)]
    assert tokens(several) == tokens(tiny.generate([prompt(40)] * 5, params, use_tqdm=False))
    assert [answer.index for answer in several[0].outputs] == list(range(5))
    assert len(set(texts(several))) > 1


def test_without_a_seed_answers_differ(tiny: LLM) -> None:
    outputs = tiny.generate([prompt(40)] * 4, SamplingParams(temperature=5.0), use_tqdm=False)
    assert len(set(texts(outputs))) > 1


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_beam_search_equals_transformers(tiny: LLM, reference: Any, early_stopping: EarlyStopping) -> None:
    prompts = [prompt(length) for length in (5, 30, 70)]
    params = BeamSearchParams(beam_width=4, max_tokens=20, length_penalty=0.8, early_stopping=early_stopping)
    outputs = tiny.beam_search(prompts, params, use_tqdm=False)
    for output, text in zip(outputs, prompts, strict=True):
        expected = reference.generate(
            text,
            max_new_tokens=20,
            num_beams=4,
            num_return_sequences=4,
            length_penalty=0.8,
            early_stopping=early_stopping,
        )
        assert [reference.text(each) for each in tokens([output])] == [reference.text(e) for e in expected]
        scores = [(a.cumulative_logprob or 0.0) / len(a.token_ids) ** 0.8 for a in output.outputs]
        assert scores == sorted(scores, reverse=True)


# --- what is reported -------------------------------------------------------------------------------------


def test_logprobs_name_the_best_tokens_and_the_drawn_one(tiny: LLM) -> None:
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=12, logprobs=3, prompt_logprobs=2)
    [output] = tiny.generate(prompt(20), params, use_tqdm=False)
    [answer] = output.outputs
    assert answer.logprobs is not None
    assert answer.cumulative_logprob is not None
    drawn = [position[token] for position, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert sum(each.logprob for each in drawn) == pytest.approx(answer.cumulative_logprob)
    for position in answer.logprobs:
        ranked = sorted((each for each in position.values() if each.rank), key=lambda each: each.rank or 0)
        assert [each.rank for each in ranked] == [1, 2, 3]
        assert [each.logprob for each in ranked] == sorted((e.logprob for e in ranked), reverse=True)
        assert len(position) - len(ranked) == any(each.rank is None for each in position.values())
    assert output.prompt_logprobs is not None
    nothing, *rest = output.prompt_logprobs
    assert nothing is None
    assert len(rest) == 19
    for token_id, named in zip(output.prompt_token_ids[1:], rest, strict=True):
        assert named is not None
        assert named[token_id].decoded_token == tiny.tokenizer.decode([token_id])


def test_a_stop_token_ends_an_answer_as_its_last(tiny: LLM) -> None:
    [whole] = tokens(tiny.generate(prompt(33), GREEDY, use_tqdm=False))
    stop = whole[5]
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop])
    [output] = tiny.generate(prompt(33), params, use_tqdm=False)
    [answer] = output.outputs
    assert answer.token_ids == whole[: whole.index(stop) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_rules_on_tokens_reach_the_engine(tiny: LLM) -> None:
    def run(**params: Any) -> Any:
        params = {"temperature": 0, "max_tokens": 10, "ignore_eos": True, **params}
        [output] = tiny.generate(prompt(40), SamplingParams(**params), use_tqdm=False)
        return output.outputs[0]

    assert set(run(allowed_token_ids=[70, 71]).token_ids) <= {70, 71}
    assert run(logit_bias={99: 100.0}).token_ids == [99] * 10
    assert len(set(run(repetition_penalty=100.0).token_ids)) == 10
    word = next(text for token in run().token_ids if (text := tiny.tokenizer.decode([token])).isascii())
    assert word not in run(bad_words=[word]).text


# --- stop strings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [256, 12])
def test_stop_strings_cut_each_answer_wherever_its_tokens_break(tiny_folder: Path, num_blocks: int) -> None:
    """With few blocks, requests are preempted in between."""
    prompts = [prompt(40, seed) for seed in range(4)]
    with LLM(str(tiny_folder), num_blocks=num_blocks) as llm:
        plain = SamplingParams(n=3, seed=1, max_tokens=40, ignore_eos=True)
        whole = llm.generate(prompts, plain, use_tqdm=False)
        assert min(map(len, texts(whole))) > 15
        stops = [text[at : at + 2] for at, text in enumerate(texts(whole), start=2)]
        params = SamplingParams(n=3, seed=1, max_tokens=40, ignore_eos=True, stop=stops)
        cut = llm.generate(prompts, params, use_tqdm=False)
        llm.engine.check_conservation()
        assert llm.stats().num_used_blocks == 0
        preemptions = llm.stats().num_swapped + llm.stats().num_recomputed
    assert (preemptions > 0) == (num_blocks == 12)
    answers = [answer for output in cut for answer in output.outputs]
    for answer, text, ids in zip(answers, texts(whole), tokens(whole), strict=True):
        ends = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        end, at, stop = min(ends)
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (text[:at], "stop", stop)
        assert answer.token_ids == ids[: len(answer.token_ids)]
        assert len(llm.tokenizer.decode(answer.token_ids)) >= end


@pytest.mark.parametrize("speculation", ["ngram", "draft"])
def test_guesses_change_no_answer(tiny_folder: Path, tiny: LLM, speculation: str) -> None:
    prompts = [prompt(20, seed) * 3 for seed in range(3)]
    with LLM(
        str(tiny_folder),
        num_blocks=64,
        speculation="ngram" if speculation == "ngram" else str(tiny_folder),
        num_speculative_tokens=MAX_SPECULATIVE_TOKENS,
    ) as llm:
        for stop in (None, ["e", "q"]):
            params = SamplingParams(n=2, seed=1, max_tokens=40, ignore_eos=True, logprobs=1, stop=stop)
            expected = tiny.generate(prompts, params, use_tqdm=False)
            assert llm.generate(prompts, params, use_tqdm=False) == expected
        assert llm.stats().num_draft_tokens > 0
        llm.engine.check_conservation()
    assert tiny.stats().num_draft_tokens == 0


def test_a_lone_stop_string_and_min_tokens(tiny: LLM) -> None:
    [whole] = texts(tiny.generate(prompt(40), GREEDY, use_tqdm=False))
    stop = whole[2]
    params = SamplingParams(temperature=0, max_tokens=40, stop=stop)
    assert texts(tiny.generate(prompt(40), params, use_tqdm=False)) == [whole[: whole.index(stop)]]
    keeping = replace(params, include_stop_str_in_output=True)
    assert texts(tiny.generate(prompt(40), keeping, use_tqdm=False)) == [whole[: whole.index(stop) + 1]]


# --- the demo model ---------------------------------------------------------------------------------------

NOTES = "the code of the lantern is 417. the age of the cat is 900. "


def test_the_demo_model_answers_a_chat(demo: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=32)
    messages = [{"role": "user", "content": NOTES + "what is the code of the lantern?"}]
    [first] = demo.chat(messages, params, use_tqdm=False)
    assert first.outputs[0].text == "the code of the lantern is 417."
    assert first.outputs[0].finish_reason == "stop"
    assert first.outputs[0].stop_reason is None
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "what is the age of the cat?"},
    ]
    [second] = demo.chat(messages, params, use_tqdm=False)
    assert second.outputs[0].text == "the age of the cat is 900."
    assert second.num_cached_tokens >= 16


def test_several_conversations_at_once(demo: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=32)
    questions = ["what is the code of the lantern?", "what is the age of the cat?"]
    chats = [[{"role": "user", "content": NOTES + question}] for question in questions]
    answers = texts(demo.chat(chats, params, use_tqdm=False))
    assert answers == ["the code of the lantern is 417.", "the age of the cat is 900."]


def test_special_tokens_are_skipped_unless_wanted(demo: LLM) -> None:
    messages = [{"role": "user", "content": NOTES + "what is the age of the cat?"}]
    params = SamplingParams(temperature=0, max_tokens=32, skip_special_tokens=False)
    assert texts(demo.chat(messages, params, use_tqdm=False)) == ["the age of the cat is 900.<|end|>"]
