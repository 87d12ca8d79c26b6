"""The offline interface: generates answers to prompts in this process, without servers."""

from __future__ import annotations

from quire.engine.errors import RequestFailedError
from quire.llm.llm import LLM
from quire.llm.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput, RequestsFailedError
from quire.llm.params import BeamSearchParams, SamplingParams
from quire.llm.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineStats",
    "Logprob",
    "RequestFailedError",
    "RequestOutput",
    "RequestsFailedError",
    "SamplingParams",
    "StructuredOutputsParams",
]
