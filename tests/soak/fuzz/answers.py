"""Checks whether an answer satisfies its request."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from quire.protos import inference_pb2 as pb


def answer_problem(generation: pb.Generation, response: pb.GenerateResponse) -> str | None:
    """Return what is wrong with an answer; None if nothing is."""
    sampling, stopping = generation.sampling, generation.stopping
    wanted = sampling.beam.width if sampling.HasField("beam") else sampling.n if sampling.HasField("n") else 1
    # A beam search has fewer answers than beams if its format allows no more.
    fewest = 1 if sampling.HasField("beam") else wanted
    if not fewest <= len(response.choices) <= wanted:
        return f"{len(response.choices)} answers instead of {wanted}"
    for choice in response.choices:
        problem = _choice_problem(generation, choice)
        if problem is not None:
            return problem
    if response.usage.completion_tokens < sum(len(choice.token_ids) for choice in response.choices):
        return "the usage counts fewer tokens than there are"
    if stopping.HasField("max_tokens") and any(
        len(choice.token_ids) > stopping.max_tokens for choice in response.choices
    ):
        return "more tokens than max_tokens"
    return None


def _choice_problem(generation: pb.Generation, choice: pb.Choice) -> str | None:
    sampling, stopping, response = generation.sampling, generation.stopping, generation.response
    ends = choice.finish_reason
    if ends not in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_TOOL_CALLS):
        return f"the finish reason is {ends}"
    if len(choice.token_ids) < stopping.min_tokens and ends == pb.FINISH_REASON_STOP:
        return "fewer tokens than min_tokens"
    if sampling.allowed_token_ids and not set(choice.token_ids) <= set(sampling.allowed_token_ids):
        return "a token that is not allowed"
    for word in sampling.bad_word_token_ids:
        if _contains(choice.token_ids, list(word.ids)):
            return "a bad word"
    # Before min_tokens a stop string does not count.
    counts = not response.keep_stop_string and not stopping.min_tokens
    if counts and any(stop in _shown(choice) for stop in stopping.stop_strings):
        return "a stop string within the text"
    if response.parse and sum(piece.num_tokens for piece in choice.pieces) != len(choice.token_ids):
        return "pieces of more or fewer tokens than the answer has"
    if response.HasField("logprobs") and len(choice.logprobs) != len(choice.token_ids):
        return f"{len(choice.logprobs)} logprobs for {len(choice.token_ids)} tokens"
    if any(logprob.logprob != logprob.logprob or logprob.logprob > 1e-3 for logprob in choice.logprobs):
        return "a logprob that is none"
    return _format_problem(generation, choice)


def _shown(choice: pb.Choice) -> str:
    """Return the text, or the content of an answer that was divided, whose text is as the model wrote it."""
    return "".join(piece.content for piece in choice.pieces) if choice.pieces else choice.text


def _contains(token_ids: Sequence[int], word: list[int]) -> bool:
    return any(list(token_ids[at : at + len(word)]) == word for at in range(len(token_ids) - len(word) + 1))


def _format_problem(generation: pb.Generation, choice: pb.Choice) -> str | None:
    stopping = generation.stopping
    is_whole = choice.finish_reason == pb.FINISH_REASON_STOP and not (
        stopping.stop_strings or stopping.stop_token_ids or generation.response.keep_special_tokens
    )
    if not is_whole:
        return None
    match generation.format.WhichOneof("format"):
        case "json_schema":
            try:
                json.loads(_shown(choice))
            except ValueError:
                return f"no JSON: {choice.text!r}"
        case "regex":
            try:
                is_match = re.fullmatch(generation.format.regex, _shown(choice))
            except re.error:
                return None  # the notations of Python and of the server differ
            # Python and the server may know different versions of Unicode.
            if not is_match and choice.text.isascii():
                return f"no match of {generation.format.regex[:100]!r}: {choice.text!r}"
    return None
