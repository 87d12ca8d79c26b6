"""Finds out whether a model runs over paged blocks, by running it: a wrong token is worse than an error.

transformers' attention interface covers many architectures, and some of them only in part: they keep state of
their own, drop the arguments that carry the block tables, or look back in ways that an attention function
cannot see. No list of names would stay right. So a model shows at load what it hands to attention, and that a
prompt in two chunks, beside another one, gives what the model gives without paging.
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
from quire.engine.kv_memory import KvMemory, KvShape
from quire.kernels.metadata import AttentionMetadata

_OBSERVER = "quire_observer"
_BLOCK_SIZE = 16
_FIRST_CHUNK, _PROMPT, _OTHER_PROMPT = 23, 40, 20
_TOLERANCE = {torch.float32: 0.01}
_HALF_TOLERANCE = 0.1
"""Most relative error of logits. A model that is run wrongly is wrong by about 1."""


class UnsupportedModelError(Exception):
    """The model cannot be served; the message says what it has that paging does not cover."""


class KvHeads(NamedTuple):
    """What attention keeps of a token in each layer, and how many tokens each layer looks back.

    Attributes:
        windows: tokens that a layer sees, None for all.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]


def observe_attention(module: torch.nn.Module) -> KvHeads:
    """Run one token through a model and look at what its layers give to attention.

    Raises:
        UnsupportedModelError: they do not all give keys and values of one shape, once each.
    """
    seen: list[tuple[int, torch.Size, torch.Size]] = []
    windows: list[int | None] = []

    def look(
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        sliding_window: int | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        windows.append(sliding_window)
        seen.append((getattr(layer, "layer_idx", -1), key.shape, value.shape))
        return query.new_zeros((*query.shape[:1], *query.shape[2:0:-1], value.shape[-1])), None

    AttentionInterface.register(_OBSERVER, look)
    AttentionMaskInterface.register(_OBSERVER, lambda *_, **__: None)
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
    _, num_kv_heads, _, head_dim = seen[0][1]
    return KvHeads(len(seen), num_kv_heads, head_dim, tuple(windows))


def check_paging(module: torch.nn.Module, heads: KvHeads, vocab_size: int) -> None:
    """Compare a model's logits over paged blocks with those of its own eager attention.

    Raises:
        UnsupportedModelError: they differ by more than rounding.
    """
    device, dtype = _device(module), next(module.parameters()).dtype
    tokens = torch.arange(1, _PROMPT + _OTHER_PROMPT + 1, device=device) * 7919 % vocab_size
    prompt, other = tokens[:_PROMPT], tokens[_PROMPT:]
    shape = KvShape(*heads[:2], _BLOCK_SIZE, heads.head_dim, dtype)
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
        # The median, since one token may go to another expert for a rounding error.
        error = float(_relative_error(paged.float(), expected.float()).median())
        if not error <= _TOLERANCE.get(dtype, _HALF_TOLERANCE):
            raise UnsupportedModelError(
                f"over paged blocks the logits of {name} differ from the model's own by {error:.0%}: "
                "it keeps something that attention does not see"
            )


def _run_chunks(
    module: torch.nn.Module, memory: KvMemory, chunks: list[tuple[int, torch.Tensor, list[int]]]
) -> torch.Tensor:
    """Return the logits of all tokens of (first position, tokens, block table), packed."""
    device = memory.blocks.device
    tables = torch.zeros((len(chunks), max(len(table) for _, _, table in chunks)), dtype=torch.int32)
    for row, (_, _, table) in enumerate(chunks):
        tables[row, : len(table)] = torch.tensor(table)
    lengths = [len(tokens) for _, tokens, _ in chunks]
    positions = [torch.arange(first, first + len(tokens)) for first, tokens, _ in chunks]
    slots = [
        tables[row][at // _BLOCK_SIZE] * _BLOCK_SIZE + at % _BLOCK_SIZE for row, at in enumerate(positions)
    ]
    metadata = AttentionMetadata(
        block_tables=tables.to(device),
        query_starts=torch.tensor([0, *lengths], device=device).cumsum(0).int(),
        seq_lens=torch.tensor([int(at[-1]) + 1 for at in positions], dtype=torch.int32, device=device),
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
    """Let a model use another attention for a while."""
    module.set_attn_implementation(implementation)  # type: ignore[operator]
    try:
        yield
    finally:
        module.set_attn_implementation(attention.IMPLEMENTATION)  # type: ignore[operator]


@contextmanager
def _refusing(problem: str) -> Iterator[None]:
    """Turn whatever foreign model code raises into a refusal."""
    try:
        yield
    except Exception as error:
        raise UnsupportedModelError(f"the model {problem}: {type(error).__name__}: {error}") from error


def _device(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device
