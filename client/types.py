"""The arguments and results of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from quire.sampling.params import EarlyStopping


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text in which the model thinks before it answers, or the next part of it."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Content:
    """Text of an answer, or the next part of it."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. A stream has the id and the name once, and then parts of the arguments."""

    id: str
    name: str
    arguments: str
    """A JSON object as text, or its next part."""
    index: int = 0
    num_tokens: int = 0


Piece: TypeAlias = Reasoning | Content | ToolCall


class Message(TypedDict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[Sequence[ToolCall]]
    """Calls of an earlier answer."""
    reasoning_content: NotRequired[str]
    """Reasoning of an earlier answer."""
    tool_call_id: NotRequired[str]
    """Id of the call that a message of the role ``tool`` answers."""
    name: NotRequired[str]


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Plain text, token ids, or a conversation that the server renders with the model's chat template."""


class GenerationOptions(TypedDict, total=False):
    """The keyword arguments of all calls that generate. Absent or ``None`` means the server's default."""

    max_tokens: int | None
    """Most tokens to generate; by default up to the model's length."""
    min_tokens: int | None
    """Fewest tokens to generate before a stop condition applies."""
    temperature: float | None
    """Sampling temperature; 0 is greedy; default 1."""
    top_p: float | None
    """Nucleus probability in (0, 1]."""
    top_k: int | None
    """Sample from the k most probable tokens; 0 is off."""
    min_p: float | None
    """Sample from tokens with at least this share of the best token's probability."""
    typical_p: float | None
    """Sample from the tokens whose surprise is nearest to the expected one, up to this sum of probabilities,
    in (0, 1]; 1 is off."""
    seed: int | None
    """Seed of sampling: the same seed gives the same tokens."""
    n: int | None
    """Number of answers to sample. Answer i equals that of a separate request with ``seed + i``."""
    best_of: int | None
    """Number of answers to sample, of which the ``n`` with the highest logprobs are returned, best first."""
    kv_budget_tokens: int | None
    """Keep the keys and values of only this many tokens after the prompt; the answer is an approximation."""
    beam_width: int | None
    """Number of answers of a beam search, which replaces sampling."""
    length_penalty: float | None
    """In a beam search, an answer's score is its logprob divided by its length to this power; default 1."""
    early_stopping: EarlyStopping | None
    """When a beam search ends: True as soon as ``beam_width`` answers are finished, False (the default) when
    the present beams are unlikely to beat them, "never" when the beams cannot beat them."""
    presence_penalty: float | None
    """Amount to subtract from the logits of tokens that the answer already contains, from -2 to 2."""
    frequency_penalty: float | None
    """Amount to subtract from a token's logit for each occurrence in the answer so far, from -2 to 2."""
    repetition_penalty: float | None
    """Divisor of the logits of tokens that the prompt or the answer contains; above 0; 1 is off."""
    logit_bias: Mapping[int, float] | None
    """Amounts to add to the logits of these token ids, from -100 to 100."""
    allowed_token_ids: Sequence[int] | None
    """The only token ids that may be sampled."""
    bad_words: Sequence[str] | None
    """Texts that are never generated."""
    bad_word_token_ids: Sequence[Sequence[int]] | None
    """Sequences of token ids that are never generated."""
    stop: str | Sequence[str] | None
    """Stop when the text contains one of these strings; the string is not returned."""
    stop_token_ids: Sequence[int] | None
    """Stop after one of these token ids."""
    ignore_eos: bool | None
    """Continue after the model's end-of-sequence tokens."""
    logprobs: int | None
    """Number of top logprobs to return at each position; 0 returns only the sampled token's."""
    json_schema: str | Mapping[str, Any] | None
    """JSON schema that accepts the answer, which is a JSON value."""
    regex: str | None
    """Regular expression that the whole answer matches."""
    grammar: str | None
    """Grammar in Lark's notation that the answer follows."""
    prompt_logprobs: int | None
    """Number of top logprobs to return at each position of the prompt, which then uses no prefix cache."""
    keep_special_tokens: bool | None
    """Keep special tokens in the returned text."""
    keep_stop_string: bool | None
    """Keep the stop string that was found, at the end of the text."""
    parse: bool | None
    """Divide answers into reasoning, content and tool calls: see ``Choice.pieces``."""
    tools: Sequence[Mapping[str, Any]] | None
    """In a conversation, the tools that the model may call, in OpenAI's form."""
    tool_choice: Literal["auto", "required"] | None
    """Whether the model decides, the default, or has to call a tool; needs ``parse``, like the next two."""
    allowed_tools: Sequence[str] | None
    """Names of the only tools that may be called."""
    single_call: bool | None
    """Let an answer have at most one call."""
    template_arguments: Mapping[str, Any] | None
    """In a conversation, further variables of the model's chat template."""
    model: str | None
    """Name of the served model, or of an adapter of it; by default the model."""
    request_id: str | None
    """Name of the request in the server's logs."""
    cache_salt: str | None
    """Requests with different salts share no KV blocks; by default all requests of a tenant may."""
    session: str | None
    """Name of the conversation that the request is a turn of; see ``end_session``."""
    priority: int | None
    """From -100 to 100, lower is sooner; with API keys, below 0 only as far as the key allows."""


FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the most probable tokens at a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a sampled token, and the most probable tokens, best first."""

    logprob: float
    top: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one request, and the origin of its KV blocks."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    """Prompt tokens whose keys and values were not computed for this request."""
    blocks_shipped: int
    """Blocks sent from the prefill worker to the decode worker."""
    bytes_shipped: int
    blocks_reused_on_decode: int
    """Prompt blocks that were not sent because the decode worker already had them."""
    retries: int
    """Number of times that the request moved to another worker after a failure."""
    blocks_pulled: int = 0
    """Blocks that were copied from another worker's cache instead of computed."""
    bytes_pulled: int = 0
    accepted_draft_tokens: int = 0
    """Generated tokens that were accepted draft tokens, so that they needed no separate step."""
    reasoning_tokens: int = 0
    """Generated tokens of reasoning; only with ``parse``."""
    workers: tuple[str, ...] = ()
    """Labels of the workers that computed the answer, as ``P1`` and ``D2``, in order of first use."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a request's answers."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of each token if asked for, otherwise empty."""
    score: float | None = None
    """Score in a beam search: the logprob divided by the length to the power of the length penalty."""
    pieces: tuple[Piece, ...] = ()
    """With ``parse``: the parts of the answer, in order."""
    stop_string: str | None = None
    """The stop string that ended the answer, if one did."""

    @property
    def reasoning(self) -> str:
        """With ``parse``: the answer's reasoning."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Reasoning))

    @property
    def content(self) -> str:
        """With ``parse``: the answer's text without reasoning and calls."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Content))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """With ``parse``: the answer's calls of tools."""
        return tuple(piece for piece in self.pieces if isinstance(piece, ToolCall) and piece.name)


@dataclass(frozen=True, slots=True)
class Completion:
    """The answers to a prompt; ``text`` and the other properties are those of the first answer."""

    choices: tuple[Choice, ...]
    """The answers, at least one, in the order of their index; those of a beam search are best first."""
    usage: Usage
    """Counts of all answers together."""
    request_id: str
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of each prompt token except the first, if asked for."""
    max_tokens: int | None = None
    """Most tokens of each answer, if the model's length leaves fewer than were asked for."""

    @property
    def text(self) -> str:
        """The generated text of the first answer."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated token ids of the first answer."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why the first answer ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Logprobs of each token of the first answer if asked for, otherwise empty."""
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of one streamed answer. Answers of a beam search arrive complete, when it ends."""

    text: str
    """New text; may be empty while a character or a stop string is incomplete."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    """Reason why the answer ended; set only on its last delta."""
    usage: Usage | None
    """Counts of the request; set only on its last delta."""
    request_id: str
    """Id of the request; set only on its first delta."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of each prompt token except the first, if asked for; set only on the first delta."""
    index: int = 0
    """Index of the answer that this step belongs to."""
    score: float | None = None
    """Score of an answer of a beam search."""
    max_tokens: int | None = None
    """Most tokens of each answer, if the model leaves room for fewer than asked; only on the first delta."""
    pieces: tuple[Piece, ...] = ()
    """With ``parse``: what the step adds to the parts of the answer, in order."""
    stop_string: str | None = None
    """The stop string that ended the answer, if one did; set only on its last delta."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The embeddings of several texts, in their order."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage
    request_id: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model and its limits."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_prefill_workers: int
    num_decode_workers: int
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """The model's own defaults of sampling parameters, and of ``max_tokens``."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that requests may give as their ``model``."""
