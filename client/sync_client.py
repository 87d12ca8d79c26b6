"""The blocking client."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from quire.client import conversion
from quire.client.channel import channel_options
from quire.client.errors import QuireError, typed_errors
from quire.client.tls import Tls, bearer
from quire.client.types import Completion, Delta, GenerationOptions, Message, ModelInfo, Prompt
from quire.protos import inference_pb2 as pb
from quire.protos.inference_pb2_grpc import GenerationServiceStub


class Client:
    """Calls a router at ``address``; is safe to share among threads, and is a context manager.

    ``timeout`` is the deadline of a whole call in seconds, up to the last token of a stream; each call may
    set its own. ``api_key`` is sent with every call, unencrypted without ``tls``. Each method raises
    ``QuireError`` if the call fails.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:8500",
        *,
        timeout: float = 300.0,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._timeout = timeout
        self._metadata = bearer(api_key)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=channel_options())
        else:
            options = [*channel_options(), *tls.options()]
            self._channel = grpc.secure_channel(address, tls.credentials(), options=options)
        self._stub = GenerationServiceStub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """Return the whole answer to a prompt."""
        request = pb.GenerateRequest(generation=conversion.to_generation(prompt, options))
        with typed_errors():
            return conversion.to_completion(
                self._stub.Generate(request, timeout=self._deadline(timeout), metadata=self._metadata)
            )

    def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """Return the assistant's next message in a conversation."""
        return self.generate(messages, timeout=timeout, **options)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Generator[Delta, None, None]:
        """Iterate over the answer as it is generated; the request is sent when the iteration begins.

        Leaving the loop, or ``close()``, cancels the request and frees its resources on the servers.
        """
        request = pb.GenerateStreamRequest(generation=conversion.to_generation(prompt, options))
        return self._deltas(request, self._deadline(timeout))

    def batch(
        self, prompts: Sequence[Prompt], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Generator[tuple[int, Completion | QuireError], None]:
        """Iterate over (index of the prompt, its answer or its error), each as soon as it arrives.

        Leaving the loop cancels the prompts that still run.
        """
        call = self._stub.GenerateBatch(
            conversion.to_batch_request(prompts, options),
            timeout=self._deadline(timeout),
            metadata=self._metadata,
        )
        try:
            with typed_errors():
                for response in call:
                    yield response.index, conversion.to_outcome(response)
        finally:
            call.cancel()

    def tokenize(self, prompt: str | Sequence[Message], *, timeout: float | None = None) -> list[int]:
        """Return the token ids of a text or of a rendered conversation."""
        request = conversion.to_tokenize_request(prompt)
        with typed_errors():
            return list(
                self._stub.Tokenize(
                    request, timeout=self._deadline(timeout), metadata=self._metadata
                ).token_ids
            )

    def detokenize(self, token_ids: Iterable[int], *, timeout: float | None = None) -> str:
        """Return the text of token ids."""
        request = conversion.to_detokenize_request(token_ids)
        with typed_errors():
            return str(
                self._stub.Detokenize(request, timeout=self._deadline(timeout), metadata=self._metadata).text
            )

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """Return the served model and its limits."""
        with typed_errors():
            response = self._stub.GetModelInfo(
                pb.GetModelInfoRequest(), timeout=self._deadline(timeout), metadata=self._metadata
            )
        return conversion.to_model_info(response)

    def close(self) -> None:
        """Close the channel; calls that still run are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _deltas(self, request: pb.GenerateStreamRequest, timeout: float) -> Generator[Delta, None, None]:
        call = self._stub.GenerateStream(request, timeout=timeout, metadata=self._metadata)
        try:
            with typed_errors():
                for response in call:
                    yield conversion.to_delta(response)
        finally:
            call.cancel()

    def _deadline(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout
