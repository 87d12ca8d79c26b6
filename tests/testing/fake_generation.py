"""A public API on the loopback that answers as it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from grpc_status import rpc_status

from quire.protos import inference_pb2 as pb
from quire.protos.inference_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from quire.rpc.errors import ServiceError, to_status
from tests.testing.grpc_servers import threaded_server

WAIT_SECONDS = 10.0


class FakeGeneration(GenerationServiceServicer):
    """A router that answers with the words ``answer``, one in each message, and records what it was asked.

    ``errors`` are raised by the next calls, one each; with ``hangs`` a stream stays open after one word.
    """

    def __init__(self) -> None:
        self.answer = ["Blue", " is", " é🙂."]
        self.errors: list[ServiceError] = []
        self.hangs = False
        self.requests: list[pb.Generation] = []
        self.timeouts: list[float] = []
        self.authorizations: list[str] = []
        self.cancelled = threading.Event()
        self.address = ""

    def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        self._begin(request.generation, context)
        return pb.GenerateResponse(
            choices=[
                pb.Choice(
                    index=index,
                    score=-0.5 - index if request.generation.sampling.HasField("beam") else None,
                    text="".join(self.answer),
                    token_ids=range(len(self.answer)),
                    finish_reason=pb.FINISH_REASON_STOP,
                    logprobs=self._logprobs(request.generation) * len(self.answer),
                )
                for index in range(_num_answers(request.generation))
            ],
            usage=self._usage(),
            request_id="r-1",
        )

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> Iterator[pb.GenerateStreamResponse]:
        is_complete = threading.Event()

        def note_cancel() -> None:
            if not is_complete.is_set():
                self.cancelled.set()

        context.add_callback(note_cancel)
        self._begin(request.generation, context)
        num_answers = _num_answers(request.generation)
        is_search = request.generation.sampling.HasField("beam")
        for index, (word, answer) in enumerate(product(self.answer, range(num_answers))):
            is_last = index == len(self.answer) * num_answers - 1
            is_end = index >= len(self.answer) * num_answers - num_answers
            yield pb.GenerateStreamResponse(
                text=word,
                token_ids=[index // num_answers],
                index=answer,
                score=-0.5 - answer if is_search and is_end else None,
                logprobs=self._logprobs(request.generation),
                finish_reason=pb.FINISH_REASON_STOP if is_end else pb.FINISH_REASON_UNSPECIFIED,
                usage=self._usage() if is_last else None,
                request_id="" if index else "r-1",
            )
            if self.hangs:
                # Nothing but the client, or its deadline, ends the call now.
                self.cancelled.wait(WAIT_SECONDS)
                return
        is_complete.set()

    def GenerateBatch(
        self, request: pb.GenerateBatchRequest, context: Any
    ) -> Iterator[pb.GenerateBatchResponse]:
        self._note(context)
        for index, generation in reversed(list(enumerate(request.generations))):
            if generation.text == "fail":
                error = pb.GenerationError(
                    code=8,
                    message="wait",
                    reason="TOKEN_RATE",
                    metadata={"limit": "6"},
                    retry_after_seconds=1.5,
                )
                yield pb.GenerateBatchResponse(index=index, error=error)
                continue
            choice = pb.Choice(text="".join(self.answer), finish_reason=pb.FINISH_REASON_STOP)
            yield pb.GenerateBatchResponse(index=index, response=pb.GenerateResponse(choices=[choice]))

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self._note(context)
        text = request.text or request.chat.messages[0].content
        return pb.TokenizeResponse(token_ids=list(text.encode()))

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        self._note(context)
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        self._note(context)
        return pb.GetModelInfoResponse(
            model="demo",
            max_model_len=512,
            vocab_size=256,
            eos_token_ids=[0],
            block_size=16,
            num_prefill_workers=1,
            num_decode_workers=2,
        )

    def _begin(self, generation: pb.Generation, context: Any) -> None:
        self._note(context)
        self.requests.append(generation)
        self.timeouts.append(context.time_remaining())
        if self.errors:
            context.abort_with_status(rpc_status.to_status(to_status(self.errors.pop(0))))

    def _note(self, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        if "authorization" in metadata:
            self.authorizations.append(metadata["authorization"])

    def _usage(self) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=40,
            completion_tokens=len(self.answer),
            cached_prompt_tokens=32,
            blocks_shipped=1,
            bytes_shipped=65536,
            blocks_reused_on_decode=2,
        )

    def _logprobs(self, generation: pb.Generation) -> list[pb.TokenLogprobs]:
        if not generation.response.HasField("logprobs"):
            return []
        return [pb.TokenLogprobs(logprob=-0.5, top=[pb.CandidateLogprob(token_id=7, logprob=-0.5)])]


def _num_answers(generation: pb.Generation) -> int:
    return generation.sampling.beam.width or generation.sampling.n or 1


@pytest.fixture
def fake_generation() -> Iterator[FakeGeneration]:
    """Serve a ``FakeGeneration`` on the loopback; ``address`` says where."""
    servicer = FakeGeneration()
    with threaded_server((add_GenerationServiceServicer_to_server, servicer)) as servicer.address:
        yield servicer
