"""The settings of an engine, for both ``LLM`` and the workers. Importing this file does not load torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from quire.models.source import demo_model_path
from quire.settings.setting import Panel, check_settings, setting

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WeightDtype = Literal["auto", "w8a8", "w4a8", "int8", "int4", "dequantized"]
Arithmetic = Literal["auto", "portable"]

MAX_RANKS = 8
"""Largest number of processes that a model can be divided among."""
MAX_SPECULATIVE_TOKENS = 16
"""Most draft tokens of a sequence per step. Each costs computation, and later ones are rarely accepted."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine and of the model that it runs.

    Raises:
        ValueError: settings are out of range or contradict each other.
    """

    model: str | None = setting(
        None, "MODEL", "Folder or hub id of the model; by default the bundled demo.", Panel.MODEL
    )
    _: KW_ONLY
    dtype: Dtype = setting(
        "auto", "--dtype", "Type of weights and KV cache; auto is the checkpoint's own.", Panel.COMMON
    )
    weight_dtype: WeightDtype = setting(
        "auto",
        "--weight-dtype",
        "Type of linear layers' weights: the checkpoint's, or 8 or 4 bits, which is less exact; with w8a8 "
        "and w4a8, their inputs have 8 bits too, which is fast for prompts and batches; dequantized: a "
        "quantized checkpoint or GGUF file in the type of the model; on the CPU.",
        Panel.MODEL,
    )
    arithmetic: Arithmetic = setting(
        "auto",
        "--arithmetic",
        "auto: the fastest arithmetic of this machine; portable: one that every processor can compute, for "
        "clusters of different machines.",
        Panel.MODEL,
    )
    max_model_len: int | None = setting(
        None,
        "--max-model-len",
        "Most tokens of prompt and answer; by default the model's.",
        Panel.COMMON,
        minimum=2,
    )
    tensor_parallel_size: int = setting(
        1,
        "--tensor-parallel-size",
        "Processes on this machine that the model is divided among; on the CPU.",
        Panel.MODEL,
        minimum=1,
        maximum=MAX_RANKS,
    )
    speculation: str = setting(
        "off",
        "--speculation",
        "Source of draft tokens, which a step then verifies: off, ngram (earlier text), or a smaller model's "
        "folder or hub id.",
        Panel.MODEL,
    )
    num_speculative_tokens: int = setting(
        4,
        "--num-speculative-tokens",
        "Most draft tokens for one sequence in a step.",
        Panel.MODEL,
        minimum=1,
        maximum=MAX_SPECULATIVE_TOKENS,
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = setting(
        "auto",
        "--kv-cache-dtype",
        "Type of the KV cache: the model's, or 8 bits, which is less exact.",
        Panel.CACHE,
    )
    block_size: int = setting(16, "--block-size", "Tokens in a KV block.", Panel.CACHE, minimum=1)
    kv_memory_bytes: int | None = setting(
        None, "--kv-memory", "Memory for KV blocks, such as 512MiB or 2GiB.", Panel.COMMON, is_size=True
    )
    num_blocks: int | None = setting(
        None,
        "--num-blocks",
        "Number of KV blocks; instead of --kv-memory.",
        Panel.CACHE,
        minimum=2,
    )
    swap_space_bytes: int = setting(
        64 << 20,
        "--swap-memory",
        "Host memory for the blocks of preempted requests, such as 64MiB; 0 for none.",
        Panel.CACHE,
        minimum=0,
        is_size=True,
    )
    max_num_seqs: int = setting(64, "--max-num-seqs", "Most sequences in a step.", Panel.LIMITS, minimum=1)
    max_num_batched_tokens: int = setting(
        512, "--max-num-batched-tokens", "Most tokens in a step.", Panel.LIMITS, minimum=1
    )
    threads: int | None = setting(
        None,
        "--threads",
        "CPU threads of a step; by default a worker takes its share of cores.",
        Panel.PROCESS,
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_settings(self, self.name_of)
        if self.num_blocks is not None and self.kv_memory_bytes is not None:
            raise ValueError(
                f"give {self.name_of('num_blocks')} or {self.name_of('kv_memory_bytes')}, not both"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"{self.name_of('max_num_batched_tokens')} ({self.max_num_batched_tokens}) must be at least "
                f"{self.name_of('max_num_seqs')} ({self.max_num_seqs}), "
                "or a full batch cannot decode in one step"
            )
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Raise ValueError for a setting that does not work on several ranks."""
        size, name = self.tensor_parallel_size, self.name_of("tensor_parallel_size")
        if size > 1 and self.weight_dtype != "auto":
            weights = self.name_of("weight_dtype")
            raise ValueError(
                f"{name} {size} and {weights} {self.weight_dtype} do not work together: "
                f"leave {weights} at auto, or {name} at 1"
            )

    def name_of(self, field: str) -> str:
        """Return the name of a field in error messages: here the field's own name, as ``LLM`` takes it."""
        return field

    @property
    def draft_model(self) -> str | None:
        """Folder or hub id of the model that proposes draft tokens; None if no model does."""
        return None if self.speculation in ("off", "ngram") else self.speculation

    @property
    def model_path(self) -> str:
        """Folder or hub id of the model."""
        return self.model or str(demo_model_path())
