"""The settings of ``LLM``, and how a constructor takes them as keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, Literal, ParamSpec, TypeVar

from quire.engine.config import EngineConfig

S = TypeVar("S")
P = ParamSpec("P")
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class LLMConfig(EngineConfig):
    """Settings of ``LLM``: those of ``EngineConfig`` and the device.

    Attributes:
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        lora: the folder or hub id of each adapter, by the name with which prompts choose it.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    lora: Mapping[str, str] | None = None


def takes_fields_of(
    config: Callable[P, C],
) -> Callable[[Callable[[S, C], None]], Callable[Concatenate[S, P], None]]:
    """Return a decorator of a constructor that has one parameter, a configuration.

    The decorated constructor takes the configuration's fields instead, with their types and defaults.
    """

    def decorate(init: Callable[[S, C], None]) -> Callable[Concatenate[S, P], None]:
        @wraps(init)
        def take_fields(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, config(*args, **kwargs))

        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(config)
        parameters = [itself, *signature.parameters.values()]
        vars(take_fields)["__signature__"] = signature.replace(parameters=parameters, return_annotation=None)
        return take_fields

    return decorate
