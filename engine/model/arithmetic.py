"""Names the arithmetic of a worker: which sums it makes, in which order, and by whose operators.

Workers whose names are equal compute the same bits. Only they share blocks and continue each other's answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import transformers

from quire.kernels.cpu.intrinsics import processor_features
from quire.kernels.cpu.products.amx_product import AMX_BFLOAT16, FEATURES, FLOAT32


class Sums(NamedTuple):
    """An order of sums of the kernels for the CPU.

    Attributes:
        name: ends with a number, which rises when the order changes.
        dtypes: types that a model may compute in; None means all.
        features: LLVM's names of the processor's features that the kernels need.
    """

    name: str
    dtypes: frozenset[torch.dtype] | None = None
    features: frozenset[str] = frozenset()


SUMS = (Sums(AMX_BFLOAT16, frozenset({torch.bfloat16}), FEATURES), Sums(FLOAT32))
"""From the fastest to those that every processor can make.

``tests/engine/test_arithmetic.py`` pins their bits.
"""
_TRITON = "triton-1"
"""The kernels for GPUs; the number rises when their bits change."""


def choose_sums(setting: str, dtype: torch.dtype, features: Mapping[str, bool] | None = None) -> Sums:
    """Return the fastest sums of a processor, or those of every processor.

    Args:
        setting: "portable" for those of every processor.
        dtype: the type that the model computes in.
        features: the processor's; None means those of the present one.
    """
    if setting == "portable":
        return SUMS[-1]
    has = processor_features() if features is None else features
    return next(
        each
        for each in SUMS
        if (each.dtypes is None or dtype in each.dtypes) and all(has.get(name) for name in each.features)
    )


def arithmetic_name(sums: Sums, device: torch.device, is_compiled: bool) -> str:
    """Return the name of a worker's arithmetic.

    Where modules of transformers with operators of torch compute too, the name has the versions of both and
    for which processor torch's operators are: the bits depend on all three.

    Args:
        sums: the sums of the kernels if the device is the CPU.
        device: where the model runs.
        is_compiled: whether a step runs as one program; torch then makes no sums and no approximations.
    """
    versions = f"torch-{torch.__version__}/transformers-{transformers.__version__}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{_TRITON}/{versions}/sm_{major}{minor}"
    if is_compiled:
        return sums.name
    return f"{sums.name}/{versions}/{torch.backends.cpu.get_cpu_capability()}"
