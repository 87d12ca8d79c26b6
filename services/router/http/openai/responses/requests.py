"""Defines the bodies of requests to ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quire.services.router.http.openai.sampling_fields import JsonObjectFormat, JsonSchema, TextFormat
from quire.services.router.http.shared.fields import AnswerFields, Body, Ignored, LogprobCount, limits

LOGPROBS = "message.output_text.logprobs"
"""Value of ``include`` that asks for logprobs."""


def _refused(instead: str) -> BeforeValidator:
    """Return a check that refuses a field, and says what to send instead."""

    def check(value: Any) -> Any:
        raise PydanticCustomError("not_supported", f"is not supported: {instead}")

    return BeforeValidator(check)


class Item(Body):
    """A part of the conversation; unknown members, often kept from earlier answers, are ignored."""

    model_config = ConfigDict(extra="ignore")


class InputText(Item):
    """A text that is one of the parts of a message, or of a tool's output."""

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(Item):
    """A message of the conversation."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]


class ReasoningText(Item):
    """What the model thought, or a summary of it."""

    text: str


class ReasoningInput(Item):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The reasoning if it is there, or else its summary."""
        return "".join(part.text for part in self.content or self.summary or ())

    @model_validator(mode="after")
    def _is_readable(self) -> ReasoningInput:
        if self.encrypted_content and not self.text:
            problem = "has only encrypted_content, which this server cannot read: leave the item out"
            raise PydanticCustomError("not_supported", problem)
        return self


class FunctionCallInput(Item):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = Field(description="A JSON object, as text.")


class CustomCallInput(Item):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutput(Item):
    """What a tool returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[InputText]


InputItem = Annotated[
    InputMessage | ReasoningInput | FunctionCallInput | CustomCallInput | CallOutput,
    Field(discriminator="type"),
    BeforeValidator(lambda item: {"type": "message", **item} if isinstance(item, dict) else item),
]


class ResponseFunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(None, description="True constrains the arguments to the schema.")


class RegexFormat(Body):
    """A text that matches a regular expression."""

    type: Literal["grammar"]
    syntax: Literal["regex"]
    definition: str


class ResponseCustomTool(Body):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: Annotated[TextFormat | RegexFormat, Field(discriminator="type")] | None = None


class NamespaceTool(Body):
    """A group of tools; the model sees each under the name ``namespace__name``."""

    type: Literal["namespace"]
    name: str
    description: Ignored = None
    tools: list[Annotated[ResponseFunctionTool | ResponseCustomTool, Field(discriminator="type")]]


class WebSearchTool(Item):
    """A tool of the server that promises nothing, so that the model is not told of it."""

    type: Literal["web_search"]
    external_web_access: Literal[False]


Tool = Annotated[
    ResponseFunctionTool | ResponseCustomTool | NamespaceTool | WebSearchTool, Field(discriminator="type")
]


class ToolName(Body):
    """The name of one of the request's tools."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ResponseAllowedTools(Body):
    """The only tools that may be called, although the prompt describes all."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], Field(min_length=1)]


class ReasoningOptions(Body):
    """How much the model thinks."""

    effort: str | None = Field(
        default=None, description="A variable of the chat template; none turns thinking off."
    )
    summary: Ignored = None
    generate_summary: Ignored = None


class JsonSchemaText(JsonSchema):
    """A JSON value that a schema accepts."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """The form of the answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Field(discriminator="type")] = (
        TextFormat(type="text")
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        default=None, description="A variable of the chat template."
    )


class PromptCacheOptions(Body):
    """Options of the prompt cache."""

    mode: Ignored = None
    ttl: Ignored = None
    prewarm: bool = Field(default=False, description="Compute the prompt, and answer nothing.")


class ResponseRequest(AnswerFields):
    """The body of ``/v1/responses``, and of ``/v1/responses/input_tokens``."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ToolName | ResponseAllowedTools = "auto"
    parallel_tool_calls: bool = Field(True, description="False ends the answer after one call.")
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[float, limits("temperature")] | None = None
    top_p: Annotated[float, limits("top_p")] | None = None
    top_logprobs: LogprobCount = 0
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list
    )
    prompt_cache_options: PromptCacheOptions = PromptCacheOptions()

    # These have no effect, but they are part of the answer.
    metadata: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False

    store: Ignored = None
    client_metadata: Ignored = None
    stream_options: Ignored = None

    previous_response_id: Annotated[None, _refused("send the earlier items again, in input")] = None
    conversation: Annotated[None, _refused("send its items in input")] = None
    prompt: Annotated[None, _refused("send its text as instructions and input")] = None
    context_management: Annotated[None, _refused("leave out or shorten old items yourself")] = None
    max_tool_calls: Annotated[None, _refused("leave it out, since the server runs no tools")] = None
    moderation: Annotated[None, _refused("moderate texts in your program")] = None
