"""Turns the errors of parameters into statuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.rpc.errors import InvalidArgument
from quire.sampling.parameter import ParameterError


@contextmanager
def parameters_checked() -> Iterator[None]:
    """Turn the error of a parameter into a status.

    Raises:
        InvalidArgument: names the field, the limit and the value.
    """
    try:
        yield
    except ParameterError as error:
        metadata = None if error.limit is None else {"limit": error.limit}
        raise InvalidArgument(error.field, error.problem, metadata=metadata) from error
