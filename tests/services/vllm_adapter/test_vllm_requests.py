"""Requests of ``vllm.grpc.engine``: what they come to mean, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from quire.protos import inference_pb2 as pb
from quire.services.errors import InvalidArgument
from quire.services.vllm_adapter.hand_off import hand_off, pull_source
from quire.services.vllm_adapter.requests import generation_from_proto


def request(params: dict[str, Any] | None = None, **fields: Any) -> vllm.GenerateRequest:
    values: dict[str, Any] = {"tokenized": vllm.TokenizedInput(input_ids=[5, 6]), **fields}
    sampling = vllm.SamplingParams(**(params or {}))
    return vllm.GenerateRequest(request_id="r", sampling_params=sampling, **values)


def test_what_is_absent_takes_the_defaults_of_quire() -> None:
    generation = generation_from_proto(request({"skip_special_tokens": True}))
    assert generation == pb.Generation(
        request_id="r",
        token_ids=pb.TokenIds(ids=[5, 6]),
        sampling=pb.SamplingParams(top_k=0, min_p=0.0),
        stopping=pb.StoppingParams(min_tokens=0),
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
            pb.ResponseFormat(grammar='start: "yes" | "a \\"b\\""'),
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
        (request({"logprobs": -1}), "sampling_params.logprobs"),
        (request({"prompt_logprobs": -1}), "sampling_params.prompt_logprobs"),
        (request({"logit_bias": {-1: 1.0}}), "sampling_params.logit_bias"),
    ],
)
def test_what_is_not_served_is_refused_by_name(refused: vllm.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        generation_from_proto(refused)
    assert caught.value.field == field


def test_a_hand_off_comes_back_as_a_source() -> None:
    source = pull_source(request(kv_transfer_params_json=hand_off("[::1]:50051", "epoch", 24)))
    assert source is not None
    assert (source.address, source.epoch, source.num_blocks) == ("[::1]:50051", "epoch", 24)


@pytest.mark.parametrize("members", [None, {}, {"do_remote_decode": True, "do_remote_prefill": False}])
def test_a_request_without_a_hand_off_has_no_source(members: dict[str, bool] | None) -> None:
    more = {} if members is None else {"kv_transfer_params_json": json.dumps(members)}
    assert pull_source(request(**more)) is None


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
    members = {**json.loads(hand_off("127.0.0.1:50051", "epoch", 24)), **change}
    with pytest.raises(InvalidArgument, match=next(iter(change))):
        pull_source(request(kv_transfer_params_json=json.dumps(members)))


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "null"])
def test_a_hand_off_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="kv_transfer_params_json"):
        pull_source(request(kv_transfer_params_json=text))
