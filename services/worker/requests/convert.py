"""Converts between messages and the engine's types."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from quire.engine.errors import NoTokenLeftError, request_error
from quire.engine.sequences.sequence import (
    GeneratedToken,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
    TokenLogprobs,
)
from quire.engine.structured_output.grammar import GrammarMatcher
from quire.engine.structured_output.logits_rules import LogitsRules
from quire.engine.weights.adapters import Adapter
from quire.protos import inference_pb2, worker_pb2
from quire.rpc.errors import NO_TOKEN_LEFT, InvalidArgument
from quire.sampling.constraints import check_vocabulary
from quire.sampling.messages import from_proto
from quire.sampling.parameter import table
from quire.sampling.params import SamplingParams
from quire.services.server.parameters import parameters_checked

logger = logging.getLogger(__name__)

_FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: inference_pb2.FINISH_REASON_STOP,
    SequenceStatus.FINISHED_LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def attempt_id(sequence_id: str, attempt: int) -> str:
    """Return the name of an attempt, since an old attempt may still be ending when the next one begins."""
    return f"{sequence_id}#{attempt}"


def sequence_from_proto(
    message: worker_pb2.Sequence,
    root_hash: bytes,
    vocab_size: int,
    grammar: GrammarMatcher | None = None,
    adapter: Adapter | None = None,
    *,
    stops_after_prefill: bool,
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
    with parameters_checked():
        params = from_proto(message)
        check_vocabulary(params, vocab_size)
    num_prompt_tokens = len(token_ids) - message.num_output_tokens
    return Sequence(
        attempt_id=attempt_id(message.sequence_id, message.attempt),
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        logits_rules=LogitsRules(params, num_prompt_tokens, grammar) if grammar else None,
        params=params,
        root_hash=root_hash,
        client=message.cache_scope.tenant,
        weight=message.weight or 1,
        num_waiting_tokens=message.waiting_tokens,
        adapter=adapter,
        stops_after_prefill=stops_after_prefill,
    )


def no_token_left(error: NoTokenLeftError) -> InvalidArgument:
    """Return the error of a request whose constraints forbid every token."""
    # Clients send most bad words as texts.
    paths = {"bad_words": "sampling.bad_words", "format": "format"}
    path = paths.get(error.field) or table(SamplingParams)[error.field].parameter.path
    return InvalidArgument(path, error.problem, reason=NO_TOKEN_LEFT)


@contextmanager
def converting() -> Iterator[None]:
    """Convert any error in the block to one that ends only the request whose results are converted."""
    try:
        yield
    except Exception as error:
        logger.exception("the results of a request cannot be sent")
        raise request_error(error) from error


def without_last_token(prompt: Sequence) -> Sequence:
    """Return the prompt that a prefill worker computes for several sequences, without its last token.

    Raises:
        InvalidArgument: nothing is left.
    """
    token_ids = prompt.token_ids[:-1]
    if not token_ids:
        raise InvalidArgument("token_ids", "must hold at least two if several sequences are sampled")
    params = replace(prompt.params, n=1, beam=None, num_prompt_logprobs=None)
    return replace(
        prompt,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        params=params,
        samples_tokens=False,
        logits_rules=None,
        # Without the last token, there may be one full block less.
        block_hashes=[],
    )


def outputs_to_proto(updates: Iterable[SequenceUpdate]) -> list[worker_pb2.SequenceOutput]:
    """Return a request's updates, as one message for each sequence."""
    outputs: dict[int, worker_pb2.SequenceOutput] = {}
    for update in updates:
        index = update.sequence.index
        output = outputs.setdefault(index, worker_pb2.SequenceOutput(index=index))
        output.tokens.extend(map(token_to_proto, update.tokens))
        output.num_accepted_draft_tokens += update.num_accepted_tokens
        output.finish_reason = finish_reason(update.status)
        if update.sequence.params.beam is not None:
            output.num_generated_tokens = update.sequence.tally.num_generated_tokens
        if update.score is not None:
            output.score = update.score
    return [output for output in outputs.values() if output.tokens or output.finish_reason]


def token_to_proto(token: GeneratedToken) -> worker_pb2.SampledToken:
    """Return the message of a token that a step sampled."""
    message = worker_pb2.SampledToken(token_id=token.token_id)
    if token.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_to_proto(token.logprobs))
    return message


def logprobs_to_proto(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    """Return the logprobs at one position."""
    message = inference_pb2.TokenLogprobs(logprob=logprobs.logprob)
    for token_id, logprob in logprobs.top:
        message.top.add(token_id=token_id, logprob=logprob)
    return message


def finish_reason(status: SequenceStatus) -> inference_pb2.FinishReason:
    """Return the public reason why a sequence ended; unspecified if it has not ended."""
    return _FINISH_REASONS.get(status, inference_pb2.FINISH_REASON_UNSPECIFIED)
