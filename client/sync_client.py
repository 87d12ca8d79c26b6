"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, Unpack

import grpc

from quire.client import conversion
from quire.client.errors import QuireError, client_closed, typed_errors
from quire.client.resumable_stream import ResumableBatch, ResumableStream
from quire.client.router_client import Method, RouterClient
from quire.client.routers import Attempts
from quire.client.types import Completion, Delta, Embeddings, GenerationOptions, Message, ModelInfo, Prompt
from quire.protos import inference_pb2 as pb


class Client(RouterClient):
    """Calls the routers at ``address``, one or several; is safe to share among threads, and is a context
    manager.

    Calls begin at each router in turn. One that fails before an answer begins goes to another router. A
    stream whose connection breaks continues on another router, or on the same one once it is back, with the
    same tokens and text; an answer that cannot continue ends with ``Interrupted``.

    ``timeout`` is the deadline of a whole call in seconds, up to the last token of a stream; each call may
    set its own. ``api_key`` is sent with every call, unencrypted without ``tls``. Each method raises
    ``QuireError`` if the call fails.
    """

    _grpc = grpc

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """Return the whole answer to a prompt."""
        request = pb.GenerateRequest(generation=conversion.to_generation(prompt, options))
        return conversion.to_completion(self._call(lambda stub: stub.Generate, request, timeout))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """Return the assistant's next message in a conversation."""
        conversion.checked_list(messages, "messages")
        return self.generate(messages, timeout=timeout, **options)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Generator[Delta, None, None]:
        """Iterate over the answer as it is generated; the request is sent when the iteration begins.

        Leaving the loop, or ``close()``, cancels the request and frees its resources on the servers.
        """
        stream = ResumableStream(conversion.to_generation(prompt, options))
        return self._receive(lambda stub: stub.GenerateStream, stream, timeout)

    def batch(
        self, prompts: Sequence[Prompt], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Generator[tuple[int, Completion | QuireError], None]:
        """Iterate over (index of the prompt, its answer or its error), each as soon as it arrives.

        Leaving the loop cancels the prompts that still run.
        """
        batch = ResumableBatch(conversion.to_batch(prompts, options))
        return self._receive(lambda stub: stub.GenerateBatch, batch, timeout)

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        timeout: float | None = None,
        **options: int | str | None,
    ) -> Embeddings:
        """Return the embeddings of texts or token ids; ``options`` are other fields of ``EmbedRequest``."""
        request = conversion.to_embed_request(texts, **options)
        return conversion.to_embeddings(self._call(lambda stub: stub.Embed, request, timeout))

    def tokenize(self, prompt: str | Sequence[Message], *, timeout: float | None = None) -> list[int]:
        """Return the token ids of a text or of a rendered conversation."""
        request = conversion.to_tokenize_request(prompt)
        return list((self._call(lambda stub: stub.Tokenize, request, timeout)).token_ids)

    def detokenize(self, token_ids: Iterable[int], *, timeout: float | None = None) -> str:
        """Return the text of token ids."""
        request = conversion.to_detokenize_request(token_ids)
        return str((self._call(lambda stub: stub.Detokenize, request, timeout)).text)

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """Return the served model and its limits."""
        request = pb.GetModelInfoRequest()
        return conversion.to_model_info(self._call(lambda stub: stub.GetModelInfo, request, timeout))

    def end_session(self, session: str, *, timeout: float | None = None) -> int:
        """Drop the cached blocks that only the next turn of a session could use; return how many those were.

        All routers are called, since only those that served its turns remember it. If a call fails, the
        others count nonetheless.
        """
        request, deadline = pb.EndSessionRequest(session=session), self._deadline(timeout)
        with self._call_errors():
            calls = [
                router.stub.EndSession.future(request, timeout=deadline, metadata=self._metadata)
                for router in self._routers.all
            ]
            for call in calls:
                call.exception()  # waits for the call's end
            return sum(call.result().num_blocks for call in calls)

    def close(self) -> None:
        """Close the channels; calls that still run, and later ones, raise ``Cancelled``."""
        self._is_closed = True
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _call_errors(self) -> Iterator[None]:
        """Turn gRPC's errors, and those of a client that was closed, into ``QuireError``.

        After Ctrl-C, later calls get new channels: Python may have raised it where gRPC had just taken a
        lock, which nobody releases then, and the channel's thread would wait for this lock for ever.
        """
        try:
            with typed_errors():
                yield
        except KeyboardInterrupt:
            for router in self._routers.all:
                router.stub = self._connect(router.address)
            raise
        except (ValueError, grpc.FutureCancelledError) as error:
            # gRPC raises a ValueError for a call on a closed channel.
            if self._is_closed:
                raise client_closed() from error
            raise

    def _receive(
        self, method: Method, parts: ResumableStream | ResumableBatch, timeout: float | None
    ) -> Generator[Any, None, None]:
        attempts = Attempts(self._routers, self._deadline(timeout), is_stream=True)
        request = parts.request()
        conversion.check_size(request)
        while True:
            with self._call_errors():
                call = self._begin(method, attempts, request)
            try:
                with self._call_errors():
                    for response in call:
                        attempts.record_progress()
                        yield parts.receive(response, attempts.num_moves)
                return
            except QuireError as error:
                if parts.is_complete:
                    return  # the router was lost after its last message
                pause = attempts.pause_after(error, is_under_way=parts.is_under_way)
                request = parts.request(error)
                time.sleep(pause)
            finally:
                call.cancel()

    def _call(self, method: Method, request: Any, timeout: float | None) -> Any:
        conversion.check_size(request)
        attempts = Attempts(self._routers, self._deadline(timeout))
        while True:
            try:
                with self._call_errors():
                    return self._begin(method, attempts, request)
            except QuireError as error:
                time.sleep(attempts.pause_after(error))
