"""Collects an answer, whole or from a stream, and compares it with the right one."""

from __future__ import annotations

from collections.abc import Sequence

from quire.protos import inference_pb2 as pb


def add_message(answer: pb.GenerateResponse, message: pb.GenerateStreamResponse) -> None:
    """Add one message of a stream to the answer that has come so far."""
    choices = {choice.index: choice for choice in answer.choices}
    choice = choices.get(message.index)
    if choice is None:
        choice = answer.choices.add(index=message.index)
    choice.text += message.text
    choice.token_ids.extend(message.token_ids)
    choice.logprobs.extend(message.logprobs)
    if message.finish_reason:
        choice.finish_reason = message.finish_reason
    if message.HasField("score"):
        choice.score = message.score
    answer.prompt_logprobs.extend(message.prompt_logprobs)


def difference(answer: pb.GenerateResponse, right: pb.GenerateResponse) -> str | None:
    """Return how an answer differs from the right one; None if it does not.

    Tokens, texts, reasons, logprobs and scores must be equal to the last bit; counts and ids may differ.
    """
    ours = {choice.index: choice for choice in answer.choices}
    theirs = {choice.index: choice for choice in right.choices}
    if ours.keys() != theirs.keys():
        return f"answers {sorted(ours)} instead of {sorted(theirs)}"
    for index, expected in theirs.items():
        problem = _choice_difference(ours[index], expected)
        if problem is not None:
            return f"answer {index}: {problem}"
    if list(answer.prompt_logprobs) != list(right.prompt_logprobs):
        return "other logprobs of the prompt"
    return None


def _choice_difference(choice: pb.Choice, right: pb.Choice) -> str | None:
    for what, ours, theirs in (
        ("tokens", choice.token_ids, right.token_ids),
        ("logprobs", choice.logprobs, right.logprobs),
    ):
        if list(ours) != list(theirs):
            at = _first_difference(ours, theirs)
            return f"{len(ours)} {what} that differ from the right {len(theirs)} from number {at} on"
    for name in ("text", "finish_reason", "score"):
        if getattr(choice, name) != getattr(right, name):
            return f"{name} is {getattr(choice, name)!r} instead of {getattr(right, name)!r}"
    return None


def _first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
