"""Requests of ``vllm.grpc.engine``: what they come to mean, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from quire.protos import inference_pb2 as pb
from quire.rpc.cluster_proof import ClusterTrust
from quire.rpc.errors import InvalidArgument
from quire.services.vllm_adapter import requests
from quire.services.vllm_adapter.hand_off import hand_off, pull_source
from quire.services.vllm_adapter.requests import fields_as_sent, generation_from_proto

DOCS = Path(__file__).parents[3] / "docs" / "gateways.md"


def request(params: dict[str, Any] | None = None, **fields: Any) -> vllm.GenerateRequest:
    values: dict[str, Any] = {"tokenized": vllm.TokenizedInput(input_ids=[5, 6]), **fields}
    sampling = vllm.SamplingParams(**(params or {}))
    return vllm.GenerateRequest(request_id="r", sampling_params=sampling, **values)


def test_absent_fields_have_the_defaults_of_quire() -> None:
    generation = generation_from_proto(request({"skip_special_tokens": True}))
    assert generation == pb.Generation(
        request_id="r",
        token_ids=pb.TokenIds(ids=[5, 6]),
        sampling=pb.SamplingParams(),
        stopping=pb.StoppingParams(),
        response=pb.ResponseOptions(),
    )


def test_every_parameter_arrives() -> None:
    generation = generation_from_proto(
        request(
            {
                "temperature": 0.0,
                "top_p": 0.5,
                "top_k": 7,
                "min_p": 0.25,
                "seed": -5,
                "n": 3,
                "presence_penalty": 1.0,
                "frequency_penalty": -1.0,
                "repetition_penalty": 1.5,
                "logit_bias": {9: -100.0},
                "max_tokens": 12,
                "min_tokens": 2,
                "stop": ["end"],
                "stop_token_ids": [4],
                "ignore_eos": True,
                "logprobs": 0,
                "prompt_logprobs": 2,
                "skip_special_tokens": False,
            }
        )
    )
    assert generation.sampling == pb.SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        seed=2**64 - 5,
        n=3,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias={9: -100.0},
    )
    assert generation.stopping == pb.StoppingParams(
        max_tokens=12, min_tokens=2, stop_strings=["end"], stop_token_ids=[4], ignore_eos=True
    )
    assert generation.response == pb.ResponseOptions(logprobs=0, prompt_logprobs=2, keep_special_tokens=True)


def test_more_tokens_than_any_model_has_are_the_most_that_a_field_holds() -> None:
    assert generation_from_proto(request({"max_tokens": (1 << 32) - 1})).stopping.max_tokens == (1 << 31) - 1


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"json_schema": '{"type":"null"}'}, pb.ResponseFormat(json_schema='{"type":"null"}')),
        ({"regex": "a+"}, pb.ResponseFormat(regex="a+")),
        ({"grammar": 'start: "a"'}, pb.ResponseFormat(grammar='start: "a"')),
        ({"json_object": True}, pb.ResponseFormat(json_schema='{"type":"object"}')),
        ({"json_object": False}, pb.ResponseFormat()),
        (
            {"choice": vllm.ChoiceConstraint(choices=["yes", 'a "b"'])},
            pb.ResponseFormat(grammar='start: CHOICE\nCHOICE: "yes" | "a \\"b\\""'),
        ),
    ],
)
def test_constraints_become_formats(constraint: dict[str, Any], expected: pb.ResponseFormat) -> None:
    assert generation_from_proto(request(constraint)).format == expected


@pytest.mark.parametrize(
    ("refused", "field"),
    [
        (vllm.GenerateRequest(text="hello"), "input"),
        (vllm.GenerateRequest(), "input"),
        (request(mm_inputs=vllm.MultimodalInputs()), "mm_inputs"),
        (request(media_refs=vllm.MediaRefs()), "media_refs"),
        (request(extra_mm_inputs=[vllm.MultimodalInputs()]), "extra_mm_inputs"),
        (request(data_parallel_rank=1), "data_parallel_rank"),
        (request(kv_transfer_params=vllm.KvTransferParams()), "kv_transfer_params"),
        (request({"truncate_prompt_tokens": 5}), "sampling_params.truncate_prompt_tokens"),
        (request({"structural_tag": "{}"}), "sampling_params.structural_tag"),
        (request({"min_tokens": 1 << 31}), "sampling_params.min_tokens"),
        (request({"logprobs": -1}), "sampling_params.logprobs"),
        (request({"prompt_logprobs": -1}), "sampling_params.prompt_logprobs"),
        (request({"logit_bias": {-1: 1.0}}), "sampling_params.logit_bias"),
    ],
)
def test_unsupported_fields_are_refused_by_name(refused: vllm.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        generation_from_proto(refused)
    assert caught.value.field == field


def value_of(field: FieldDescriptor) -> Any:
    """Return a value that differs from the field's default and is valid."""
    if field.message_type is not None:
        is_map = field.message_type.GetOptions().map_entry
        return {5: 0.5} if is_map else vllm.ChoiceConstraint(choices=["x"])
    kinds = {field.TYPE_STRING: "x", field.TYPE_BOOL: True, field.TYPE_FLOAT: 0.5}
    value = kinds.get(field.type, 3)
    return [value] if field.is_repeated else value


def is_dropped(field: FieldDescriptor) -> bool:
    """Return whether a request means the same without a field."""
    try:
        changed = generation_from_proto(request({field.name: value_of(field)}))
    except InvalidArgument as error:
        return error.field != f"sampling_params.{field.name}"
    return changed == generation_from_proto(request())


def test_no_parameter_is_dropped_in_silence() -> None:
    rows = DOCS.read_text("utf-8").splitlines()
    documented = [row for row in rows if "are up to the gateway" in row or "always applies" in row]
    dropped = {field.name for field in vllm.SamplingParams.DESCRIPTOR.fields if is_dropped(field)}
    assert dropped == {name for row in documented for name in re.findall(r"`([a-z_]+)`", row)}


def test_a_parameter_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_SERVED", requests._SERVED - {"top_k"})
    with pytest.raises(InvalidArgument, match=r"sampling_params\.top_k: is not served"):
        generation_from_proto(request({"top_k": 3}))


SECRET = b"secret"
TRUST = ClusterTrust(SECRET)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": None},
        {"remote_host": ""},
        {"remote_engine_id": 7},
        {"remote_port": "80"},
        {"remote_port": True},
        {"remote_num_blocks": -1},
        {"remote_num_blocks": 1 << 31},
    ],
)
def test_a_damaged_hand_off_is_refused(change: dict[str, Any]) -> None:
    members = {**json.loads(hand_off("127.0.0.1:50051", "epoch", 24, SECRET)), **change}
    with pytest.raises(InvalidArgument, match=next(iter(change))):
        pull_source(request(kv_transfer_params_json=json.dumps(members)), TRUST)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": "10.0.0.66"},
        {"remote_port": 50052},
        {"remote_engine_id": "another"},
        {"remote_proof": ""},
        {"remote_proof": "é"},
        {"remote_proof": None},
    ],
)
def test_a_hand_off_that_no_worker_of_the_cluster_made_is_refused(change: dict[str, Any]) -> None:
    members = {**json.loads(hand_off("127.0.0.1:50051", "epoch", 24, SECRET)), **change}
    with pytest.raises(InvalidArgument, match="QUIRE_CLUSTER_SECRET"):
        pull_source(request(kv_transfer_params_json=json.dumps(members)), TRUST)


@pytest.mark.parametrize(
    ("host", "has_tls", "is_taken"),
    [("127.0.0.1", False, True), ("10.0.0.66", False, False), ("10.0.0.66", True, True)],
)
def test_without_a_secret_blocks_are_pulled_only_locally_or_by_tls(
    host: str, has_tls: bool, is_taken: bool
) -> None:
    message = request(kv_transfer_params_json=hand_off(f"{host}:50051", "epoch", 24, b""))
    if is_taken:
        assert pull_source(message, ClusterTrust(has_tls=has_tls)) is not None
        return
    with pytest.raises(InvalidArgument, match="QUIRE_CLUSTER_SECRET"):
        pull_source(message, ClusterTrust(has_tls=has_tls))


@pytest.mark.parametrize(
    ("field", "sent"),
    [
        ("sampling.temperature", "sampling_params.temperature"),
        ("sampling.logit_bias[7]", "sampling_params.logit_bias[7]"),
        ("stopping.min_tokens", "sampling_params.min_tokens"),
        ("stopping.stop_strings[1]", "sampling_params.stop[1]"),
        ("response.logprobs", "sampling_params.logprobs"),
        ("format.regex", "sampling_params.regex"),
        ("token_ids.ids[3]", "tokenized.input_ids[3]"),
        ("request_id", "request_id"),
        ("kv_transfer_params_json", "kv_transfer_params_json"),
    ],
)
def test_errors_name_fields_as_gateways_send_them(field: str, sent: str) -> None:
    with pytest.raises(InvalidArgument) as caught, fields_as_sent():
        raise InvalidArgument(field, "is wrong", reason="WRONG", metadata={"limit": "3"})
    error = caught.value
    assert (error.field, error.message, error.reason) == (sent, f"{sent}: is wrong", "WRONG")
    assert error.metadata == {"field": sent, "limit": "3"}
