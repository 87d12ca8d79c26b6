"""The blocking client against a server on the loopback."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.client import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    Interrupted,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuireError,
    ServerError,
    Tls,
    ToolCall,
    Unavailable,
    Unsupported,
)
from quire.protos import inference_pb2 as pb
from quire.rpc import errors as service_errors
from quire.sampling.messages import values_from_proto
from quire.sampling.params import ResponseOptions, SamplingParams

WAIT_SECONDS = 10.0
HELLO: dict[Any, Any] = {"role": "user", "content": "Hello"}
CALL = ToolCall("1", "look", "{}")
ARGUMENTS = "prompt[0].tool_calls[0].arguments"
DEEP: Any = {}
for _ in range(100_000):
    DEEP = {"a": DEEP}


@pytest.fixture
def client(fake_generation: Any) -> Iterator[Client]:
    with Client(fake_generation.address, timeout=WAIT_SECONDS) as client:
        yield client


def test_generate_returns_the_whole_answer(client: Client) -> None:
    completion = client.generate("What is blue?", logprobs=1)
    assert completion.text == "Blue is é🙂."
    assert completion.token_ids == (0, 1, 2)
    assert completion.finish_reason == "stop"
    assert completion.request_id == "r-1"
    assert completion.usage.cached_prompt_tokens == 32
    assert completion.logprobs[2].top[0].token_id == 7


def test_options_reach_their_fields(client: Client, fake_generation: Any) -> None:
    numbers: Any = {
        **{"max_tokens": 5, "min_tokens": 1, "temperature": 0.0, "top_p": 0.5, "typical_p": 0.75, "top_k": 3},
        **{"min_p": 0.25, "seed": 2**64 - 1, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        **{"repetition_penalty": 1.25, "ignore_eos": True},
    }
    tokens: Any = {"allowed_token_ids": [7, 8], "stop_token_ids": [9], "logit_bias": {7: -100, 8: 1.5}}
    words: Any = {"bad_words": ["no"], "bad_word_token_ids": [[4], [5, 6]], "stop": "\n"}
    response: Any = {"logprobs": 0, "prompt_logprobs": 0, "keep_special_tokens": True}
    names: Any = {"model": "demo", "request_id": "mine"}
    client.generate([1, 2, 3], **numbers, **tokens, **words, **response, **names)
    (sent,) = fake_generation.requests
    assert list(sent.token_ids.ids) == [1, 2, 3]
    found = values_from_proto(SamplingParams, sent)
    assert dict(found.pop("logit_bias")) == {7: -100.0, 8: 1.5}
    assert found == {
        **numbers,
        "allowed_token_ids": {7, 8},
        "stop_token_ids": {9},
        "bad_words": ((4,), (5, 6)),
        **{"num_logprobs": 0, "num_prompt_logprobs": 0},
    }
    assert (list(sent.sampling.bad_words), list(sent.stopping.stop_strings)) == (["no"], ["\n"])
    assert values_from_proto(ResponseOptions, sent) == {"stop_strings": ("\n",), **response}
    assert (sent.model, sent.request_id) == ("demo", "mine")


def test_a_format_reaches_its_field(client: Client, fake_generation: Any) -> None:
    client.generate("x", json_schema={"type": "integer"})
    client.generate("x", regex="[ab]+")
    client.generate("x", grammar='start: "a"')
    formats = [sent.format for sent in fake_generation.requests]
    assert [json.loads(formats[0].json_schema), formats[1].regex] == [{"type": "integer"}, "[ab]+"]
    assert formats[2].grammar == 'start: "a"'
    with pytest.raises(InvalidRequest, match="one format"):
        client.generate("x", regex="a", grammar='start: "a"')


def test_absent_options_are_not_sent(client: Client, fake_generation: Any) -> None:
    client.generate("x", temperature=None, stop=None)
    (sent,) = fake_generation.requests
    assert not sent.HasField("sampling")
    assert not sent.HasField("stopping")
    assert not sent.HasField("response")


def test_chat_sends_the_conversation(client: Client, fake_generation: Any) -> None:
    client.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    (sent,) = fake_generation.requests
    assert [(each.role, each.content) for each in sent.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]


def test_stream_yields_each_step(client: Client) -> None:
    deltas = list(client.stream("x"))
    assert [delta.text for delta in deltas] == ["Blue", " is", " é🙂."]
    assert [delta.request_id for delta in deltas] == ["r-1", "", ""]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]
    assert deltas[0].usage is None
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.bytes_shipped == 65536


def test_breaking_out_of_the_loop_cancels_the_request(client: Client, fake_generation: Any) -> None:
    fake_generation.hangs = True
    for _ in client.stream("x"):
        break
    assert fake_generation.cancelled.wait(WAIT_SECONDS)


def test_closing_the_iterator_cancels_the_request(client: Client, fake_generation: Any) -> None:
    fake_generation.hangs = True
    stream = client.stream("x")
    next(stream)
    stream.close()
    assert fake_generation.cancelled.wait(WAIT_SECONDS)


def test_calls_of_a_closed_client_are_cancelled(client: Client, fake_generation: Any) -> None:
    fake_generation.hangs = True
    stream = client.stream("x")
    next(stream)
    client.close()
    with pytest.raises(Cancelled):
        next(stream)
    calls: list[Callable[[], Any]] = [
        lambda: client.generate("x"),
        lambda: next(client.stream("x")),
        lambda: client.end_session("s"),
    ]
    for call in calls:
        with pytest.raises(Cancelled, match="the client was closed"):
            call()


def test_tokenize_and_detokenize(client: Client) -> None:
    assert client.detokenize(client.tokenize("quire é")) == "quire é"
    assert client.tokenize([{"role": "user", "content": "A"}]) == [65]


def test_model_info(client: Client) -> None:
    info = client.model_info()
    assert (info.model, info.eos_token_ids, info.num_decode_workers) == ("demo", (0,), 2)


def test_the_deadline_travels(client: Client, fake_generation: Any) -> None:
    client.generate("x")
    client.generate("x", timeout=3)
    client.generate("x", timeout=math.inf)
    default, own, longest = fake_generation.timeouts
    assert longest > 1e7
    assert 5 < default < WAIT_SECONDS + 1
    assert own < 4


def test_the_deadline_ends_a_stream(client: Client, fake_generation: Any) -> None:
    fake_generation.hangs = True
    stream = client.stream("x", timeout=0.2)
    assert next(stream).text == "Blue"
    with pytest.raises(DeadlineExceeded):
        next(stream)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (service_errors.FailedPrecondition("no"), Unsupported),
        (service_errors.NotFound("no", reason="MODEL_NOT_FOUND"), NotFound),
        (service_errors.ResourceExhausted("no"), Overloaded),
        (service_errors.DeadlineExceeded("no"), DeadlineExceeded),
        (service_errors.Aborted("no"), Interrupted),
        (service_errors.Internal("no"), ServerError),
    ],
)
def test_statuses_become_typed_errors(
    client: Client, fake_generation: Any, sent: service_errors.ServiceError, expected: type[QuireError]
) -> None:
    fake_generation.errors = [sent, sent]
    with pytest.raises(expected) as raised:
        client.generate("x")
    assert (raised.value.message, raised.value.code, raised.value.reason) == ("no", sent.code, sent.reason)
    with pytest.raises(expected):
        list(client.stream("x"))


def test_an_invalid_request_names_field_and_limit(client: Client, fake_generation: Any) -> None:
    fake_generation.errors = [
        service_errors.InvalidArgument("max_tokens", "is too large", metadata={"limit": "512"})
    ]
    with pytest.raises(InvalidRequest, match="max_tokens: is too large") as raised:
        client.generate("x", max_tokens=513)
    assert (raised.value.field, raised.value.limit) == ("max_tokens", "512")


def test_the_error_of_an_overloaded_server_has_the_time_of_the_retry(
    client: Client, fake_generation: Any
) -> None:
    fake_generation.errors = [service_errors.ResourceExhausted("full", retry_after_seconds=1.5)]
    with pytest.raises(Overloaded) as raised:
        client.generate("x")
    assert raised.value.retry_after == 1.5


def test_unavailable_is_retried_before_the_first_message(client: Client, fake_generation: Any) -> None:
    fake_generation.errors = [service_errors.Unavailable("starting")]
    assert client.generate("x").text == "Blue is é🙂."
    fake_generation.errors = [service_errors.Unavailable("starting")]
    assert len(list(client.stream("x"))) == 3
    assert len(fake_generation.requests) == 4


def test_no_server_is_unavailable() -> None:
    with Client("127.0.0.1:1", timeout=WAIT_SECONDS) as client, pytest.raises(Unavailable) as raised:
        client.model_info()
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x", {"top_k": -1}, "top_k"),
        ("x", {"temperature": "hot"}, "temperature"),
        ("x", {"stop": 3}, "stop"),
        ("x", {"stop_token_ids": [-1]}, "stop_token_ids"),
        ("x", {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ("x", {"logit_bias": 3}, "logit_bias"),
        ("x", {"bad_word_token_ids": [3]}, "bad_word_token_ids"),
        ([-1], {}, "prompt"),
        (b"abc", {}, "prompt"),
        (bytearray(b"abc"), {}, "prompt"),
        ("x", {"stop_token_ids": b"ab"}, "stop_token_ids"),
        ("x", {"model": b"demo"}, "model"),
        (None, {}, "prompt"),
        ({1, 2}, {}, "prompt"),
        (HELLO, {}, "prompt"),
        ([{"role": "user"}], {}, "prompt[0]"),
        ([{1: 2}], {}, "prompt[0]"),
        ([HELLO | {1: 2, "x": 3}], {}, "prompt[0]"),
        ([HELLO | {"name": {3}}], {}, "prompt[0]"),
        ([HELLO | {"name": DEEP}], {}, "prompt[0]"),
        ([{"role": "user", "content": None}], {}, "prompt[0].content"),
        ([HELLO, "Hello"], {}, "prompt[1]"),
        ([HELLO, HELLO | {"tool_calls": None}], {}, "prompt[1].tool_calls"),
        ([HELLO | {"tool_calls": [CALL, {"id": "1"}]}], {}, "prompt[0].tool_calls[1]"),
        ([HELLO | {"tool_calls": [replace(CALL, arguments='{"a": 1, "b')]}], {}, ARGUMENTS),
        ([HELLO | {"tool_calls": [replace(CALL, arguments="")]}], {}, ARGUMENTS),
        ([HELLO | {"tool_calls": [replace(CALL, arguments="[" * 100_000)]}], {}, ARGUMENTS),
        ([HELLO], {"tools": [DEEP]}, "tools"),
        ("x", {"json_schema": DEEP}, "json_schema"),
    ],
)
def test_values_that_fit_no_field_are_refused_here(
    client: Client, fake_generation: Any, prompt: Any, options: Any, field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        client.stream(prompt, **options)
    assert raised.value.field == field
    assert not fake_generation.requests


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("value", ["abc", b"abc", {"role": "user", "content": "abc"}, None])
def test_a_single_value_is_no_list(fake_generation: Any, value: Any, is_async: bool) -> None:
    async def fields() -> list[str]:
        client: Any = (AsyncClient if is_async else Client)(fake_generation.address)
        found = []
        for method in (client.batch, client.chat, client.embed):
            with pytest.raises(InvalidRequest, match="must be a list") as raised:
                await method(value)
            found.append(raised.value.field)
        if is_async:
            await client.close()
        else:
            client.close()
        return found

    assert asyncio.run(fields()) == ["prompts", "messages", "texts"]
    assert not fake_generation.requests


def test_an_embedded_text_that_is_refused_is_named(client: Client) -> None:
    texts: Any = ["a", b"b"]
    with pytest.raises(InvalidRequest, match=r"^texts\[1\]: "):
        client.embed(texts)


HALF = "a" * (9 << 20)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client.generate(HALF + HALF), "prompt"),
        (lambda client: client.stream(HALF + HALF), "prompt"),
        (lambda client: client.tokenize(HALF + HALF), "prompt"),
        (lambda client: client.batch([HALF, HALF]), "prompts"),
        (lambda client: client.embed([HALF, HALF]), "texts"),
        (lambda client: client.detokenize([2**28] * (4 << 20)), "token_ids"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_is_too_large_is_invalid(
    fake_generation: Any, call: Callable[[Any], Any], field: str, is_async: bool
) -> None:
    async def refused() -> None:
        async with AsyncClient(fake_generation.address) as client:
            answer = call(client)
            await (anext(answer) if isinstance(answer, AsyncGenerator) else answer)

    with pytest.raises(InvalidRequest, match=f"^{field}: a request has at most") as raised:
        if is_async:
            asyncio.run(refused())
        else:
            with Client(fake_generation.address) as client:
                list(call(client))
    assert (raised.value.field, raised.value.limit) == (field, f"{16 << 20}")
    assert not fake_generation.requests


@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_that_is_too_large_is_no_reason_to_try_again(fake_generation: Any, is_async: bool) -> None:
    async def ask() -> None:
        async with AsyncClient(fake_generation.address) as client:
            await client.generate("x")

    fake_generation.answer = [HALF + HALF]
    with pytest.raises(ServerError, match="larger than max") as raised:
        if is_async:
            asyncio.run(ask())
        else:
            with Client(fake_generation.address) as client:
                client.generate("x")
    assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_several_answers_are_choices(client: Client, fake_generation: Any) -> None:
    completion = client.generate("x", n=2, seed=3)
    text = "Blue is é🙂."
    assert [(choice.index, choice.text) for choice in completion.choices] == [(0, text), (1, text)]
    assert completion.text == completion.choices[0].text
    assert [choice.score for choice in completion.choices] == [None, None]
    texts = ["", ""]
    for delta in client.stream("x", n=2):
        texts[delta.index] += delta.text
    assert texts == [text, text]
    assert fake_generation.requests[0].sampling.n == 2


@pytest.mark.parametrize(
    ("early_stopping", "sent"),
    [
        (True, pb.EARLY_STOPPING_ENOUGH),
        (False, pb.EARLY_STOPPING_UNLIKELY),
        ("never", pb.EARLY_STOPPING_IMPOSSIBLE),
        (None, pb.EARLY_STOPPING_UNSPECIFIED),
    ],
)
def test_a_beam_search_has_scores(
    client: Client, fake_generation: Any, early_stopping: Any, sent: int
) -> None:
    options: Any = {"beam_width": 3, "length_penalty": 0.5, "early_stopping": early_stopping}
    completion = client.generate("x", **options)
    assert [choice.score for choice in completion.choices] == [-0.5, -1.5, -2.5]
    scores = [delta.score for delta in client.stream("x", **options)]
    assert [score for score in scores if score is not None] == [-0.5, -1.5, -2.5]
    beam = fake_generation.requests[0].sampling.beam
    assert (beam.width, beam.length_penalty, beam.early_stopping) == (3, 0.5, sent)


def test_early_stopping_is_one_of_three(client: Client) -> None:
    options: Any = {"beam_width": 3, "early_stopping": "soon"}
    with pytest.raises(InvalidRequest, match="early_stopping: 'soon' does not fit"):
        client.generate("x", **options)


def test_an_unknown_option_is_a_type_error(client: Client) -> None:
    with pytest.raises(TypeError, match="atypical_p"):
        client.generate("x", atypical_p=3)  # type: ignore[call-arg]


def test_every_call_sends_the_key(fake_generation: Any) -> None:
    with Client(fake_generation.address, timeout=WAIT_SECONDS, api_key="quire-key") as client:
        client.generate("What is blue?")
        list(client.stream("What is blue?"))
        list(client.batch(["What is blue?"]))
        client.tokenize("What")
        client.detokenize([1])
        client.model_info()
    assert fake_generation.authorizations == ["Bearer quire-key"] * 6


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("key", ["secret\n", "secrét", b"secret"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(is_async: bool, key: Any) -> None:
    with pytest.raises(ValueError, match=r"^api_key must be printable ASCII without line breaks$"):
        (AsyncClient if is_async else Client)("127.0.0.1:1", api_key=key)


def test_a_batch_separates_answers_and_errors(client: Client) -> None:
    outcomes = dict(client.batch(["What is blue?", "What is red?", "fail"], max_tokens=3))
    assert [getattr(outcomes[index], "text", None) for index in (0, 1)] == ["Blue is é🙂."] * 2
    error = outcomes[2]
    assert isinstance(error, Overloaded)
    assert (error.reason, error.retry_after, error.metadata) == ("TOKEN_RATE", 1.5, {"limit": "6"})


def test_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch, fake_generation: Any) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with Client(fake_generation.address, timeout=WAIT_SECONDS) as client:
        assert client.detokenize([65]) == "A"


@pytest.mark.parametrize("is_async", [False, True])
def test_tls_files_are_read_at_once(is_async: bool, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        (AsyncClient if is_async else Client)("127.0.0.1:1", tls=Tls(ca=tmp_path / "absent"))


def test_calls_after_ctrl_c_do_not_wait_for_a_lock_that_nobody_holds(
    client: Client, fake_generation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = []

    def interrupted(wait: Any, *rest: object) -> None:
        """Raise Ctrl-C as if it came when gRPC had just taken the lock of the call."""
        lock = wait.__self__
        lock.acquire()
        locks.append(lock)
        raise KeyboardInterrupt

    fake_generation.hangs = True
    stream = client.stream("x")
    next(stream)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("grpc._common.wait", interrupted)
        next(stream)
    assert fake_generation.cancelled.wait(WAIT_SECONDS)
    fake_generation.hangs = False
    assert "".join(delta.text for delta in client.stream("y")) == "Blue is é🙂."
    for lock in locks:
        lock.release()
