"""Describes the served model: all that is needed to check and tokenize requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from quire.models.file_checks import ModelFileError
from quire.protos import worker_pb2
from quire.rpc.errors import BadFileError
from quire.sampling.model_defaults import GenerationConfig, sampling_defaults
from quire.tokenization.answers.formats import AnswerFormat, find_answer_format
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import MissingTokenizerError, ModelFiles, Tokenizer, load_model_files


@dataclass(slots=True)
class ServedModel:
    """The served model: its limits, its tokenizer and its chat template.

    Attributes:
        descriptors: returns the cache descriptors of the present workers, one for each revision.
        adapters: returns the present digests of the adapters by name; empty for one that no workers agree on.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    block_size: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    """Contents of ``tokenizer_config.json``."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that apply where a request sets none."""
    answer_format: AnswerFormat | None = None
    """How the model writes reasoning and tool calls; None if its files do not show it."""
    embedding: worker_pb2.EmbeddingModel = field(default_factory=worker_pb2.EmbeddingModel)
    adapters: Callable[[], Mapping[str, str]] = dict
    descriptors: Callable[[], Iterable[bytes]] = tuple

    def origin(self, descriptor: bytes, adapter: str) -> str:
        """Return a text that identifies the model, how it is computed, and an adapter's digest, or none.

        An answer may continue where it is equal.
        """
        defaults = repr(sorted(self.sampling_defaults.items())) if self.sampling_defaults else ""
        return blake2b(descriptor + (defaults + adapter).encode(), digest_size=8).hexdigest()


def load_served_model(
    info: worker_pb2.GetWorkerInfoResponse,
    *,
    source: str | None = None,
    name: str | None = None,
    generation_config: GenerationConfig = "auto",
) -> ServedModel:
    """Load the text files of a worker's model, and return what they say with its limits.

    Args:
        source: folder or hub id of the model's files; None: the path that the worker names.
        name: name of the model for clients; None: the worker's name.

    Raises:
        BadFileError: the model has no ``tokenizer.json``, or one of these files is damaged.
        OSError: there is no such model, or the hub cannot be reached.
    """
    files, tokenizer, chat_template, defaults = _load_texts(source or info.model_path, generation_config)
    template_source = None if chat_template is None else chat_template.source
    return ServedModel(
        name=name or info.model,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=frozenset(info.eos_token_ids),
        block_size=info.layout.block_size,
        tokenizer=tokenizer,
        chat_template=chat_template,
        tokenizer_config=files.config,
        sampling_defaults=defaults,
        answer_format=find_answer_format(files.config, template_source, tokenizer.added_tokens),
        embedding=info.embedding,
    )


def check_text_files(source: str, generation_config: GenerationConfig) -> None:
    """Check the text files of a model in a local folder before workers load it, which takes longer.

    Raises:
        BadFileError: a file is missing or damaged.
    """
    if (Path(source) / "config.json").is_file():  # otherwise workers say what the source lacks
        _load_texts(source, generation_config)


def _load_texts(
    source: str, generation_config: GenerationConfig
) -> tuple[ModelFiles, Tokenizer, ChatTemplate | None, Mapping[str, Any]]:
    """Return the tokenizer's files, what they describe, and the sampling defaults."""
    try:
        files = load_model_files(source)
        tokenizer, chat_template = Tokenizer.load(files.folder), ChatTemplate.load(files)
        defaults = sampling_defaults(files.folder) if generation_config == "auto" else {}
    except (ModelFileError, MissingTokenizerError) as error:
        raise BadFileError(f"cannot load the files of {source}: {error}") from error
    return files, tokenizer, chat_template, defaults
