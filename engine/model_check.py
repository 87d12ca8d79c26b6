"""Checks whether a model runs correctly over paged blocks, by running it at load time.

transformers' attention interface covers many architectures, but some of them only in part: they keep state of
their own, drop the arguments that carry the block tables, or attend in ways that an attention function cannot
see. A list of supported names would not stay correct. So the check records what a model passes to attention.
It then compares logits: a prompt in two chunks, batched with another prompt, must give the same logits as the
model without paging.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from quire.engine import attention
from quire.engine.attention import PagedStep
from quire.engine.kv_memory import KvMemory, dtype_name
from quire.engine.mask_check import MaskObserver, mask_problem
from quire.kernels.metadata import AttentionMetadata
from quire.kvindex.kv_layout import KvShape

_OBSERVER = "quire_observer"
_BLOCK_SIZE = 16
_FIRST_CHUNK, _PROMPT, _OTHER_PROMPT = 23, 40, 20
_TOLERANCE = {torch.float32: 0.01}
_HALF_TOLERANCE = 0.1
"""Largest relative error of logits for 16-bit dtypes. A model that is run wrongly has an error of about 1."""


class UnsupportedModelError(Exception):
    """The model cannot be served; the message says which of its features paging does not cover."""


class KvHeads(NamedTuple):
    """The shape of the keys and values of a token in each layer, and the window of each layer.

    Attributes:
        windows: for each layer, how many tokens a token attends to; None means all.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]


def observe_attention(module: torch.nn.Module, config: Any, num_positions: int) -> KvHeads:
    """Run one token through a model and return the shapes that its layers pass to attention.

    Args:
        module: the model.
        config: the configuration of the text model.
        num_positions: number of positions for which the layers' masks are checked.

    Raises:
        UnsupportedModelError: the layers do not each call attention once, with keys and values of one shape,
            or the mask of a layer is not its causal window.
    """
    seen: list[tuple[int, torch.Size, torch.Size]] = []
    windows: list[int | None] = []
    masks: list[object] = []
    observer = MaskObserver()

    def look(
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object = None,
        *_: Any,
        sliding_window: int | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        windows.append(sliding_window)
        masks.append(attention_mask)
        seen.append((getattr(layer, "layer_idx", -1), key.shape, value.shape))
        return query.new_zeros((*query.shape[:1], *query.shape[2:0:-1], value.shape[-1])), None

    AttentionInterface.register(_OBSERVER, look)
    AttentionMaskInterface.register(_OBSERVER, observer)
    with (
        _attention(module, _OBSERVER),
        _refusing("cannot run with another attention"),
        torch.inference_mode(),
    ):
        module(input_ids=torch.zeros((1, 1), dtype=torch.long, device=_device(module)), use_cache=False)
    if not seen:
        raise UnsupportedModelError("the model has no layer that calls transformers' attention interface")
    if [layer for layer, _, _ in seen] != list(range(len(seen))):
        raise UnsupportedModelError(
            f"attention is called by the layers {[layer for layer, _, _ in seen]}: each must call it once"
        )
    shapes = {(tuple(key), tuple(value)) for _, key, value in seen}
    if len(shapes) > 1 or any(key != value for key, value in shapes):
        raise UnsupportedModelError(f"keys and values differ in shape, within or between layers: {shapes}")
    with _refusing("has attention masks that cannot be checked"):
        functions = [observer.function_of(mask) for mask in masks]
        problem = mask_problem(windows, functions, getattr(config, "layer_types", None), num_positions)
    if problem is not None:
        raise UnsupportedModelError(f"{problem}: paged attention would see other tokens")
    _, num_kv_heads, _, head_dim = seen[0][1]
    return KvHeads(len(seen), num_kv_heads, head_dim, tuple(windows))


def check_paging(module: torch.nn.Module, heads: KvHeads, vocab_size: int) -> None:
    """Compare a model's logits over paged blocks with those of its own eager attention.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding errors.
    """
    device, dtype = _device(module), next(module.parameters()).dtype
    tokens = torch.arange(1, _PROMPT + _OTHER_PROMPT + 1, device=device) * 7919 % vocab_size
    prompt, other = tokens[:_PROMPT], tokens[_PROMPT:]
    shape = KvShape(*heads[:2], _BLOCK_SIZE, heads.head_dim, dtype_name(dtype))
    memory = KvMemory(shape, 6, device)
    with torch.inference_mode():
        with _attention(module, attention.IMPLEMENTATION), _refusing("cannot run over paged blocks"):
            first = _run_chunks(module, memory, [(0, prompt[:_FIRST_CHUNK], [4, 1, 2]), (0, other, [5, 3])])
            rest = _run_chunks(module, memory, [(_FIRST_CHUNK, prompt[_FIRST_CHUNK:], [4, 1, 2])])
        with _attention(module, "eager"), _refusing("cannot run with eager attention, to be compared with"):
            whole, beside = (
                module(input_ids=each[None], use_cache=False).logits[0] for each in (prompt, other)
            )
    parts = {
        "a prompt": (first[:_FIRST_CHUNK], whole[:_FIRST_CHUNK]),
        "a prompt beside another": (first[_FIRST_CHUNK:], beside),
        "the second chunk of a prompt": (rest, whole[_FIRST_CHUNK:]),
    }
    for name, (paged, expected) in parts.items():
        # Use the median, since a rounding error may route a single token to another expert.
        error = float(_relative_error(paged.float(), expected.float()).median())
        if not error <= _TOLERANCE.get(dtype, _HALF_TOLERANCE):
            raise UnsupportedModelError(
                f"over paged blocks the logits of {name} differ from the model's own by {error:.0%}: "
                "it keeps something that attention does not see"
            )


def _run_chunks(
    module: torch.nn.Module, memory: KvMemory, chunks: list[tuple[int, torch.Tensor, list[int]]]
) -> torch.Tensor:
    """Run chunks, given as (first position, tokens, block table), in one step.

    Returns:
        The logits of all tokens, packed: ``[num_tokens, vocab_size]``.
    """
    device = memory.blocks.device
    tables = torch.zeros((len(chunks), max(len(table) for _, _, table in chunks)), dtype=torch.int32)
    for row, (_, _, table) in enumerate(chunks):
        tables[row, : len(table)] = torch.tensor(table)
    lengths = [len(tokens) for _, tokens, _ in chunks]
    positions = [torch.arange(first, first + len(tokens)) for first, tokens, _ in chunks]
    slots = [
        tables[row][each // _BLOCK_SIZE] * _BLOCK_SIZE + each % _BLOCK_SIZE
        for row, each in enumerate(positions)
    ]
    metadata = AttentionMetadata(
        block_tables=tables.to(device),
        query_starts=torch.tensor([0, *lengths], device=device).cumsum(0).int(),
        seq_lens=torch.tensor([int(each[-1]) + 1 for each in positions], dtype=torch.int32, device=device),
        slot_mapping=torch.cat(slots).long().to(device),
    )
    output = module(
        input_ids=torch.cat([tokens for _, tokens, _ in chunks])[None],
        position_ids=torch.cat(positions).to(device)[None],
        paged_step=PagedStep(metadata, memory.layers, memory.scales),
        use_cache=False,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    error: torch.Tensor = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    return error


@contextmanager
def _attention(module: torch.nn.Module, implementation: str) -> Iterator[None]:
    """Make a model use another attention implementation within the block."""
    module.set_attn_implementation(implementation)  # type: ignore[operator]
    try:
        yield
    finally:
        module.set_attn_implementation(attention.IMPLEMENTATION)  # type: ignore[operator]


@contextmanager
def _refusing(problem: str) -> Iterator[None]:
    """Turn any exception of the model's code into an UnsupportedModelError."""
    try:
        yield
    except Exception as error:
        raise UnsupportedModelError(f"the model {problem}: {type(error).__name__}: {error}") from error


def _device(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device
