"""Keeps replacements of torch's functions out of kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def without_replacements(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a function that runs outside the modes which replace torch's functions.

    A mode sees every access to a tensor, such as to its address, and makes it a microsecond slower.
    """

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run
