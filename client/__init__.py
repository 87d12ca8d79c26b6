"""The Python client of quire: blocking and asyncio clients, their types and their errors."""

from __future__ import annotations

from quire.client.async_client import AsyncClient
from quire.client.errors import (
    Cancelled,
    DeadlineExceeded,
    Interrupted,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuireError,
    ServerError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from quire.client.sync_client import Client
from quire.client.tls import Tls
from quire.client.types import (
    Candidate,
    Choice,
    Completion,
    Content,
    Delta,
    Embeddings,
    FinishReason,
    GenerationOptions,
    Message,
    ModelInfo,
    Piece,
    Prompt,
    Reasoning,
    TokenLogprobs,
    ToolCall,
    Usage,
)
from quire.sampling.params import EarlyStopping

__all__ = [
    "AsyncClient",
    "Cancelled",
    "Candidate",
    "Choice",
    "Client",
    "Completion",
    "Content",
    "DeadlineExceeded",
    "Delta",
    "EarlyStopping",
    "Embeddings",
    "FinishReason",
    "GenerationOptions",
    "Interrupted",
    "InvalidRequest",
    "Message",
    "ModelInfo",
    "NotFound",
    "Overloaded",
    "Piece",
    "Prompt",
    "QuireError",
    "Reasoning",
    "ServerError",
    "Tls",
    "TokenLogprobs",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Usage",
]
