"""The protocol of all sides: load a model once, then answer each line of JSON on stdin with one on stdout.

The modules of this package run in environments without quire's dependencies, so they import only the standard
library and the engine that they run.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Literal, NamedTuple

Dtype = Literal["float32", "bfloat16", "w8a8", "w4a8", "int4"]
"""Type of the weights and of their products.

With "w8a8", weights and the inputs of products have 8 bits, in llama.cpp by its type Q8_0. With "w4a8" and
"int4", weights have 4 bits, in llama.cpp by its type Q4_0, which has inputs of 8 bits. All of them compute in
bfloat16 between products.
"""


class Setup(NamedTuple):
    """The setup of a side, which is JSON in the first argument.

    Attributes:
        model: folder of the model, in Hugging Face format, with weights in float32.
        dtype: type of weights and products.
        threads: number of CPU threads.
        max_num_seqs: most sequences in a batch.
        max_model_len: most tokens of prompt and answer.
    """

    model: str
    dtype: Dtype
    threads: int
    max_num_seqs: int
    max_model_len: int

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """torch's name of the type of activations."""
        return "float32" if self.dtype == "float32" else "bfloat16"

    @property
    def weight_dtype(self) -> Literal["auto", "w8a8", "w4a8", "int4"]:
        """quire's option for the type of weights."""
        return self.dtype if self.dtype in ("w8a8", "w4a8", "int4") else "auto"


Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Returns greedy answers of the given numbers of tokens to prompts, ignoring end-of-sequence tokens."""


class Side(NamedTuple):
    """An engine that has loaded a model.

    Attributes:
        version: the engine's version.
        arithmetic: the instructions that the engine can use, or the arithmetic that it has chosen.
        generate: the function that generates.
    """

    version: str
    arithmetic: str
    generate: Generate


def serve(load: Callable[[Setup], Side]) -> None:
    """Load an engine, then run workloads until stdin ends.

    Args:
        load: loads the engine.
    """
    setup = Setup(**json.loads(sys.argv[1]))
    # Engines print to stdout too, so only this copy of it is used for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        side = load(setup)
        print(json.dumps({"version": side.version, "arithmetic": side.arithmetic}), file=answers)
        for line in sys.stdin:
            request = json.loads(line)
            start = time.perf_counter()
            tokens = side.generate(request["prompts"], request["max_tokens"])
            seconds = time.perf_counter() - start
            print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        sys.exit(1)
