"""The served model as a worker describes it, and what an operator may name otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quire.protos import kvtransfer_pb2, worker_pb2
from quire.rpc.errors import BadFileError
from quire.services.requests.served_model import load_served_model


def info(path: Path) -> worker_pb2.GetWorkerInfoResponse:
    return worker_pb2.GetWorkerInfoResponse(
        model="tiny",
        model_path=str(path),
        max_model_len=64,
        vocab_size=320,
        eos_token_ids=[1, 5],
        layout=kvtransfer_pb2.KvLayout(block_size=4),
        cache_descriptor=b"descriptor",
    )


def test_the_limits_are_the_workers_and_the_files_are_the_models(model_folder: Path) -> None:
    model = load_served_model(info(model_folder))
    assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", 64, 320)
    assert model.block_size == 4
    assert model.eos_token_ids == {1, 5}
    assert model.chat_template is not None
    assert model.tokenizer_config["bos_token"] == "<s>"
    assert model.tokenizer.decode(model.tokenizer.encode_batch(["end"], add_special_tokens=False)[0]) == "end"


def test_the_models_own_defaults_can_be_turned_off(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    config = folder / "generation_config.json"
    config.write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 9}')
    model, plain = load_served_model(info(folder)), load_served_model(info(folder), generation_config="none")
    assert model.sampling_defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert plain.sampling_defaults == {}
    assert plain.origin(b"", "") != model.origin(b"", ""), "an answer must not continue with other parameters"
    config.write_text('{"temperature": -1}')
    with pytest.raises(BadFileError, match=r"temperature must be from 0 .* correct it, or start the router"):
        load_served_model(info(folder))
    assert load_served_model(info(folder), generation_config="none").origin(b"", "") == plain.origin(b"", "")


def test_an_operator_can_name_the_model_and_its_files(model_folder: Path, tmp_path: Path) -> None:
    model = load_served_model(info(tmp_path / "elsewhere"), source=str(model_folder), name="mine")
    assert model.name == "mine"
    with pytest.raises(BadFileError, match=r"has no tokenizer.json: save one"):
        load_served_model(info(tmp_path))
