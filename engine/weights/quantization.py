"""Reads how a checkpoint is quantized, or says why quire cannot read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.engine.model.check import UnsupportedModelError

READ = "GPTQ, AWQ, FP8, compressed-tensors and MXFP4"
_BITS = (2, 4, 8)
_FORMATS = {
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
}
_NVFP4 = "NVFP4 is not read"


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized, as far as the shapes and types of its tensors do not tell."""

    method: str
    """``quant_method`` of the configuration."""
    bits: int = 0
    """Bits of a weight in GPTQ and AWQ."""
    group_size: int = -1
    """Inputs that share a scale in GPTQ and AWQ; -1 means all."""
    is_ordered: bool = False
    """Whether GPTQ must name the group of each input."""
    is_symmetric: bool = False
    """Whether each zero point of GPTQ is the middle of the range."""
    stores_zeros_less_1: bool = False
    """Whether GPTQ stores zero points minus 1, as in its version 1."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, where scales are for blocks."""
    rounds_inputs: bool = False
    """Whether the inputs of layers are rounded to 8 bits, with a scale for each token."""

    def __str__(self) -> str:
        return f"{self.method} with {self.bits} bits" if self.bits else self.method


def read_quantization(configuration: dict[str, Any]) -> Quantization | None:
    """Return how the checkpoint of a ``config.json`` is quantized; None if it is not.

    Raises:
        UnsupportedModelError: quire does not read this quantization; the message names the setting.
    """
    text = configuration.get("text_config")
    for each in (configuration, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if found := each.get(key):
                try:
                    return _read(found)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise UnsupportedModelError(f"{key} of config.json cannot be read: {error!r}") from error
    return None


def _read(found: dict[str, Any]) -> Quantization:
    method = str(found.get("quant_method", "")).lower()
    if method == "gptq":
        return _read_gptq(found)
    if method == "awq":
        _require(found, "version", found.get("version") or found.get("format", "gemm"), ("gemm",))
        _require(found, "backend", found.get("backend", "autoawq"), ("autoawq",))
        return Quantization(
            method, bits=_require(found, "bits", found["bits"], (4,)), group_size=_group_size(found)
        )
    if method in ("fp8", "fbgemm_fp8"):
        _require(found, "activation_scheme", found.get("activation_scheme", "dynamic"), ("dynamic",))
        return Quantization(method, block=_block(found.get("weight_block_size")))
    if method == "compressed-tensors":
        return _read_compressed_tensors(found)
    if method == "mxfp4":
        return Quantization(method)
    if "NVFP4" in str(found.get("quant_algo", "")).upper():
        raise UnsupportedModelError(f"{_NVFP4}: quire reads {READ}")
    if not method and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        method = "bitsandbytes"
    raise UnsupportedModelError(
        f"quantization with {method or 'no quant_method'} is not read: quire reads {READ}"
    )


def _read_gptq(found: dict[str, Any]) -> Quantization:
    version = found.get("checkpoint_format") or found.get("format") or "gptq"
    _require(found, "checkpoint_format", version, ("gptq", "gptq_v2"))
    _require(found, "pack_dtype", found.get("pack_dtype", "int32"), ("int32",))
    if changed := [module for module in found.get("dynamic") or {} if not module.startswith("-:")]:
        raise UnsupportedModelError(f"dynamic of gptq is not read: other settings for {changed[0]!r}")
    return Quantization(
        "gptq",
        bits=_require(found, "bits", found["bits"], _BITS),
        group_size=_group_size(found),
        is_ordered=bool(found.get("desc_act")),
        is_symmetric=bool(found.get("sym")),
        stores_zeros_less_1=version == "gptq",
    )


def _read_compressed_tensors(found: dict[str, Any]) -> Quantization:
    sparsity = (found.get("sparsity_config") or {}).get("format", "dense")
    _require(found, "sparsity_config", sparsity, ("dense",))
    for name in ("kv_cache_scheme", "transform_config"):
        if found.get(name):
            raise UnsupportedModelError(f"{name} of compressed-tensors is not read")
    blocks = set()
    groups = list(found["config_groups"].values())
    for group in (found, *groups):
        name = group.get("format") or "dense"
        if "nvfp4" in name:
            raise UnsupportedModelError(f"{_NVFP4}: quire reads {READ}")
        _require(found, "format", name, _FORMATS)
    for group in groups:
        if weights := group.get("weights"):
            allowed = (8,) if weights.get("type", "int") == "float" else _BITS
            _require(found, "num_bits", weights.get("num_bits", 8), allowed)
            blocks.add(_block(weights.get("block_structure")))
        if group.get("output_activations"):
            raise UnsupportedModelError("output_activations of compressed-tensors are not read")
        # Scales of each token's activations only round them. Those of the file would also clip them.
        inputs = group.get("input_activations")
        _require(found, "input_activations.dynamic", not inputs or inputs.get("dynamic"), (True,))
    rounds = [_rounds_inputs(group.get("input_activations")) for group in groups if group.get("weights")]
    blocks.discard(None)
    if len(blocks) > 1:
        raise UnsupportedModelError(
            f"block_structure of compressed-tensors has several values: {sorted(map(str, blocks))}"
        )
    block = next(iter(blocks), None)
    return Quantization("compressed-tensors", block=block, rounds_inputs=bool(rounds) and all(rounds))


def _rounds_inputs(scheme: dict[str, Any] | None) -> bool:
    """Return whether inputs are rounded to integers of 8 bits, with a scale for each token."""
    if not scheme or scheme.get("strategy") != "token" or not scheme.get("symmetric", True):
        return False
    return (scheme.get("num_bits", 8), scheme.get("type", "int")) == (8, "int")


def _require(found: dict[str, Any], name: str, value: Any, allowed: Any) -> Any:
    if value not in allowed:
        choices = " or ".join(str(each) for each in sorted(allowed))
        raise UnsupportedModelError(
            f"{name} {value} of {found['quant_method']} is not read: quire reads only {choices}"
        )
    return value


def _group_size(found: dict[str, Any]) -> int:
    size = int(found["group_size"])
    if size < 1 and size != -1:
        raise ValueError(f"group_size is {size}")
    return size


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    rows, columns = value.split("x") if isinstance(value, str) else value
    if min(int(rows), int(columns)) < 1:
        raise ValueError(f"a block has {value} weights")
    return int(rows), int(columns)
