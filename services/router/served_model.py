"""Loads the model that workers serve, as far as requests are checked and tokenized with it."""

from __future__ import annotations

from quire.protos import worker_pb2
from quire.services.router.validation import ServedModel
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer, load_model_files


def load_served_model(
    info: worker_pb2.GetWorkerInfoResponse, *, source: str | None = None, name: str | None = None
) -> ServedModel:
    """Return a worker's model; ``source`` and ``name`` are in place of those that the worker tells.

    Raises:
        MissingTokenizerError: it has no ``tokenizer.json``.
    """
    files = load_model_files(source or info.model_path)
    return ServedModel(
        name=name or info.model,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=frozenset(info.eos_token_ids),
        block_size=info.layout.block_size,
        cache_descriptor=info.cache_descriptor,
        tokenizer=Tokenizer.load(files.folder),
        chat_template=ChatTemplate.load(files),
        tokenizer_config=files.config,
        index_stride=info.index_stride or 1,
    )
