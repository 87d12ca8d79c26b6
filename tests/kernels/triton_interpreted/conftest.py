"""The interpreter takes the bits of bfloat16 for integers in matrix products: widen them first."""

from __future__ import annotations

from typing import Any

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder


@pytest.fixture(autouse=True, scope="session")
def bfloat16_products() -> Any:
    create_dot = InterpreterBuilder.create_dot

    def create_dot_of_floats(
        builder: InterpreterBuilder, a: Any, b: Any, *arguments: Any
    ) -> Any:
        a, b = (
            builder.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b)
        )
        return create_dot(builder, a, b, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot_of_floats)
        yield
