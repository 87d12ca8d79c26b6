"""transformers, by ``generate``: a static batch, padded left, that runs until its longest answer ends."""

from __future__ import annotations

import torch
import transformers

from quire.benchmarks.peers.sides.protocol import Setup, Side, serve


def load(setup: Setup) -> Side:
    """Load the model with torch's scaled dot product attention."""
    if setup.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"it is not measured with {setup.dtype}")
    torch.set_num_threads(setup.threads)
    dtype = getattr(torch, setup.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        setup.model, dtype=dtype, attn_implementation="sdpa"
    )
    model.eval()

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        width, longest = max(map(len, prompts)), max(max_tokens)
        tokens = model.generate(
            torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
            do_sample=False,
            min_new_tokens=longest,
            max_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [row[:most] for row, most in zip(tokens[:, width:].tolist(), max_tokens, strict=True)]

    return Side(transformers.__version__, torch.backends.cpu.get_cpu_capability(), generate)


if __name__ == "__main__":
    serve(load)
