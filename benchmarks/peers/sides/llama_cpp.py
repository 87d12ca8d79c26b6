"""llama.cpp, by the C functions that llama-cpp-python binds, with batching as in llama.cpp's own examples.

The bindings' own class ``Llama`` runs one request at a time, so the loop over the batch is here. All prompts
are computed in steps of up to ``n_batch`` tokens, then each step adds one token to every answer. A prefix
that all prompts share is computed once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from ctypes import c_void_p
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp

from quire.benchmarks.peers.sides.gguf_file import write_gguf
from quire.benchmarks.peers.sides.protocol import Setup, Side, serve

ERROR_LEVEL = 4


class Row(NamedTuple):
    """One token to compute, and whether its logits are needed."""

    token: int
    position: int
    sequence: int
    is_sampled: bool


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def print_errors(level: int, text: bytes, user_data: object) -> None:
    """Print only errors: llama.cpp's own function also prints debug lines in every step."""
    if level == ERROR_LEVEL:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


class Context:
    """A model in llama.cpp, with one KV cache for all sequences of a batch."""

    def __init__(self, model_file: Path, setup: Setup) -> None:
        llama_cpp.llama_log_set(print_errors, c_void_p())
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_load_model_from_file(
            os.fsencode(model_file), llama_cpp.llama_model_default_params()
        )
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {model_file}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = setup.max_num_seqs * setup.max_model_len
        params.n_seq_max = setup.max_num_seqs
        # With separate caches, llama.cpp splits a batch at each sequence that has ended.
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = setup.threads
        if setup.dtype == "float32":
            # By default the cache is in float16, as many bytes as bfloat16.
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._context = context
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._num_batch = llama_cpp.llama_n_batch(context)
        self._batch = llama_cpp.llama_batch_init(self._num_batch, 0, 1)
        self._memory = llama_cpp.llama_get_memory(context)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        """Return the greedy answers."""
        llama_cpp.llama_memory_clear(self._memory, False)
        start = self._share_prefix(prompts)
        answers: list[list[int]] = [[] for _ in prompts]
        rows = [
            Row(token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt[start:], start)
        ]
        while rows:
            for sequence, token in self._compute(rows):
                answers[sequence].append(token)
            rows = [
                Row(answer[-1], len(prompts[sequence]) + len(answer) - 1, sequence, True)
                for sequence, answer in enumerate(answers)
                if len(answer) < max_tokens[sequence]
            ]
        return answers

    def _share_prefix(self, prompts: list[list[int]]) -> int:
        """Compute the prefix that all prompts share; return the number of its tokens."""
        if len(prompts) == 1:
            return 0
        columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
        prefix = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
        if prefix:
            list(self._compute([Row(token, position, 0, False) for position, token in enumerate(prefix)]))
            for sequence in range(1, len(prompts)):
                llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        return len(prefix)

    def _compute(self, rows: list[Row]) -> Iterator[tuple[int, int]]:
        """Compute tokens; for each one whose logits are needed, yield its sequence and the next token."""
        batch: Any = self._batch
        for start in range(0, len(rows), self._num_batch):
            part = rows[start : start + self._num_batch]
            batch.n_tokens = len(part)
            for index, row in enumerate(part):
                batch.token[index] = row.token
                batch.pos[index] = row.position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = row.sequence
                batch.logits[index] = row.is_sampled
            status = llama_cpp.llama_decode(self._context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status}")
            for index, row in enumerate(part):
                if row.is_sampled:
                    yield row.sequence, llama_cpp.llama_sampler_sample(self._sampler, self._context, index)


def load(setup: Setup) -> Side:
    """Load the model from a GGUF file next to the model's folder; write the file if it does not exist."""
    folder = Path(setup.model)
    is_file = folder.suffix == ".gguf"
    model_file = folder if is_file else folder.with_name(f"{folder.name}-{setup.dtype}.gguf")
    if not model_file.exists():
        write_gguf(folder, setup.dtype, model_file)
    context = Context(model_file, setup)
    return Side(llama_cpp.__version__, llama_cpp.llama_print_system_info().decode(), context.generate)


if __name__ == "__main__":
    serve(load)
