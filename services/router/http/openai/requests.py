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

    # OpenAI's client adds members of its own to the calls that it has read.
    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str = Field(description="A JSON object, as text.")


class CustomInput(Body):
    """The custom tool that an earlier answer called, with its input."""

    name: str
    input: str


class CalledTool(Body):
    """A tool call of an earlier answer."""

    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CustomInput | None = None


class Message(Body):
    """A message of the conversation; unknown members, often kept from earlier answers, are ignored."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same as reasoning_content.")

    @property
    def text(self) -> str:
        """Content of the message, with its parts joined."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(Body):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(None, description="Whether every call follows the schema.")


class FunctionTool(Body):
    """A tool that is a function."""

    type: Literal["function"]
    function: Function


class CustomGrammar(Body):
    """The form of a custom tool's input."""

    syntax: Literal["regex"]
    definition: str


class CustomFormat(Body):
    """Any text, or one that a grammar accepts."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class Custom(Body):
    """A tool whose input is a text."""

    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class CustomTool(Body):
    """A tool whose input is a text instead of a JSON object."""

    type: Literal["custom"]
    custom: Custom


Tool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]
Tools = Annotated[list[Tool], Field(max_length=128)]


class ChosenName(Body):
    """The name of a tool."""

    name: str


class NamedTool(Body):
    """One of the tools, which the model has to call, or may call."""

    type: Literal["function", "custom"]
    function: ChosenName | None = None
    custom: ChosenName | None = None

    @property
    def name(self) -> str:
        """Name of the tool."""
        chosen = self.function or self.custom
        return chosen.name if chosen else ""


class Allowed(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(Body):
    """The only tools that the model may call, although all are described to it."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class ChatCompletionRequest(GenerationFields):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="False lets an answer have only one call.")
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="A variable of the chat template."
    )
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    reasoning_effort: str | None = Field(
        None, description="A variable of the chat template; none also sets enable_thinking to false."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")


class TokenizeRequest(Body):
    """The body of ``/tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(None, description="Of a text; by default true.")
    add_generation_prompt: Literal[True] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = Field(None, description="By default false.")
