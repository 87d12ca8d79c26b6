"""vLLM by ``vllm.LLM``: compiled, with an engine process and a prefix cache, as it is by default."""

from __future__ import annotations

import torch
import vllm

from quire.benchmarks.peers.sides.compressed_checkpoint import checkpoint_for
from quire.benchmarks.peers.sides.protocol import Setup, Side, serve


def load(setup: Setup) -> Side:
    """Load the model; at first this compiles it, which takes minutes."""
    llm = vllm.LLM(
        str(checkpoint_for(setup)),
        dtype=setup.compute_dtype,
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.max_num_seqs,
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
            for most in max_tokens
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return Side(vllm.__version__, torch.backends.cpu.get_cpu_capability(), generate)


if __name__ == "__main__":
    serve(load)
