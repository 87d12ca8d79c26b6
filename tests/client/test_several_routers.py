"""A client of several routers: calls move to another router, and streams continue there unharmed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from quire.client import AsyncClient, Client, Delta, Interrupted, Overloaded, QuireError, Unavailable, routers
from quire.client.errors import from_status
from quire.client.routers import AVOID_SECONDS, Attempts, Routers, addresses_of, is_connection_lost
from quire.protos import inference_pb2 as pb
from quire.protos.inference_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from quire.rpc.errors import ResourceExhausted, ServiceError, to_status
from tests.testing.grpc_servers import threaded_server
from tests.testing.manual_clock import ManualClock

NUM_TOKENS = 9
WORDS = ["a ", "b", " ccé", "🙂", ""]
_SILENT_ROUTER = """
import threading
from concurrent.futures import ThreadPoolExecutor
import grpc
from quire.protos.inference_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

class Silent(GenerationServiceServicer):
    def GenerateStream(self, request, context):
        print("called", flush=True)
        threading.Event().wait()
    GenerateBatch = GenerateStream

server = grpc.server(ThreadPoolExecutor(4))
add_GenerationServiceServicer_to_server(Silent(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""


class SeededRouter(GenerationServiceServicer):
    """Answers only by the seed, and loses its connection where it is told to."""

    def __init__(self) -> None:
        self.breaks_after: list[int] = []
        """Number of messages after which each of the next streams breaks; the later ones are whole."""
        self.errors: list[ServiceError] = []
        self.requests: list[pb.Generation] = []
        self.ended: list[str] = []
        self.address = ""

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> Iterator[pb.GenerateStreamResponse]:
        generation = request.generation
        self.requests.append(generation)
        if self.errors:
            context.abort_with_status(rpc_status.to_status(to_status(self.errors.pop(0))))
        left = self.breaks_after.pop(0) if self.breaks_after else None
        messages = list(self._messages(generation))
        yield from messages[:left]
        if left is not None and left <= len(messages):
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        if self.breaks_after:
            self.breaks_after.pop(0)
            context.abort(grpc.StatusCode.UNAVAILABLE, "Connection refused")
        choice = pb.Choice(text=request.generation.text, finish_reason=pb.FINISH_REASON_STOP)
        return pb.GenerateResponse(choices=[choice], request_id="r")

    def GenerateBatch(
        self, request: pb.GenerateBatchRequest, context: Any
    ) -> Iterator[pb.GenerateBatchResponse]:
        if not request.generations:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "generations: must not be empty")
        left = self.breaks_after.pop(0) if self.breaks_after else None
        for index in reversed(range(len(request.generations))):
            if left == 0:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            left = None if left is None else left - 1
            generation = pb.GenerateRequest(generation=request.generations[index])
            yield pb.GenerateBatchResponse(index=index, response=self.Generate(generation, context))
        if left == 0:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def EndSession(self, request: pb.EndSessionRequest, context: Any) -> pb.EndSessionResponse:
        if self.errors:
            context.abort_with_status(rpc_status.to_status(to_status(self.errors.pop(0))))
        self.ended.append(request.session)
        num_turns = sum(each.session == request.session for each in self.requests)
        return pb.EndSessionResponse(num_blocks=num_turns)

    def _messages(self, generation: pb.Generation) -> Iterator[pb.GenerateStreamResponse]:
        """Yield the messages of the answers in turn, without what was received."""
        assert not generation.received or generation.origin == "o"
        received = {answer.index: answer for answer in generation.received}
        number = generation.sampling.n or 1
        is_first = True
        todo = [
            (position, index)
            for position in range(NUM_TOKENS)
            for index in range(number)
            if position >= len(received.get(index, pb.ReceivedAnswer()).token_ids)
        ]
        for position, index in todo:
            answer = Random(generation.sampling.seed + index).choices(range(len(WORDS)), k=NUM_TOKENS)
            before = received.get(index, pb.ReceivedAnswer())
            if position == len(before.token_ids):
                assert list(before.token_ids) == answer[:position]
                assert before.num_characters == sum(len(WORDS[token]) for token in answer[:position])
            is_end = position == NUM_TOKENS - 1
            yield pb.GenerateStreamResponse(
                text=WORDS[answer[position]],
                token_ids=[answer[position]],
                index=index,
                finish_reason=pb.FINISH_REASON_LENGTH if is_end else pb.FINISH_REASON_UNSPECIFIED,
                usage=pb.Usage(completion_tokens=number * NUM_TOKENS)
                if (position, index) == todo[-1]
                else None,
                request_id="r-1" if is_first else "",
                origin="o" if is_first else "",
                prompt_token_ids=[5, 6] if is_first and generation.response.prompt_token_ids else [],
                prompt_logprobs=[pb.TokenLogprobs(logprob=-1)]
                if is_first and generation.response.HasField("prompt_logprobs")
                else [],
            )
            is_first = False


@contextmanager
def serving(router: SeededRouter) -> Iterator[SeededRouter]:
    with threaded_server((add_GenerationServiceServicer_to_server, router)) as router.address:
        yield router


@pytest.fixture
def pair() -> Iterator[list[SeededRouter]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(SeededRouter())) for _ in range(2)]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "BACKOFF_SECONDS", (0.01, 0.02, 0.03))


def streamed(addresses: Any, is_async: bool, prompt: Any = "p", **options: Any) -> list[Delta]:
    if not is_async:
        with Client(addresses, timeout=10) as client:
            return list(client.stream(prompt, **options))

    async def collect() -> list[Delta]:
        async with AsyncClient(addresses, timeout=10) as client:
            return [delta async for delta in client.stream(prompt, **options)]

    return asyncio.run(collect())


def answers(deltas: list[Delta]) -> dict[int, tuple[str, list[int], list[Any]]]:
    """Return each answer's text, tokens and finish reasons."""
    result: dict[int, tuple[str, list[int], list[Any]]] = {}
    for delta in deltas:
        text, tokens, reasons = result.get(delta.index, ("", [], []))
        reasons = [*reasons, delta.finish_reason] if delta.finish_reason else reasons
        result[delta.index] = (text + delta.text, [*tokens, *delta.token_ids], reasons)
    return result


def end_session(addresses: Any, is_async: bool, session: str) -> int:
    if not is_async:
        with Client(addresses, timeout=10) as client:
            return client.end_session(session)

    async def end() -> int:
        async with AsyncClient(addresses, timeout=10) as client:
            return await client.end_session(session)

    return asyncio.run(end())


@pytest.mark.parametrize("is_async", [False, True])
def test_the_end_of_a_session_reaches_all_routers(pair: list[SeededRouter], is_async: bool) -> None:
    addresses = [router.address for router in pair]
    for each in (addresses[0], addresses[0], addresses[1]):
        streamed(each, is_async, session="s")
    streamed(addresses, is_async, session="t")
    assert end_session(addresses, is_async, "s") == 3
    assert end_session(addresses[1], is_async, "s") == 1
    assert [router.ended for router in pair] == [["s"], ["s", "s"]]
    pair[0].errors.append(ResourceExhausted("busy", reason="BUSY"))
    with pytest.raises(Overloaded):
        end_session(addresses, is_async, "t")
    assert pair[1].ended[-1] == "t"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("break_after", [0, 1, 2, 5, 8])
def test_a_stream_that_breaks_continues_with_the_same_tokens(
    pair: list[SeededRouter], is_async: bool, number: int, break_after: int
) -> None:
    addresses = [router.address for router in pair]
    undisturbed = streamed(addresses, is_async, seed=7, n=number)
    for router in pair:
        router.breaks_after = [break_after, break_after]
    broken = streamed(addresses, is_async, seed=7, n=number)
    assert answers(broken) == answers(undisturbed)
    assert [delta.request_id for delta in broken if delta.request_id] == ["r-1"]
    (usage,) = [delta.usage for delta in broken if delta.usage]
    assert usage.completion_tokens == number * NUM_TOKENS
    num_moves = (number * NUM_TOKENS - 1) // break_after if break_after else 0
    assert usage.retries == min(4, num_moves)


@pytest.mark.parametrize("is_async", [False, True])
def test_one_address_continues_once_it_is_back(pair: list[SeededRouter], is_async: bool) -> None:
    pair[0].breaks_after = [4]
    broken = streamed(pair[0].address, is_async)
    first, second = pair[0].requests
    assert first.sampling.HasField("seed")
    assert first.sampling.seed == second.sampling.seed
    assert len(answers(broken)[0][1]) == NUM_TOKENS
    assert [len(each.token_ids) for each in second.received] == [4]


@pytest.mark.parametrize("method", ["stream", "batch"])
def test_a_blocking_call_ends_if_its_only_router_dies_before_the_first_message(method: str) -> None:
    ended: list[QuireError] = []

    def call(address: str) -> None:
        with Client(address, timeout=60) as client, pytest.raises(Unavailable) as raised:
            list(getattr(client, method)(["p"] if method == "batch" else "p"))
        ended.append(raised.value)

    command = [sys.executable, "-c", _SILENT_ROUTER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = f"127.0.0.1:{process.stdout.readline().strip()}"
            # A call that hangs must not keep the test process.
            calling = threading.Thread(target=call, args=(address,), daemon=True)
            calling.start()
            assert process.stdout.readline() == "called\n"
        finally:
            process.kill()
    calling.join(20)
    assert ended


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("options", [{}, {"n": 2}, {"n": 1, "best_of": 2}])
def test_a_stream_whose_router_is_lost_after_the_last_message_is_complete(
    pair: list[SeededRouter], is_async: bool, options: dict[str, int]
) -> None:
    addresses = [router.address for router in pair]
    undisturbed = streamed(addresses, is_async, seed=7, **options)
    for router in pair:
        router.requests.clear()
        router.breaks_after = [options.get("n", 1) * NUM_TOKENS]
    assert answers(streamed(addresses, is_async, seed=7, **options)) == answers(undisturbed)
    assert sum(len(router.requests) for router in pair) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_whose_router_is_lost_after_the_last_answer_is_complete(
    pair: list[SeededRouter], is_async: bool
) -> None:
    pair[0].breaks_after = [3]
    prompts = ["0", "1", "2"]

    async def collect() -> list[Any]:
        async with AsyncClient(pair[0].address, timeout=10) as client:
            return [outcome async for outcome in client.batch(prompts)]

    if is_async:
        outcomes = asyncio.run(collect())
    else:
        with Client(pair[0].address, timeout=10) as client:
            outcomes = list(client.batch(prompts))
    assert [(index, outcome.text) for index, outcome in outcomes] == [(2, "2"), (1, "1"), (0, "0")]


def test_a_conversation_continues_from_its_token_ids(pair: list[SeededRouter]) -> None:
    pair[0].breaks_after, pair[1].breaks_after = [3, 3], [3, 3]
    streamed([each.address for each in pair], False, [{"role": "user", "content": "x"}], prompt_logprobs=1)
    begun = [each for router in pair for each in router.requests if not each.received]
    continued = [each for router in pair for each in router.requests if each.received]
    assert [each.WhichOneof("prompt") for each in begun] == ["chat"]
    assert {tuple(each.chat.rendered.ids) for each in continued} == {(5, 6)}
    assert not any(each.response.HasField("prompt_logprobs") for each in continued)


@pytest.mark.parametrize(
    "options", [{"beam_width": 2}, {"best_of": 3}, {"kv_budget_tokens": 64}], ids=lambda options: min(options)
)
@pytest.mark.parametrize("break_after", [0, 3])
def test_answers_that_cannot_continue_begin_again_or_fail(
    pair: list[SeededRouter], options: dict[str, Any], break_after: int
) -> None:
    pair[0].breaks_after = pair[1].breaks_after = [break_after]
    addresses = [each.address for each in pair]
    if not break_after:
        assert len(answers(streamed(addresses, False, **options))[0][1]) == NUM_TOKENS
        return
    with pytest.raises(Interrupted, match="cannot continue on another router") as caught:
        streamed(addresses, False, **options)
    assert caught.value.reason == "CANNOT_CONTINUE"


def test_a_router_that_does_not_return_ends_the_stream_with_its_error(pair: list[SeededRouter]) -> None:
    with Client(pair[0].address, timeout=10) as client, pytest.raises(Unavailable, match="Socket closed"):
        pair[0].breaks_after = [2] + [0] * 10
        list(client.stream("p"))


def test_a_limit_that_the_lost_router_still_counts_is_waited_for(pair: list[SeededRouter]) -> None:
    pair[0].breaks_after = pair[1].breaks_after = [2]
    with Client([each.address for each in pair], timeout=10) as client:
        stream = client.stream("p")
        next(stream)
        for router in pair:
            router.errors = [
                ResourceExhausted(
                    "1 requests are under way", reason="TENANT_REQUESTS", retry_after_seconds=0.1
                )
            ]
        assert len(list(stream)) == NUM_TOKENS - 1


def test_a_limit_at_the_beginning_is_an_error(pair: list[SeededRouter]) -> None:
    pair[0].errors = [ResourceExhausted("wait", reason="TOKEN_RATE", retry_after_seconds=0.1)]
    with Client([each.address for each in pair], timeout=10) as client, pytest.raises(Overloaded):
        for _ in range(2):
            list(client.stream("p"))


def test_whole_answers_and_batches_move_too(pair: list[SeededRouter]) -> None:
    with Client([each.address for each in pair], timeout=10) as client:
        pair[0].breaks_after = [0]
        assert [client.generate(str(number)).text for number in range(4)] == ["0", "1", "2", "3"]
        for router in pair:
            router.breaks_after = [2]
        outcomes = list(client.batch([str(number) for number in range(5)]))
    assert sorted(index for index, _ in outcomes) == list(range(5))
    assert all(not isinstance(each, QuireError) and each.text == str(index) for index, each in outcomes)


def error(code: grpc.StatusCode, message: str = "", reason: str | None = None) -> QuireError:
    return from_status(code.value[0], message, reason=reason or code.name, metadata={}, retry_after=None)


LOST = error(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def make_routers(clock: ManualClock, number: int = 3) -> Routers[str]:
    return Routers([f"r:{i}" for i in range(number)], lambda address: address, clock)


def test_calls_begin_at_each_router_in_turn_and_avoid_one_that_failed() -> None:
    clock = ManualClock()
    several = make_routers(clock)
    assert len({several.choose() for _ in range(3)}) == 3
    several.avoid(several.all[1])
    assert several.all[1] not in {several.choose() for _ in range(9)}
    clock.now += AVOID_SECONDS
    assert several.all[1] in {several.choose() for _ in range(3)}


def test_every_router_is_tried_before_the_pauses() -> None:
    clock = ManualClock()
    attempts = Attempts(make_routers(clock), 60.0)
    tried, pauses = [attempts.router.address], []
    with pytest.raises(Unavailable):
        while True:
            pauses.append(attempts.pause_after(LOST))
            tried.append(attempts.router.address)
    assert len(tried) == 12
    assert all(len(set(tried[i : i + 3])) == 3 for i in range(0, 12, 3))
    assert [pause for pause in pauses if pause] == [0.01, 0.02, 0.03]


def test_a_routers_own_refusal_is_final_once_all_have_refused() -> None:
    attempts = Attempts(make_routers(ManualClock(), 2), 60.0)
    refusal = error(grpc.StatusCode.UNAVAILABLE, "draining", "DRAINING")
    assert attempts.pause_after(refusal) == 0
    with pytest.raises(Unavailable):
        attempts.pause_after(refusal)


def test_no_attempt_follows_other_errors_or_the_deadline() -> None:
    clock = ManualClock()
    attempts = Attempts(make_routers(clock), 60.0)
    for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL):
        with pytest.raises(QuireError):
            attempts.pause_after(error(code))
    clock.now += 61
    assert attempts.seconds_left == 0
    with pytest.raises(Unavailable):
        attempts.pause_after(LOST)


def test_a_broken_connection_differs_from_an_error_of_the_router() -> None:
    assert is_connection_lost(LOST)
    assert is_connection_lost(error(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"))
    assert not is_connection_lost(error(grpc.StatusCode.UNAVAILABLE, "no worker", "NO_WORKER"))
    assert not is_connection_lost(error(grpc.StatusCode.INTERNAL, "a bug"))


@pytest.mark.parametrize("addresses", [[], ["a:1", "a:1"]])
def test_addresses_are_given_once(addresses: list[str]) -> None:
    with pytest.raises(ValueError, match="address"):
        addresses_of(addresses)
