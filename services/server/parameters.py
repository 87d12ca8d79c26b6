"""Refuses parameters that are out of range, with a status that names the field and the limit."""

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


def check_at_most(limit: int, number: int, field: str, unit: str = "") -> None:
    """Refuse a field that has more than ``limit`` items, or that holds more than ``limit`` of a unit.

    Raises:
        InvalidArgument: names the field, the limit and the number.
    """
    if number > limit:
        most = f"hold at most {limit} {unit}" if unit else f"be at most {limit}"
        raise InvalidArgument(field, f"must {most}; got {number}", metadata={"limit": str(limit)})


def check_from_one(limit: int, number: int, field: str, unit: str = "") -> None:
    """Refuse a field that is empty, or that holds more than ``limit`` items, or that many of a unit.

    Raises:
        InvalidArgument: names the field, the limit and the number.
    """
    if not 1 <= number <= limit:
        problem = f"must hold from 1 to {f'{limit} {unit}'.rstrip()}; got {number}"
        raise InvalidArgument(field, problem, metadata={"limit": str(limit)})
