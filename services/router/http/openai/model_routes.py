"""Serves the routes about the model: its name and limits, its tokenizer, and its token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from quire.rpc.errors import InvalidArgument
from quire.services.requests.prompts import check_detokenized, encode_chat, encode_text
from quire.services.requests.served_model import ServedModel
from quire.services.requests.validation import find_adapter
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.openai.answer_bodies import Model, ModelList, Text, TokenizerInfo, Tokens
from quire.services.router.http.openai.conversation import conversation
from quire.services.router.http.openai.logprobs import TokenNames
from quire.services.router.http.openai.requests import DetokenizeRequest, TokenizeRequest
from quire.services.router.http.openai.tools import ToolUse
from quire.services.router.http.shared.bodies import TENANT, json_response, read_body


class ModelRoutes:
    """Handles requests about the served model."""

    def __init__(self, servicer: GenerationServicer) -> None:
        self._servicer = servicer
        self._started = int(time.time())

    async def models(self, request: web.Request) -> web.Response:
        """Return the list of the model and its adapters that the tenant may use."""
        model = await self._model(None)
        names = list(filter(request[TENANT].may_use, [model.name, *sorted(model.adapters())]))
        models = [self._described(model, name) for name in names]
        first, last = (names[0], names[-1]) if names else (None, None)
        return json_response(
            ModelList(object="list", data=models, has_more=False, first_id=first, last_id=last)
        )

    async def model(self, request: web.Request) -> web.Response:
        """Return the description of the model that the path names."""
        name = request.match_info["model"]
        return json_response(self._described(await self._model(name), name))

    async def tokenize(self, request: web.Request) -> web.Response:
        """Return the token ids of a text or a conversation.

        The call counts as a request for admission, because a long text takes seconds.
        """
        body = await read_body(request, TokenizeRequest)
        async with self._servicer.admitted(request[TENANT]):
            return json_response(await self._tokens(body))

    async def _tokens(self, body: TokenizeRequest) -> Tokens:
        model = await self._model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidArgument("prompt", "must be set, or messages, and not both")
        if body.messages is not None:
            chat = conversation(body.messages, ToolUse(body.tools or ()), body.chat_template_kwargs or {})
            tokens = await encode_chat(chat, model)
        else:
            text, is_bare = body.prompt or "", body.add_special_tokens is False
            tokens = await encode_text(text, model, "prompt", add_special_tokens=not is_bare)
        answer = Tokens(count=len(tokens), max_model_len=model.max_model_len, tokens=tokens)
        if body.return_token_strs:
            names = TokenNames(model.tokenizer, as_ids=False)
            answer.token_strs = [names[token] for token in tokens]
        return answer

    async def detokenize(self, request: web.Request) -> web.Response:
        """Return the text of token ids; the call counts as a request for admission."""
        body = await read_body(request, DetokenizeRequest)
        async with self._servicer.admitted(request[TENANT]):
            model = await self._model(body.model)
            check_detokenized(body.tokens, model, "tokens")
            decode = model.tokenizer.decode
            skips = bool(body.skip_special_tokens)
            text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=skips)
            return json_response(Text(prompt=text))

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        """Return the tokenizer's special tokens and settings, and the chat template."""
        model = await self._model(None)
        info = TokenizerInfo(
            vocab_size=model.vocab_size,
            model_max_length=model.max_model_len,
            eos_token_ids=sorted(model.eos_token_ids),
            **_text_settings(model.tokenizer_config),
        )
        if model.chat_template is not None:
            info.chat_template = model.chat_template.source
        return json_response(info)

    async def _model(self, name: str | None) -> ServedModel:
        model = (await self._servicer.joined_cluster()).model
        find_adapter(name or "", model)
        return model

    def _described(self, model: ServedModel, name: str) -> Model:
        return Model(
            id=name,
            object="model",
            created=self._started,
            owned_by="quire",
            type="model",
            display_name=name,
            created_at=datetime.fromtimestamp(self._started, UTC).isoformat(),
            max_input_tokens=model.max_model_len - 1,
            max_tokens=model.max_model_len - 1,
            max_model_len=model.max_model_len,
            sampling_defaults=dict(model.sampling_defaults),
        )


def _text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public settings of ``tokenizer_config.json``, which may also contain paths."""
    settings = {name: config[name] for name in ("add_bos_token", "add_eos_token") if name in config}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        settings[name] = token.get("content") if isinstance(token, Mapping) else token
    return settings
