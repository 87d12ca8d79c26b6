"""What a model's ``generation_config.json`` says about sampling, and values that it must not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.models.file_checks import ModelFileError
from quire.models.source import demo_model_path
from quire.sampling.model_defaults import sampling_defaults


def written(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_the_recommended_parameters_are_read(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    values = {"temperature": 1, "top_p": 0.8, "min_p": 0.0, "repetition_penalty": 1.05, "top_k": 20}
    others = {"max_new_tokens": 512, "do_sample": False, "eos_token_id": [1, 2], "typical_p": None}
    assert sampling_defaults(written(tmp_path, **values, **others)) == {**values, "max_tokens": 512}
    assert sampling_defaults(written(tmp_path, top_k=-1, top_p=None)) == {"top_k": 0}


def test_the_demo_model_recommends_nothing() -> None:
    assert sampling_defaults(demo_model_path()) == {}


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temperature", -1, "must be from 0 to 1000000; got -1"),
        ("temperature", "hot", "must be a number below 2147483648; got 'hot'"),
        ("temperature", True, "must be a number"),
        ("temperature", float("nan"), "must be from 0 to 1000000; got nan"),
        ("top_p", 0, "must be above 0 and at most 1"),
        ("top_k", 2.5, "must be an integer"),
        ("top_k", -2, "must be at least 0; got -2"),
        ("top_k", 1 << 31, "must be an integer below 2147483648"),
        ("min_p", 2, "must be from 0 to 1"),
        ("repetition_penalty", 0, "must be from 0.01 to 100"),
        ("max_new_tokens", 0, "must be at least 1; got 0"),
    ],
)
def test_a_bad_value_is_one_sentence(tmp_path: Path, name: str, value: Any, problem: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        sampling_defaults(written(tmp_path, **{name: value}))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'generation_config.json'}: {name} {problem}")
    assert message.endswith(": correct it, or start the router with --generation-config none")
