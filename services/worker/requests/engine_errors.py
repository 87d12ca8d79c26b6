"""Turns the errors of the engine and of transfers into statuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.engine.engine_thread import EngineFailedError, EngineStoppedError
from quire.engine.errors import (
    KvBudgetError,
    NoTokenLeftError,
    RequestFailedError,
    RequestTooLongError,
)
from quire.engine.sequences.sequence import Sequence
from quire.engine.structured_output.grammar import FormatFailedError
from quire.kvtransfer.errors import PushFailedError
from quire.rpc.errors import (
    ENGINE_FAILED,
    REQUEST_FAILED,
    Aborted,
    Internal,
    InvalidArgument,
    Unavailable,
)
from quire.services.worker.requests.convert import no_token_left


@contextmanager
def known_errors(sequence: Sequence) -> Iterator[None]:
    """Turn the engine's and the transfer's errors into statuses.

    Raises:
        ServiceError: an error of a kind that is known; others pass unchanged.
    """
    try:
        yield
    except KvBudgetError as error:
        raise InvalidArgument("sampling.kv_budget_tokens", str(error)) from error
    except RequestTooLongError as error:
        raise InvalidArgument(_field_of_size(sequence), str(error)) from error
    except NoTokenLeftError as error:
        raise no_token_left(error) from error
    except FormatFailedError as error:
        raise InvalidArgument(error.field, error.problem, reason="FORMAT_FAILED") from error
    except RequestFailedError as error:
        raise Internal(str(error), reason=REQUEST_FAILED) from error
    except EngineFailedError as error:
        raise Unavailable(str(error), reason=ENGINE_FAILED) from error
    except EngineStoppedError as error:
        raise Unavailable(str(error), reason="ENGINE_STOPPED") from error
    except PushFailedError as error:
        raise Aborted(f"the push failed: {error}", reason="KV_TRANSFER_FAILED") from error


def _field_of_size(sequence: Sequence) -> str:
    """Return which field makes a request too large: several sequences, or a long prompt."""
    if sequence.params.num_sequences == 1:
        return "token_ids"
    return "sampling.beam.width" if sequence.params.beam else "sampling.n"
