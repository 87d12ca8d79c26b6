"""Defines the bodies that clients get; members that were not set are left out of the JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel
from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """Number of the prompt's tokens whose KV was cached."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Number of the answers' tokens that are reasoning."""

    reasoning_tokens: int


class Work(BaseModel):
    """What the cluster did for a request: an addition of quire's, with the names of ``quire.v1``."""

    workers: list[str]
    """Labels of the workers that computed the answers, in the order of their first use, as P1 and D2."""
    blocks_shipped: int
    """Blocks sent from the prefill to the decode worker."""
    bytes_shipped: int
    blocks_reused_on_decode: int
    """Prompt blocks that were not sent because the decode worker already had them."""
    blocks_pulled: int
    """Blocks copied from another worker's cache instead of computed."""
    bytes_pulled: int
    retries: int
    """Number of times that the request moved to another worker after a failure."""


class Usage(BaseModel):
    """Token counts of all prompts and answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    work: Work | None = None


# An answer with 20 logprobs for each of 4,000 tokens has 80,000 of these, so they are plain dictionaries.
class PromptLogprob(TypedDict):
    """A candidate token at one position of the prompt."""

    logprob: float
    rank: int | None
    """Rank from 1; null for the prompt's own token if it is not among the top tokens."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Candidates by token id, for each token of the prompt; null for the first token, which has no logprobs."""


class CompletionLogprobs(BaseModel):
    """Logprobs of a text; each list has one member per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer, or the part that an event of a stream adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The complete answer of ``/v1/completions``, or an event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(TypedDict):
    """A candidate token at one position of the answer."""

    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8 bytes of the token; null if the token is only a part of a character."""


class TokenLogprob(TopLogprob):
    """The answer's own token at one position, with the top candidates there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Logprobs of an answer's tokens."""

    content: list[TokenLogprob] | None


class FunctionCall(BaseModel):
    """A call of a function, or what an event of a stream adds to it."""

    name: str | None = None
    arguments: str
    """The arguments, a JSON object as text."""


class CustomCall(BaseModel):
    """A call of a custom tool, or what an event of a stream adds to it."""

    name: str | None = None
    input: str


class ToolCall(BaseModel):
    """A call of a tool; in a stream, only the first event of the call has its id, type and name."""

    index: int | None = None
    """Index among the calls of the answer; set only in a stream."""
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class AnswerMessage(BaseModel):
    """The assistant's message, or the part that an event of a stream adds to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    """Text in which the model thinks before it answers."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One complete answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The complete answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(BaseModel):
    """The part that an event of a stream adds to one answer."""

    index: int
    delta: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """An event of the stream of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Model(BaseModel):
    """The served model, in the forms of OpenAI's and of Anthropic's API together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    max_model_len: int
    sampling_defaults: dict[str, int | float]
    """Parameters that apply where a request sets none."""


class ModelList(BaseModel):
    """The list of the model and its adapters, on one page."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class Tokens(BaseModel):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """The answer of ``/detokenize``."""

    prompt: str


class TokenizerInfo(BaseModel):
    """The answer of ``/tokenizer_info``: the model's special tokens and its template."""

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_template: str | None = None
    vocab_size: int
    model_max_length: int
    eos_token_ids: list[int]


class EndedSession(BaseModel):
    """The answer of ``DELETE /v1/sessions/{session}``."""

    id: str
    num_blocks: int


class Version(BaseModel):
    """The answer of ``/version``."""

    version: str


class Status(BaseModel):
    """The answer of ``/health`` and ``/ready``."""

    status: Literal["alive", "ready", "not_ready", "stalled"]
    reason: str


def finish_name(reason: Any) -> FinishReason | None:
    """Return OpenAI's name for a finish reason of ``quire.v1``; None if the answer has not finished."""
    names: dict[int, FinishReason] = {1: "stop", 2: "length", 3: "tool_calls"}
    return names.get(reason)
