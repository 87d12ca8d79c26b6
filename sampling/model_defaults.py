"""Reads the sampling parameters that a model's authors recommend, from its ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from quire.models.file_checks import ModelFileError, read_object
from quire.models.source import GENERATION_CONFIG
from quire.sampling.parameter import ParameterError, table
from quire.sampling.params import SamplingParams

GenerationConfig = Literal["auto", "none"]
"""Whether requests get the model's own defaults."""

_NAMES = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Names of ``SamplingParams`` by those in the file; as in vLLM, ``do_sample`` and others have no effect."""


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the parameters that apply where a request sets none, by their names in ``SamplingParams``.

    Raises:
        ModelFileError: the file is damaged, or a value can never be served.
    """
    path, defaults = folder / GENERATION_CONFIG, {}
    for key, value in (read_object(path) if path.exists() else {}).items():
        if key not in _NAMES or value is None:
            continue
        _, kind, _, parameter = table(SamplingParams)[_NAMES[key]]
        # Some files turn top_k off with -1.
        number = 0 if (key, value) == ("top_k", -1) else value
        try:
            if isinstance(number, bool) or not isinstance(number, int | kind) or number >= 1 << 31:
                name = "an integer" if kind is int else "a number"
                raise ParameterError(key, f"must be {name} below 2147483648; got {value!r}")
            parameter.check(number)
        except ParameterError as error:
            remedy = "correct it, or start the router with --generation-config none"
            raise ModelFileError(f"{path}: {key} {error.problem}: {remedy}") from error
        defaults[_NAMES[key]] = number
    return defaults
