"""Collects an answer, whole or from a stream, and compares it with the right one."""

from __future__ import annotations

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
    ours, theirs = list(choice.token_ids), list(right.token_ids)
    if ours != theirs:
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        where = "the end" if at is None else f"token {at}, {ours[at]} instead of {theirs[at]}"
        return f"{len(ours)} tokens that differ from the right {len(theirs)} at {where}"
    for name in ("text", "finish_reason", "score"):
        if getattr(choice, name) != getattr(right, name):
            return f"{name} is {getattr(choice, name)!r} instead of {getattr(right, name)!r}"
    if list(choice.logprobs) != list(right.logprobs):
        at = next(
            (
                i
                for i, pair in enumerate(zip(choice.logprobs, right.logprobs, strict=False))
                if pair[0] != pair[1]
            ),
            "the end",
        )
        return f"{len(choice.logprobs)} logprobs that differ from the right {len(right.logprobs)} at {at}"
    return None
