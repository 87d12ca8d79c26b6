"""The errors that end one request while the engine goes on."""

from __future__ import annotations


class RequestFailedError(RuntimeError):
    """One request cannot go on, because of what it asks for or what the model computed.

    The message says why.
    """


class NoTokenLeftError(RequestFailedError):
    """The rules of a request forbid every token.

    Attributes:
        field: the rule that forbids every token that the other rules allow: ``format``,
            ``allowed_token_ids``, ``bad_words`` or ``min_tokens``.
        problem: the rest of the message, after the field's name.
    """

    def __init__(self, field: str, num_output_tokens: int) -> None:
        self.field = field
        others = "" if field == "format" else " that the other constraints allow"
        self.problem = f"leaves no token{others} after {num_output_tokens} tokens of the answer"
        super().__init__(f"{field} {self.problem}")


def request_error(error: Exception) -> RequestFailedError:
    """Return an exception as the error of the request that it ends."""
    if isinstance(error, RequestFailedError):
        return error
    return RequestFailedError(f"{type(error).__name__}: {error}")
