"""Prints a digest of what requests get: as this processor computes it, or as an older one would.

Run as ``python -m tests.engine.other_processor [--old] FOLDER:DTYPE:WEIGHTS...``, with one model in each
folder. With ``--old`` and ``ENVIRONMENT`` vectors have 4 instead of 8 or 16 floats, and torch's have none at
all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

OLD = "--old"
ENVIRONMENT = {
    "NUMBA_CPU_NAME": "x86-64",
    "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+fma,+f16c,+popcnt,+prefer-128-bit",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "num_logprobs": 3, "num_prompt_logprobs": 2},
    "typical": {"temperature": 1.2, "seed": 4, "typical_p": 0.7, "num_logprobs": 0},
    "filtered": {"temperature": 0.9, "seed": 5, "top_p": 0.9, "top_k": 80, "min_p": 0.001},
}


def results(folder: Path, dtype: str, weight_dtype: str = "auto") -> dict[str, Any]:
    """Return the requests' tokens and logprobs, a digest of KV blocks and logits, and the arithmetic."""
    # Imported here, since kernels choose their tiles by the processor when they are imported.
    import xxhash
    from torch import Tensor, device

    from quire.engine.model.step_tensors import StepTensors
    from quire.engine.weights.loader import load_model
    from tests.testing.tiny_engine import make_engine, make_prompt, make_request, updates_of

    model = load_model(str(folder), dtype, device("cpu"), weight_dtype)
    engine = make_engine(model, num_blocks=32)
    logits = xxhash.xxh3_64()
    forward = engine.runner.forward

    def observed(step: StepTensors) -> Tensor:
        found = forward(step)
        logits.update(found.float().contiguous().numpy().tobytes())
        return found

    engine.runner.forward = observed  # type: ignore[method-assign]
    requests = [make_request(name, make_prompt(70), max_tokens=20, **each) for name, each in REQUESTS.items()]
    tokens: dict[str, list[Any]] = {name: [] for name in REQUESTS}
    for update in updates_of(engine, *requests):
        tokens[update.sequence.attempt_id] += [(each.token_id, _hex(each.logprobs)) for each in update.tokens]
    return {
        "tokens": tokens,
        "prompt": [_hex(each) for each in requests[0].prompt_logprobs],
        "kv": xxhash.xxh3_64_hexdigest(engine.memory.blocks.float().numpy().tobytes()),
        "logits": logits.hexdigest(),
        "digest": model.digest,
        "arithmetic": model.arithmetic,
    }


def functions() -> dict[str, str]:
    """Return digests of functions over many values, of which models as small as these tests' see few."""
    import numpy as np
    import torch
    import xxhash
    from transformers import Gemma2Config

    from quire.engine.model.layers.row_layers import KernelFunctions
    from quire.engine.model.program.recipe_reader import _finish
    from quire.engine.sequences.sampler import rank_tokens

    integers = np.random.Generator(np.random.PCG64(0)).integers(-(1 << 20), 1 << 20, (16, 5000))
    logits = torch.from_numpy(integers / 2.0**16).float()
    finish = _finish(Gemma2Config(final_logit_softcapping=10.0))
    assert finish is not None
    exponents = torch.cat([torch.arange(0, size, 2).float() / size for size in (16, 64, 80, 96, 128, 256)])
    with KernelFunctions():
        frequencies = torch.cat([1.0 / (base**exponents) for base in (10000.0, 150000, 500000.0, 1e7)])
        angles = frequencies * torch.arange(1, 100_000, 997)[:, None]
        found = {
            "frequencies": frequencies,
            "cosines": angles.cos(),
            "sines": torch.sin(angles),
            "soft cap": finish(logits),
            "tanh": torch.tanh(logits / 8),
        }
    digests = {name: xxhash.xxh3_64_hexdigest(each.numpy().tobytes()) for name, each in found.items()}
    logprobs = rank_tokens(logits, list(range(16)), 20)
    return digests | {
        "logprobs": xxhash.xxh3_64_hexdigest(json.dumps([_hex(each) for each in logprobs]).encode())
    }


def _hex(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [logprobs.logprob.hex(), *((token, value.hex()) for token, value in logprobs.top)]


def _forget_new_instructions() -> None:
    from llvmlite import binding

    find = binding.get_host_cpu_features

    def found() -> Any:
        features = find()
        for name in features:
            features[name] = features[name] and name in {"sse4.2", "avx", "fma", "f16c", "popcnt"}
        return features

    binding.get_host_cpu_features = found


if __name__ == "__main__":
    if OLD in sys.argv:
        _forget_new_instructions()
    cases = [each.rsplit(":", 2) for each in sys.argv[1:] if each != OLD]
    print(json.dumps([functions(), *(results(Path(folder), *types) for folder, *types in cases)]))
