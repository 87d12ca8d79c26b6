"""Texts that are cut keep the special tokens that the model's tokenizer adds at their end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import processors

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.services.requests.embeddings import validate_embeddings
from quire.services.requests.served_model import ServedModel
from quire.tokenization.tokenizer import Tokenizer


@pytest.fixture(params=["<s> $A </s>", "$A </s>", "<s> $A", "$A"])
def model(request: pytest.FixtureRequest, model_folder: Path) -> ServedModel:
    library = Library.from_file(str(model_folder / "tokenizer.json"))
    specials = [("<s>", 0), ("</s>", 1)]
    library.post_processor = processors.TemplateProcessing(single=request.param, special_tokens=specials)
    embedding = worker_pb2.EmbeddingModel(size=4, pooling="lasttoken")
    return ServedModel("tiny", 64, 320, frozenset({1}), 4, Tokenizer(library), None, embedding=embedding)


@pytest.mark.parametrize("longest", [1, 2, 5, 11, 63, -1])
async def test_the_first_tokens_are_kept(model: ServedModel, longest: int) -> None:
    text = "hello world, stop here and say the end" * 10
    whole = await model.tokenizer.encode(text)
    request = pb.EmbedRequest(inputs=[pb.EmbedInput(text=text)], truncate_prompt_tokens=longest)
    [valid] = await validate_embeddings(request, model)
    kept = valid.prompt_token_ids
    most = 63 if longest == -1 else longest
    assert len(kept) == min(len(whole), most)
    ends = [1] if whole[-1] == 1 else []
    assert kept == [*whole[: len(kept) - len(ends)], *ends]
