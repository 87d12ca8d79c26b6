"""Runs the generations of one batch call concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import ServiceError
from quire.services.server.parameters import check_from_one

MAX_BATCH_SIZE = 256


def check_batch_size(size: int) -> None:
    """Refuse an empty batch, and one with more than ``MAX_BATCH_SIZE`` generations.

    Raises:
        InvalidArgument: the size is out of range.
    """
    check_from_one(MAX_BATCH_SIZE, size, "generations")


async def batch_answers(
    generations: Sequence[pb.Generation],
    perform: Callable[[pb.Generation], Awaitable[pb.GenerateResponse]],
    places: asyncio.Semaphore,
) -> AsyncGenerator[pb.GenerateBatchResponse]:
    """Start the generations in order, and yield the result of each one as soon as it has ended.

    A generation occupies one of the places while it runs. If it fails with a ``ServiceError``, its result is
    that error, and the others continue.
    """

    async def answer(index: int, generation: pb.Generation) -> pb.GenerateBatchResponse:
        async with places:
            try:
                return pb.GenerateBatchResponse(index=index, response=await perform(generation))
            except ServiceError as error:
                return pb.GenerateBatchResponse(index=index, error=_to_proto(error))

    tasks = [asyncio.create_task(answer(index, each)) for index, each in enumerate(generations)]
    try:
        for finished in asyncio.as_completed(tasks):
            yield await finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _to_proto(error: ServiceError) -> pb.GenerationError:
    return pb.GenerationError(
        code=error.code.value[0],
        message=error.message,
        reason=error.reason,
        metadata=error.metadata,
        retry_after_seconds=error.retry_after_seconds,
    )
