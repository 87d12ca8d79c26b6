"""Between the wire's messages and the engine's types."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from quire.engine.logits_processing import LogitsRules
from quire.engine.output_format import OutputFormat
from quire.engine.request_errors import NoTokenLeftError, request_error
from quire.engine.sampling_params import BeamParams, SamplingParams
from quire.engine.sequence import GeneratedToken, Sequence, SequenceStatus, SequenceUpdate, TokenLogprobs
from quire.engine.structured_output import GrammarMatcher
from quire.protos import inference_pb2, worker_pb2
from quire.services.server.errors import NO_TOKEN_LEFT, InvalidArgument

logger = logging.getLogger(__name__)

# Where the fields of the engine's parameters are in a sequence of the wire; the others are in ``sampling``.
_PATHS = {
    **{name: f"stopping.{name}" for name in ("max_tokens", "min_tokens", "stop_token_ids")},
    "num_logprobs": "logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
    "format": "format",
}
_FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: inference_pb2.FINISH_REASON_STOP,
    SequenceStatus.FINISHED_LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
_EARLY_STOPPING: Mapping[int, bool | str] = {
    inference_pb2.EARLY_STOPPING_UNSPECIFIED: False,
    inference_pb2.EARLY_STOPPING_UNLIKELY: False,
    inference_pb2.EARLY_STOPPING_IMPOSSIBLE: "never",
    inference_pb2.EARLY_STOPPING_ENOUGH: True,
}


def attempt_id(sequence_id: str, attempt: int) -> str:
    """Name an attempt: an old one may still be ending when the next begins."""
    return f"{sequence_id}#{attempt}"


def sequence_from_proto(
    message: worker_pb2.Sequence,
    root_hash: bytes,
    vocab_size: int,
    grammar: GrammarMatcher | None = None,
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
    sampling, stopping = message.sampling, message.stopping
    _check_token_ids(sampling, stopping, vocab_size)
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
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
            num_prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=repetition,
            logit_bias=tuple(sampling.logit_bias.items()),
            allowed_token_ids=frozenset(sampling.allowed_token_ids),
            bad_words=tuple(tuple(word.ids) for word in sampling.bad_word_token_ids),
            kv_budget_tokens=sampling.kv_budget_tokens if sampling.HasField("kv_budget_tokens") else None,
            n=sampling.n if sampling.HasField("n") else 1,
            beam=_beam_from_proto(sampling.beam) if sampling.HasField("beam") else None,
        )
    except ValueError as error:
        name, problem = str(error).split(" ", 1)
        raise InvalidArgument(_path(name), problem) from error
    num_prompt_tokens = len(token_ids) - message.num_output_tokens
    return Sequence(
        attempt_id=attempt_id(message.sequence_id, message.attempt),
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        logits_rules=LogitsRules(params, num_prompt_tokens, grammar) if grammar else None,
        params=params,
        root_hash=root_hash,
        stops_after_prefill=stops_after_prefill,
    )


def no_token_left(error: NoTokenLeftError) -> InvalidArgument:
    """Return the error of a request whose constraints forbid every token."""
    return InvalidArgument(_path(error.field), error.problem, reason=NO_TOKEN_LEFT)


def _path(name: str) -> str:
    return _PATHS.get(name, f"sampling.{name}")


@contextmanager
def converting() -> Iterator[None]:
    """Let what goes wrong with the conversion of a request's results end this request."""
    try:
        yield
    except Exception as error:
        logger.exception("the results of a request cannot be sent")
        raise request_error(error) from error


def format_from_proto(message: inference_pb2.ResponseFormat) -> OutputFormat | None:
    """Read a format; None if there is none."""
    kind = message.WhichOneof("format")
    return None if kind is None else OutputFormat(kind, getattr(message, kind))


def without_last_token(prompt: Sequence) -> Sequence:
    """Return what a prefill worker computes for several sequences: all draw from the prompt's last token.

    Raises:
        InvalidArgument: nothing is left.
    """
    token_ids = prompt.token_ids[:-1]
    if not token_ids:
        raise InvalidArgument("token_ids", "must hold at least two, if several sequences are to be drawn")
    params = replace(prompt.params, n=1, beam=None, num_prompt_logprobs=None)
    return replace(
        prompt,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        params=params,
        samples_tokens=False,
        logits_rules=None,
    )


def outputs_to_proto(updates: Iterable[SequenceUpdate]) -> list[worker_pb2.SequenceOutput]:
    """Return what steps did for a request, in one message for each sequence."""
    outputs: dict[int, worker_pb2.SequenceOutput] = {}
    for update in updates:
        index = update.sequence.index
        output = outputs.setdefault(index, worker_pb2.SequenceOutput(index=index))
        output.tokens.extend(map(token_to_proto, update.tokens))
        output.num_accepted_draft_tokens += update.num_accepted_tokens
        output.finish_reason = finish_reason(update.status)
        if update.score is not None:
            output.score = update.score
    return [output for output in outputs.values() if output.tokens or output.finish_reason]


def token_to_proto(token: GeneratedToken) -> worker_pb2.SampledToken:
    """Return the token that a step drew."""
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


def _beam_from_proto(message: inference_pb2.BeamParams) -> BeamParams:
    length_penalty = message.length_penalty if message.HasField("length_penalty") else 1.0
    if message.early_stopping not in _EARLY_STOPPING:
        raise InvalidArgument("sampling.beam.early_stopping", f"there is no value {message.early_stopping}")
    return BeamParams(message.width, length_penalty, _EARLY_STOPPING[message.early_stopping])


def _check_token_ids(
    sampling: inference_pb2.SamplingParams, stopping: inference_pb2.StoppingParams, vocab_size: int
) -> None:
    """Refuse ids that have no logit."""
    bad_words = (token_id for word in sampling.bad_word_token_ids for token_id in word.ids)
    ids: dict[str, Iterable[int]] = {
        "sampling.logit_bias": sampling.logit_bias,
        "sampling.allowed_token_ids": sampling.allowed_token_ids,
        "sampling.bad_word_token_ids": bad_words,
        "stopping.stop_token_ids": stopping.stop_token_ids,
    }
    for name, token_ids in ids.items():
        largest = max(token_ids, default=0)
        if largest >= vocab_size:
            raise InvalidArgument(name, f"{largest} is not below the vocabulary's {vocab_size}")


def finish_reason(status: SequenceStatus) -> inference_pb2.FinishReason:
    """Return the public reason of an end; unspecified if the sequence goes on."""
    return _FINISH_REASONS.get(status, inference_pb2.FINISH_REASON_UNSPECIFIED)
