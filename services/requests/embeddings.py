"""Validates a request for embeddings, each of whose texts becomes a prompt without an answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.rpc.server import PUBLIC_MESSAGE_BYTES
from quire.services.requests.prompts import encode_text
from quire.services.requests.served_model import ServedModel
from quire.services.requests.validation import ValidRequest, find_adapter, validate
from quire.services.server.parameters import check_from_one

MAX_INPUTS = 2048


async def validate_embeddings(
    request: pb.EmbedRequest, model: ServedModel, fields: Sequence[str] = ()
) -> list[ValidRequest]:
    """Tokenize and check a request; return its texts, which have the same request id.

    Args:
        fields: the client's names of the inputs, which errors use.

    Raises:
        InvalidArgument: a field is invalid, or the model makes no embeddings; the error names the field.
        NotFound: the request names another model.
    """
    find_adapter(request.model, model)
    _check_sizes(request, model)
    longest = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    if longest is not None and longest != -1 and longest < 1:
        raise InvalidArgument("truncate_prompt_tokens", f"must be at least 1, or -1; got {longest}")
    generation = pb.Generation(
        sampling=pb.SamplingParams(seed=0),
        stopping=pb.StoppingParams(max_tokens=1),
        request_id=request.request_id or secrets.token_hex(8),
        cache_salt=request.cache_salt,
        model=request.model,
    )
    texts = []
    for at, given in enumerate(request.inputs):
        # Short texts are tokenized at once; two thousand of them would block the event loop.
        await asyncio.sleep(0)
        field = fields[at] if fields else f"inputs[{at}]"
        try:
            await _set_prompt(generation, given, model.max_model_len - 1 if longest == -1 else longest, model)
            texts.append(replace(await validate(generation, model), prompt_field=field))
        except InvalidArgument as error:
            names = ("prompt", "text", "token_ids", "token_ids.ids")
            raise error.renamed(dict.fromkeys(names, field)) from error
    return texts


def _check_sizes(request: pb.EmbedRequest, model: ServedModel) -> None:
    known = model.embedding
    if not known.size:
        problem = known.problem or "its workers do not know them"
        raise InvalidArgument("model", f"makes no embeddings: {problem}", reason="NO_EMBEDDINGS")
    if request.HasField("dimensions") and request.dimensions not in known.dimensions:
        raise InvalidArgument(
            "dimensions",
            f"must be absent, or a number of values that the model was trained for; got {request.dimensions}",
        )
    most = min(MAX_INPUTS, PUBLIC_MESSAGE_BYTES // (4 * (request.dimensions or known.size) + 16))
    check_from_one(most, len(request.inputs), "inputs")


async def _set_prompt(
    generation: pb.Generation, given: pb.EmbedInput, longest: int | None, model: ServedModel
) -> None:
    """Set the prompt to a text, or to its first ``longest`` tokens and the special tokens at its end."""
    ids = list(given.token_ids.ids[:longest])
    if given.WhichOneof("prompt") != "text":
        generation.token_ids.CopyFrom(pb.TokenIds(ids=ids))
    elif longest is None:
        generation.text = given.text
    else:
        ids, bare = [await encode_text(given.text, model, add_special_tokens=each) for each in (True, False)]
        num_before = next((at for at in range(len(ids)) if ids[at : at + len(bare)] == bare), len(ids))
        end = ids[num_before + len(bare) :] if len(ids) > longest else []
        ids = ids[: max(0, longest - len(end))] + end[-longest:]
        generation.token_ids.CopyFrom(pb.TokenIds(ids=ids))
