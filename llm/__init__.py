"""The engine for scripts: prompts in, answers out, in this process."""

from __future__ import annotations

from quire.llm.llm import LLM
from quire.llm.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput
from quire.llm.params import BeamSearchParams, SamplingParams
from quire.llm.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineStats",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
