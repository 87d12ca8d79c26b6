"""The asyncio client."""

# ruff: noqa: ASYNC109 - the timeout is sent with the call as its deadline; asyncio.timeout would not send it.

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
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


class AsyncClient:
    """Calls a router at ``address`` from one event loop; is an async context manager.

    ``timeout`` is the deadline of a whole call in seconds, up to the last token of a stream; each call may
    set its own. ``api_key`` is sent with every call, unencrypted without ``tls``. Each method raises
    ``QuireError`` if the call fails; cancelling the task cancels the request.
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
            self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        else:
            options = [*channel_options(), *tls.options()]
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=options)
        self._stub = GenerationServiceStub(self._channel)

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """Return the whole answer to a prompt."""
        request = pb.GenerateRequest(generation=conversion.to_generation(prompt, options))
        with typed_errors():
            return conversion.to_completion(
                await self._stub.Generate(request, timeout=self._deadline(timeout), metadata=self._metadata)
            )

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """Return the assistant's next message in a conversation."""
        return await self.generate(messages, timeout=timeout, **options)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> AsyncGenerator[Delta, None]:
        """Iterate over the answer as it is generated; the request is sent when the iteration begins.

        Leaving the loop, or ``aclose()``, cancels the request and frees its resources on the servers.
        """
        request = pb.GenerateStreamRequest(generation=conversion.to_generation(prompt, options))
        return self._deltas(request, self._deadline(timeout))

    async def batch(
        self, prompts: Sequence[Prompt], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> AsyncGenerator[tuple[int, Completion | QuireError], None]:
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
                async for response in call:
                    yield response.index, conversion.to_outcome(response)
        finally:
            call.cancel()

    async def tokenize(self, prompt: str | Sequence[Message], *, timeout: float | None = None) -> list[int]:
        """Return the token ids of a text or of a rendered conversation."""
        request = conversion.to_tokenize_request(prompt)
        with typed_errors():
            return list(
                (
                    await self._stub.Tokenize(
                        request, timeout=self._deadline(timeout), metadata=self._metadata
                    )
                ).token_ids
            )

    async def detokenize(self, token_ids: Iterable[int], *, timeout: float | None = None) -> str:
        """Return the text of token ids."""
        request = conversion.to_detokenize_request(token_ids)
        with typed_errors():
            return str(
                (
                    await self._stub.Detokenize(
                        request, timeout=self._deadline(timeout), metadata=self._metadata
                    )
                ).text
            )

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """Return the served model and its limits."""
        request = pb.GetModelInfoRequest()
        with typed_errors():
            response = await self._stub.GetModelInfo(
                request, timeout=self._deadline(timeout), metadata=self._metadata
            )
        return conversion.to_model_info(response)

    async def close(self) -> None:
        """Close the channel; calls that still run are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _deltas(self, request: pb.GenerateStreamRequest, timeout: float) -> AsyncGenerator[Delta, None]:
        call = self._stub.GenerateStream(request, timeout=timeout, metadata=self._metadata)
        try:
            with typed_errors():
                async for response in call:
                    yield conversion.to_delta(response)
        finally:
            call.cancel()

    def _deadline(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout
