"""Every limit of a request, named in its error."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import pytest

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument, NotFound
from quire.sampling.messages import to_proto
from quire.sampling.output_format import OutputFormat
from quire.sampling.params import ResponseOptions, SamplingParams
from quire.services.requests.prompts import INLINE_CHAT_BYTES, MAX_PROMPT_BYTES, encode_chat, encode_text
from quire.services.requests.served_model import ServedModel
from quire.services.requests.validation import validate
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer


def request(**fields: Any) -> pb.Generation:
    return pb.Generation(**{"text": "hello", **fields})


def sampling(**fields: Any) -> pb.Generation:
    return request(sampling=pb.SamplingParams(**fields))


def stopping(**fields: Any) -> pb.Generation:
    return request(stopping=pb.StoppingParams(**fields))


def ids(*token_ids: int) -> pb.Generation:
    return pb.Generation(token_ids=pb.TokenIds(ids=token_ids))


def chat(*messages: tuple[str, str]) -> pb.Generation:
    return pb.Generation(
        chat=pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for role, text in messages])
    )


def chat_with(message: pb.ChatMessage | None = None, **fields: Any) -> pb.Generation:
    messages = [message or pb.ChatMessage(role="user", content="x")]
    return pb.Generation(chat=pb.Chat(messages=messages, **fields))


@pytest.mark.parametrize(
    ("generation", "field", "problem"),
    [
        (pb.Generation(), "prompt", "must be set"),
        (ids(), "token_ids", "at least one token"),
        (chat(), "chat.messages", "at least one message"),
        (ids(*[2] * 64), "token_ids", "maximum context length is 64 tokens"),
        (ids(2, 320), "token_ids.ids[1]", "below 320; got 320"),
        (request(text="x" * (MAX_PROMPT_BYTES + 1)), "text", f"at most {MAX_PROMPT_BYTES} bytes"),
        (chat(("robot", "x")), "chat.messages[0].role", "got 'robot'"),
        (chat_with(pb.ChatMessage(role="user", more="{")), "chat.messages[0].more", "must be JSON"),
        (chat_with(pb.ChatMessage(role="user", more="[]")), "chat.messages[0].more", "must be a JSON object"),
        (
            chat_with(pb.ChatMessage(role="user", more=" " * (2 << 20) + "{}")),
            "chat.messages[0].more",
            "at most 2097152",
        ),
        (chat_with(tools="{}"), "chat.tools", "must be a JSON array"),
        (chat_with(tools="[1]"), "chat.tools", "does not show it any tools"),
        (chat_with(template_arguments="[" * 9999), "chat.template_arguments", "must be JSON"),
        (chat_with(template_arguments=" " * (256 << 10) + "1"), "chat.template_arguments", "at most 262144"),
        (request(request_id="a b"), "request_id", "printable"),
        (request(request_id="x" * 129), "request_id", "128"),
        (stopping(max_tokens=0), "stopping.max_tokens", "at least 1; got 0"),
        (stopping(max_tokens=10**9, min_tokens=64), "stopping.min_tokens", "got 64"),
        (stopping(max_tokens=2, min_tokens=3), "stopping.min_tokens", "max_tokens = 2; got 3"),
        (stopping(min_tokens=-1), "stopping.min_tokens", "got -1"),
        (stopping(stop_strings=[""]), "stopping.stop_strings[0]", "from 1 to 256 characters"),
        (stopping(stop_strings=["x"] * 17), "stopping.stop_strings", "at most 16; got 17"),
        (stopping(stop_strings=["x" * 257]), "stopping.stop_strings[0]", "got 257"),
        (stopping(stop_token_ids=[1, 999]), "stopping.stop_token_ids[1]", "got 999"),
        (stopping(stop_token_ids=[1] * 1025), "stopping.stop_token_ids", "at most 1024"),
        (sampling(temperature=-1), "sampling.temperature", "got -1"),
        (sampling(temperature=math.inf), "sampling.temperature", "got inf"),
        (sampling(top_p=0), "sampling.top_p", "got 0"),
        (sampling(min_p=1.5), "sampling.min_p", "got 1.5"),
        (sampling(typical_p=0), "sampling.typical_p", "above 0 and at most 1; got 0"),
        (sampling(top_k=321), "sampling.top_k", "to 320; got 321"),
        (request(response=pb.ResponseOptions(logprobs=21)), "response.logprobs", "from 0 to 20; got 21"),
        (sampling(presence_penalty=2.5), "sampling.presence_penalty", "from -2 to 2; got 2.5"),
        (sampling(frequency_penalty=math.nan), "sampling.frequency_penalty", "got nan"),
        (sampling(repetition_penalty=0), "sampling.repetition_penalty", "from 0.01 to 100; got 0"),
        (sampling(repetition_penalty=100.5), "sampling.repetition_penalty", "got 100.5"),
        (sampling(logit_bias={320: 1.0}), "sampling.logit_bias", "below 320; got 320"),
        (sampling(logit_bias={7: 101.0}), "sampling.logit_bias[7]", "from -100 to 100; got 101"),
        (
            sampling(logit_bias=dict.fromkeys(range(1025), 1.0)),
            "sampling.logit_bias",
            "at most 1024; got 1025",
        ),
        (sampling(allowed_token_ids=[3, 320]), "sampling.allowed_token_ids", "below 320; got 320"),
        (sampling(bad_words=["x"] * 129), "sampling.bad_words", "at most 128; got 129"),
        (
            request(response=pb.ResponseOptions(prompt_logprobs=21)),
            "response.prompt_logprobs",
            "to 20; got 21",
        ),
        (request(format=pb.ResponseFormat(regex="")), "format.regex", "from 1 to"),
        (request(format=pb.ResponseFormat(grammar="x" * 65537)), "format.grammar", "from 1 to"),
        (
            request(format=pb.ResponseFormat(json_schema="{}"), stopping=pb.StoppingParams(ignore_eos=True)),
            "stopping.ignore_eos",
            "cannot go with a format",
        ),
        (sampling(n=0), "sampling.n", "from 1 to 64; got 0"),
        (sampling(kv_budget_tokens=11), "sampling.kv_budget_tokens", "must be at least 12, 3 blocks; got 11"),
        (
            sampling(kv_budget_tokens=12, beam=pb.BeamParams(width=2)),
            "sampling.kv_budget_tokens",
            "must be absent with sampling.beam",
        ),
        (sampling(n=3, best_of=2), "sampling.best_of", "from n = 3 to 64; got 2"),
        (sampling(best_of=0), "sampling.best_of", "from 1 to 64; got 0"),
        (sampling(best_of=65), "sampling.best_of", "from 1 to 64; got 65"),
        (
            sampling(best_of=2, beam=pb.BeamParams(width=2)),
            "sampling.best_of",
            "must be 1 with sampling.beam",
        ),
        (sampling(n=2, beam=pb.BeamParams(width=2)), "sampling.n", "must be 1 with sampling.beam"),
        (sampling(beam=pb.BeamParams()), "sampling.beam.width", "from 2 to 64; got 0"),
        (sampling(beam=pb.BeamParams(width=65)), "sampling.beam.width", "from 2 to 64; got 65"),
        (
            sampling(beam=pb.BeamParams(width=2, length_penalty=math.inf)),
            "sampling.beam.length_penalty",
            "from -10 to 10; got inf",
        ),
        (
            sampling(beam=pb.BeamParams(width=2, length_penalty=2000)),
            "sampling.beam.length_penalty",
            "from -10 to 10; got 2000",
        ),
        (sampling(temperature=1e7), "sampling.temperature", "from 0 to 1000000; got 1e+07"),
        (
            request(
                sampling=pb.SamplingParams(allowed_token_ids=[1]), stopping=pb.StoppingParams(min_tokens=1)
            ),
            "stopping.min_tokens",
            "leaves no token",
        ),
        (
            request(
                sampling=pb.SamplingParams(allowed_token_ids=[5, 6]),
                stopping=pb.StoppingParams(min_tokens=2, stop_token_ids=[6, 5, 7]),
            ),
            "stopping.min_tokens",
            "leaves no token",
        ),
        (
            sampling(allowed_token_ids=[5, 6], bad_word_token_ids=[pb.TokenIds(ids=[i]) for i in (5, 6)]),
            "sampling.bad_word_token_ids",
            "leaves no token",
        ),
        (
            request(
                stopping=pb.StoppingParams(min_tokens=1, stop_token_ids=[i for i in range(320) if i != 1])
            ),
            "stopping.min_tokens",
            "leaves no token",
        ),
        (
            request(
                sampling=pb.SamplingParams(beam=pb.BeamParams(width=2)),
                response=pb.ResponseOptions(logprobs=0),
            ),
            "response.logprobs",
            "must be absent with sampling.beam",
        ),
        (
            request(
                sampling=pb.SamplingParams(beam=pb.BeamParams(width=2)),
                stopping=pb.StoppingParams(stop_strings=["."]),
            ),
            "stopping.stop_strings",
            "must be absent with sampling.beam",
        ),
    ],
)
async def test_the_invalid_field_is_named(
    model: ServedModel, generation: pb.Generation, field: str, problem: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await validate(generation, model)
    assert caught.value.field == field
    assert problem in caught.value.message


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_a_text_that_cannot_fit_is_not_tokenized(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    most_bytes = model.tokenizer.most_bytes(63)
    assert most_bytes is not None
    text = "x" * (most_bytes + 1)
    generation = request(text=text) if kind == "text" else chat(("user", text))
    monkeypatch.setattr(Tokenizer, "encode", None)
    with pytest.raises(InvalidArgument, match=r"the prompt has at least 6\d$") as caught:
        await validate(generation, model)
    assert (caught.value.field, caught.value.reason) == (kind, "CONTEXT_LENGTH_EXCEEDED")


async def test_the_error_of_a_long_text_has_its_number_of_tokens(model: ServedModel) -> None:
    with pytest.raises(
        InvalidArgument, match=r"maximum context length is 64 tokens.* prompt has 101$"
    ) as caught:
        await validate(request(text="x" * 100), model)
    assert caught.value.metadata == {"field": "text", "limit": "63", "num_tokens": "101"}


@pytest.mark.parametrize(
    ("asked", "most", "is_clamped"), [(None, 54, False), (54, 54, False), (55, 54, True)]
)
async def test_more_tokens_than_the_models_length_leaves_are_not_refused(
    model: ServedModel, asked: int | None, most: int, is_clamped: bool
) -> None:
    valid = await validate(
        pb.Generation(token_ids=pb.TokenIds(ids=[2] * 10), stopping=pb.StoppingParams(max_tokens=asked)),
        model,
    )
    assert (valid.params.max_tokens, valid.is_clamped) == (most, is_clamped)


async def test_a_request_that_says_nothing_gets_the_models_own_defaults(model: ServedModel) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 500, "repetition_penalty": 1.05, "max_tokens": 7}
    own = dataclasses.replace(model, sampling_defaults=defaults)
    silent, said = (
        sampling(seed=1),
        sampling(seed=1, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05),
    )
    own.sampling_defaults = {**defaults, "top_k": 20}
    said.stopping.max_tokens = 7
    sent = [
        to_proto((await validate(each, where)).params, None) for each, where in ((silent, own), (said, model))
    ]
    assert sent[0] == sent[1], "the worker gets the same bits"
    own.sampling_defaults = defaults
    changed = request(
        sampling=pb.SamplingParams(temperature=0, top_k=0), stopping=pb.StoppingParams(max_tokens=9)
    )
    params = (await validate(changed, own)).params
    assert (params.temperature, params.top_k, params.max_tokens, params.top_p) == (0, 0, 9, 0.9)
    assert (await validate(silent, own)).params.top_k == 500, "a file may name more tokens than there are"


async def test_the_models_own_limit_is_not_reported_as_the_clients(model: ServedModel) -> None:
    own = dataclasses.replace(model, sampling_defaults={"max_tokens": 1000})
    valid = await validate(ids(*[2] * 60), own)
    assert (valid.params.max_tokens, valid.is_clamped) == (4, False)


async def test_half_of_a_surrogate_pair_in_an_earlier_call_is_replaced(model: ServedModel) -> None:
    template = dataclasses.replace(model, chat_template=ChatTemplate("{{ messages[0].note }}", {}))
    sent, expected = (chat(("user", "x")).chat for _ in range(2))
    sent.messages[0].more, expected.messages[0].more = '{"note": "a\\ud83d"}', '{"note": "a?"}'
    assert await encode_chat(sent, template) == await encode_chat(expected, template)


async def test_large_chats_are_rendered_in_a_thread(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    render = ChatTemplate.render

    def watched(*args: Any) -> str:
        threads.append(threading.get_ident())
        return render(*args)

    monkeypatch.setattr(ChatTemplate, "render", watched)
    for size in (10, INLINE_CHAT_BYTES):
        await encode_chat(chat(("user", "x" * size)).chat, model)
    assert threads[0] == threading.get_ident() != threads[1]


@pytest.mark.parametrize("field", ["text", "chat.messages"])
async def test_there_is_a_most_of_tokens_to_count(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr("quire.services.requests.prompts.MAX_TOKENIZED", 10)
    with pytest.raises(InvalidArgument, match="at most 10 tokens; got") as caught:
        if field == "text":
            await encode_text("x" * 100, model)
        else:
            await encode_chat(chat(("user", "x" * 100)).chat, model)
    assert caught.value.field == field


async def test_an_empty_text_is_empty_only_without_special_tokens(model: ServedModel) -> None:
    assert (await validate(pb.Generation(text=""), model)).prompt_token_ids == [0]


async def test_an_unknown_model_is_not_found(model: ServedModel) -> None:
    with pytest.raises(NotFound, match="'tiny' is"):
        await validate(request(model="other"), model)
    assert await validate(request(model="tiny"), model)


async def test_a_model_without_template_refuses_chats(model: ServedModel) -> None:
    without = dataclasses.replace(model, chat_template=None)
    with pytest.raises(InvalidArgument, match="send text or token_ids"):
        await validate(chat(("user", "hello")), without)


async def test_defaults_are_filled_in(model: ServedModel) -> None:
    valid = await validate(request(), model)
    assert valid.params == SamplingParams(max_tokens=64 - len(valid.prompt_token_ids), seed=valid.params.seed)
    assert valid.request_id
    assert valid.response == ResponseOptions()


async def test_a_seed_is_kept_and_an_absent_one_is_random(model: ServedModel) -> None:
    assert (await validate(sampling(seed=0), model)).params.seed == 0
    seeds = {(await validate(request(), model)).params.seed for _ in range(4)}
    assert len(seeds) == 4


async def test_the_longest_prompt_has_room_for_one_token(model: ServedModel) -> None:
    valid = await validate(ids(*[2] * 63), model)
    assert valid.params.max_tokens == 1


@pytest.mark.parametrize(
    "generation",
    [
        request(sampling=pb.SamplingParams(allowed_token_ids=[1])),
        request(
            sampling=pb.SamplingParams(allowed_token_ids=[1, 5]), stopping=pb.StoppingParams(min_tokens=1)
        ),
        sampling(allowed_token_ids=[5], bad_word_token_ids=[pb.TokenIds(ids=[5, 5])]),
        sampling(allowed_token_ids=[5], logit_bias={5: -100.0}),
        sampling(beam=pb.BeamParams(width=2, length_penalty=-10.0)),
    ],
)
async def test_constraints_that_allow_some_token_are_accepted(
    model: ServedModel, generation: pb.Generation
) -> None:
    await validate(generation, model)


async def test_a_format_is_passed_on(model: ServedModel) -> None:
    wanted = pb.ResponseFormat(json_schema='{"type": "integer"}')
    valid = await validate(request(format=wanted), model)
    assert valid.format == OutputFormat("json_schema", '{"type": "integer"}')
