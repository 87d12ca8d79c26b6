"""Defines the bodies that clients send."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field

from quire.sampling.params import ResponseOptions
from quire.services.router.http.openai.sampling_fields import GenerationFields
from quire.services.router.http.shared.fields import Body, Ignored, LogprobCount, TokenId, limits

MAX_PROMPTS = 256
"""Maximum number of prompts in a request. Each prompt counts as a request of its own, and begins when the
router can admit it."""

Prompts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
TokenIdPrompts = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionRequest(GenerationFields):
    """The body of ``/v1/completions``."""

    prompt: str | Prompts | TokenIds | TokenIdPrompts
    logprobs: LogprobCount | None = None
    echo: bool | None = Field(None, description="Return the prompt before each answer.")
    best_of: Annotated[int, limits("best_of", ResponseOptions)] | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: Literal[True] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts of the request, each a text or a list of token ids."""
        match self.prompt:
            case str() as text:
                return [text]
            case [int(), *_] as token_ids:
                return [cast("list[int]", token_ids)]
            case several:
                return list(cast("list[str] | list[list[int]]", several))

    @property
    def only_reads(self) -> bool:
        """Whether the client wants only the prompt with its logprobs, and no generated tokens."""
        return bool(self.echo) and self.max_tokens == 0


class TextPart(Body):
    """A text that is one of the parts of a message."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None


class CalledFunction(Body):
    """The function that an earlier answer called, with its arguments."""

    name: str
    arguments: str = Field(description="A JSON object, as text.")


class CalledTool(Body):
    """A tool call of an earlier answer."""

    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Body):
    """A message of the conversation; unknown members, often kept from earlier answers, are ignored."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """Content of the message, with its parts joined."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call; all tools are functions."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: FunctionName


class ChatCompletionRequest(GenerationFields):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="False returns only the first call.")
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    reasoning_effort: str | None = Field(None, description="A variable of the chat template.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")


class TokenizeRequest(Body):
    """The body of ``/tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(None, description="Of a text; by default true.")
    add_generation_prompt: Literal[True] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = Field(None, description="By default false.")
