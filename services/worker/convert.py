"""Between the wire's messages and the engine's types."""

from __future__ import annotations

from quire.engine.sequence import GeneratedToken, SamplingParams, Sequence, SequenceStatus
from quire.protos import inference_pb2, worker_pb2
from quire.services.errors import InvalidArgument

_FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: inference_pb2.FINISH_REASON_STOP,
    SequenceStatus.FINISHED_LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def engine_id(request_id: str, attempt: int) -> str:
    """Name an attempt: an old one may still be ending when the next begins."""
    return f"{request_id}#{attempt}"


def sequence_from_proto(
    message: worker_pb2.Sequence, root_hash: bytes, vocab_size: int, *, stops_after_prefill: bool
) -> Sequence:
    """Read a sequence.

    Raises:
        InvalidArgument: a field is out of range.
    """
    token_ids = list(message.token_ids)
    if not token_ids:
        raise InvalidArgument("token_ids", "must not be empty")
    if max(token_ids) >= vocab_size:
        raise InvalidArgument("token_ids", f"{max(token_ids)} is not below the vocabulary's {vocab_size}")
    if message.num_output_tokens >= len(token_ids):
        raise InvalidArgument("num_output_tokens", "must leave at least one prompt token")
    sampling, stopping = message.sampling, message.stopping
    try:
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=stopping.max_tokens,
            min_tokens=stopping.min_tokens,
            stop_token_ids=frozenset(stopping.stop_token_ids),
            ignore_eos=stopping.ignore_eos,
            num_logprobs=message.logprobs if message.HasField("logprobs") else None,
        )
    except ValueError as error:
        raise InvalidArgument(str(error).split(" ", 1)[0], str(error)) from error
    return Sequence(
        request_id=engine_id(message.request_id, message.attempt),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) - message.num_output_tokens,
        params=params,
        root_hash=root_hash,
        stops_after_prefill=stops_after_prefill,
    )


def token_to_proto(token: GeneratedToken) -> worker_pb2.SampledToken:
    """Return the token that a step drew."""
    message = worker_pb2.SampledToken(token_id=token.token_id)
    if token.logprobs is not None:
        message.logprobs.logprob = token.logprobs.logprob
        for token_id, logprob in token.logprobs.top:
            message.logprobs.top.add(token_id=token_id, logprob=logprob)
    return message


def finish_reason(status: SequenceStatus) -> inference_pb2.FinishReason:
    """Return the public reason of an end; unspecified if the sequence goes on."""
    return _FINISH_REASONS.get(status, inference_pb2.FINISH_REASON_UNSPECIFIED)
