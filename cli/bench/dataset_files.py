"""Requests from files in the published forms of ShareGPT, Mooncake and BurstGPT."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.cli.bench.config import BenchConfig, Dataset
from quire.cli.bench.workload import BenchRequest, options_of
from quire.client import AsyncClient, ModelInfo
from quire.simulator.calibrate import vocabulary_of
from quire.simulator.trace import TRACE_BLOCK_TOKENS, TraceRequest, read_trace

MIN_TOKENS = 4
"""Fewest tokens of a question and of a reply of ShareGPT; shorter ones are left out, as in vLLM."""


async def file_requests(config: BenchConfig, client: AsyncClient, model: ModelInfo) -> list[BenchRequest]:
    """Return the first requests of the dataset's file that fit the model, those for the warm-up first.

    Raises:
        ValueError: the file has another form, or too few requests.
    """
    wanted = config.num_warmups + config.num_requests
    assert config.dataset_path is not None
    if config.dataset is Dataset.SHAREGPT:
        requests = await _sharegpt_requests(config, config.dataset_path, client, model.max_model_len, wanted)
    else:
        read = read_trace if config.dataset is Dataset.MOONCAKE else read_burstgpt
        traced = [each for each in read(config.dataset_path) if _fits(each, model)][:wanted]
        vocabulary = vocabulary_of(model)
        requests = [_traced_request(config, each, vocabulary, index) for index, each in enumerate(traced)]
    if len(requests) < wanted:
        raise ValueError(
            f"{config.dataset_path} has {len(requests)} requests of at most {model.max_model_len} tokens; "
            f"{wanted} are needed"
        )
    return requests


def _fits(request: TraceRequest, model: ModelInfo) -> bool:
    return request.input_tokens + request.output_tokens <= model.max_model_len


def _traced_request(
    config: BenchConfig, request: TraceRequest, vocabulary: list[int], index: int
) -> BenchRequest:
    if request.block_ids:
        tokens = tokens_of(request, TRACE_BLOCK_TOKENS, vocabulary)
    else:
        tokens = random.Random(f"{config.seed} {index}").choices(vocabulary, k=request.input_tokens)
    return BenchRequest(tokens, options_of(config, request.output_tokens), request.arrival_seconds)


def tokens_of(request: TraceRequest, block_tokens: int, vocabulary: Sequence[int]) -> list[int]:
    """Return the tokens of a request's prompt, random ones that are the same in blocks of the same id."""
    tokens: list[int] = []
    for block_id in request.block_ids:
        tokens += random.Random(block_id).choices(vocabulary, k=block_tokens)
    return tokens[: request.input_tokens]


def read_burstgpt(path: Path) -> list[TraceRequest]:
    """Return the requests of a CSV file in the order of their arrival, without those that failed.

    Raises:
        ValueError: a row lacks a column or a number, or has one that is impossible.
    """
    requests = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                # By name, since the third published file has more columns in between.
                arrival, asked = float(row["Timestamp"]), int(row["Request tokens"])
                answered = int(row["Response tokens"])
                if not (math.isfinite(arrival) and min(asked, answered) >= 0):
                    raise ValueError("the time is not finite, or a number of tokens is negative")
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}:{number}: must have Timestamp, Request tokens, Response tokens: {error!r}"
                ) from error
            if asked and answered:  # a request that failed has no response tokens
                requests.append(TraceRequest(arrival, asked, answered, ()))
    return sorted(requests, key=lambda request: request.arrival_seconds)


def read_sharegpt(path: Path) -> list[tuple[str, str]]:
    """Return the first question of each conversation, with its reply.

    Raises:
        ValueError: the file has another form.
    """
    try:
        conversations = [each["conversations"] for each in json.loads(path.read_text(encoding="utf-8"))]
        pairs = [_first_pair(turns) for turns in conversations]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be a list of objects with conversations: {error!r}") from error
    return [pair for pair in pairs if pair is not None]


def _first_pair(turns: list[dict[str, Any]]) -> tuple[str, str] | None:
    for question, reply in pairwise(turns):
        if (question["from"], reply["from"]) == ("human", "gpt"):
            texts = question["value"], reply["value"]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a value is not text")
            return texts
    return None


async def _sharegpt_requests(
    config: BenchConfig, path: Path, client: AsyncClient, max_model_len: int, wanted: int
) -> list[BenchRequest]:
    """Return questions with room for as many tokens as their replies have."""
    requests: list[BenchRequest] = []
    for question, reply in read_sharegpt(path):
        if len(requests) == wanted:
            break
        asked, replied = len(await client.tokenize(question)), len(await client.tokenize(reply))
        if min(asked, replied) >= MIN_TOKENS and asked + replied <= max_model_len:
            requests.append(BenchRequest(question, options_of(config, replied)))
    return requests
