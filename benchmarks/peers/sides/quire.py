"""quire, by ``quire.llm.LLM``."""

from __future__ import annotations

from importlib.metadata import version

from quire.benchmarks.peers.sides.protocol import Setup, Side, serve
from quire.engine.model.layers.packed_linear import PackedLinear
from quire.kernels.cpu.products.amx_product import CHAINS, INTEGER_TILES, TILES
from quire.kernels.cpu.products.bfloat16_product import PAIRS
from quire.kernels.cpu.products.integer_product import INTEGER_INSTRUCTION
from quire.llm import LLM, SamplingParams

BLOCK_SIZE = 16


def load(setup: Setup) -> Side:
    """Load the model, with blocks for a full batch of the longest sequences."""
    llm = LLM(
        setup.model,
        dtype=setup.compute_dtype,
        weight_dtype=setup.weight_dtype,
        threads=setup.threads,
        device="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=setup.max_num_seqs * -(-setup.max_model_len // BLOCK_SIZE),
        max_num_seqs=setup.max_num_seqs,
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True) for most in max_tokens]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return Side(version("quire-llm"), arithmetic(llm), generate)


def arithmetic(llm: LLM) -> str:
    """Return how the model's linear layers are multiplied."""
    by_type = {
        PAIRS: "vdpbf16ps",
        TILES: "tdpbf16ps",
        CHAINS: "float32 products in the order of tdpbf16ps",
        INTEGER_TILES: "tdpbusd",
    }
    layers = [each for each in llm.engine.model.module.modules() if isinstance(each, PackedLinear)]
    found = {
        by_type.get(packed.stored, INTEGER_INSTRUCTION if packed.rounds_inputs else "float32 products")
        for packed in (each.packed for each in layers)
    }
    return ", ".join(sorted(found))


if __name__ == "__main__":
    serve(load)
