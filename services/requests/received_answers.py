"""Checks what a client says it has received of answers that it asks to continue."""

from __future__ import annotations

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import FailedPrecondition, InvalidArgument
from quire.sampling.params import SamplingParams
from quire.services.requests.prompts import check_token_ids
from quire.services.requests.served_model import ServedModel

OTHER_ORIGIN = "OTHER_ORIGIN"


def check_received(
    generation: pb.Generation, params: SamplingParams, num_best: int | None, model: ServedModel, adapter: str
) -> bytes:
    """Refuse to continue answers that could differ from what the client has received.

    Returns the cache descriptor of the workers that may continue them; empty if nothing was received.

    Args:
        num_best: number of answers to return of those sampled; None: all.
        adapter: digest of the adapter; empty for none.

    Raises:
        InvalidArgument: the answers cannot be continued one by one, or what was received is malformed.
        FailedPrecondition: they come from another model, or from one that is computed in another way.
    """
    if not generation.received:
        if generation.origin:
            raise InvalidArgument("origin", "must be empty without received")
        return b""
    if not generation.origin:
        raise InvalidArgument("received", "needs origin, from the first message of the broken stream")
    fields = {
        "sampling.beam": params.beam is not None,
        "sampling.best_of": num_best is not None,
        "sampling.kv_budget_tokens": params.kv_budget_tokens is not None,
    }
    for field, is_set in fields.items():
        if is_set:
            raise InvalidArgument(field, "must be absent with received: such answers cannot be continued")
    if not generation.sampling.HasField("seed"):
        raise InvalidArgument("sampling.seed", "must be set with received, to the seed of the first tokens")
    origins = {model.origin(each, adapter): each for each in model.descriptors()}
    if generation.origin not in origins:
        raise FailedPrecondition(
            "the received tokens come from another model, or from one that is computed in another way; "
            "begin the request again",
            reason=OTHER_ORIGIN,
        )
    indexes = [answer.index for answer in generation.received]
    if len(set(indexes)) < len(indexes) or max(indexes) >= params.num_sequences:
        raise InvalidArgument(
            "received", f"must name different answers below {params.num_sequences}; got {indexes}"
        )
    finished = [answer for answer in generation.received if answer.is_finished]
    if len(finished) == params.num_sequences:
        raise InvalidArgument("received", "must leave an answer to continue; all are finished")
    for at, answer in enumerate(generation.received):
        check_token_ids(answer.token_ids, model, f"received[{at}].token_ids")
        if len(answer.token_ids) > params.max_tokens:
            raise InvalidArgument(
                f"received[{at}].token_ids",
                f"must be at most stopping.max_tokens, {params.max_tokens}; got {len(answer.token_ids)}",
                metadata={"limit": str(params.max_tokens)},
            )
    return origins[generation.origin]
