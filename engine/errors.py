"""The errors of requests: some refuse a request when it arrives, others end it in a step.

In both cases the engine continues with the other requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class RequestTooLongError(ValueError):
    """The request can never fit into this worker; the message names the limit."""


class KvBudgetError(ValueError):
    """The worker cannot keep the request's KV budget; the message says why."""


class RequestFailedError(RuntimeError):
    """One request cannot continue, because of its parameters or of the model's output.

    The message says why.
    """


class NoTokenLeftError(RequestFailedError):
    """The rules of a request forbid every token.

    Attributes:
        field: the rule that forbids all remaining tokens: ``format``, ``allowed_token_ids``, ``bad_words`` or
            ``min_tokens``.
        problem: the rest of the message, after the field's name.
    """

    def __init__(self, field: str, num_output_tokens: int) -> None:
        self.field = field
        self._num_output_tokens = num_output_tokens
        others = "" if field == "format" else " that the other constraints allow"
        self.problem = f"leaves no token{others} after {num_output_tokens} tokens of the answer"
        super().__init__(f"{field} {self.problem}")

    def __reduce__(self) -> tuple[type[NoTokenLeftError], tuple[str, int]]:
        """Let another process make the same error, which ``BaseException`` would give only the message."""
        return type(self), (self.field, self._num_output_tokens)


def request_error(error: Exception) -> RequestFailedError:
    """Convert an exception to the error of the request that it ends."""
    if isinstance(error, RequestFailedError):
        return error
    return RequestFailedError(f"{type(error).__name__}: {error}")


@contextmanager
def failing_request(attempt_id: str) -> Iterator[None]:
    """Convert any exception in the block to a RequestFailedError; log it unless it already is one."""
    try:
        yield
    except RequestFailedError:
        raise
    except Exception as error:
        logger.exception("attempt %s has failed", attempt_id)
        raise request_error(error) from error


class RequestFailures:
    """The first error of each request that fails in a step.

    Attributes:
        errors: the errors by request id.
    """

    def __init__(self) -> None:
        self.errors: dict[str, RequestFailedError] = {}

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self.errors

    @contextmanager
    def catch(self, attempt_id: str) -> Iterator[None]:
        """Catch any exception in the block, and record it as the failure of this request only."""
        try:
            with failing_request(attempt_id):
                yield
        except RequestFailedError as error:
            self.errors.setdefault(attempt_id, error)
