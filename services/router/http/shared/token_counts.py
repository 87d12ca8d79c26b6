"""Counts the tokens of a prompt, for the APIs that have a route for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.requests.prompts import encode_chat
from quire.services.requests.served_model import ServedModel
from quire.services.requests.validation import find_adapter
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.shared.bodies import TENANT, json_response, read_body
from quire.services.router.http.shared.fields import AnswerFields

B = TypeVar("B", bound=AnswerFields)


def counting(
    servicer: GenerationServicer,
    body_type: type[B],
    chat_of: Callable[[B, ServedModel], pb.Chat],
    names: Mapping[str, str],
    answer: Callable[[int], BaseModel],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that counts the tokens of a prompt; the call counts as a request for admission.

    Args:
        names: the client's names of fields of ``quire.v1``, which errors use.
        answer: returns the body for a number of tokens.
    """

    async def count(request: web.Request) -> web.Response:
        body = await read_body(request, body_type)
        async with servicer.admitted(request[TENANT]):
            model = (await servicer.joined_cluster()).model
            find_adapter(body.model or "", model)
            try:
                # A large conversation takes tens of milliseconds to translate.
                chat = await asyncio.to_thread(chat_of, body, model)
                return json_response(answer(len(await encode_chat(chat, model))))
            except InvalidArgument as error:
                raise error.renamed(names) from error

    return count
