"""A row of a linear layer has the same bits whatever the number of rows and of threads."""

from __future__ import annotations

import pytest
import torch

from quire.engine.model.packed_linear import pack_linear_layers


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 320), (256, 768), (3072, 768)])
def test_rows_do_not_depend_on_others_or_on_threads(num_in: int, num_out: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Sequential(torch.nn.Linear(num_in, num_out, bias=False, dtype=dtype))
    linear[0].weight = torch.nn.Parameter(torch.randn((num_out, num_in), generator=generator).to(dtype))
    pack_linear_layers(linear)
    inputs = torch.randn((130, num_in), generator=generator).to(dtype)
    expected = linear(inputs)
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        for num_rows in (1, 2, 3, 17, 64, 130):
            assert torch.equal(linear(inputs[:num_rows]), expected[:num_rows]), (num_threads, num_rows)
