"""Which device a model gets."""

from __future__ import annotations

import pytest
import torch

from quire.engine.device import choose_device


@pytest.mark.parametrize(
    ("name", "has_gpu", "kind"),
    [
        ("auto", False, "cpu"),
        ("auto", True, "cuda"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_auto_is_a_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, name: str, has_gpu: bool, kind: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert choose_device(name).type == kind


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"needs a GPU .* choose 'cpu' or 'auto'"):
        choose_device("cuda")
    with pytest.raises(ValueError, match="device must be one of auto, cpu, cuda; got 'tpu'"):
        choose_device("tpu")
