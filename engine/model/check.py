"""Checks whether a model runs correctly over paged blocks, by running it at load time.

transformers' attention interface supports many architectures, but some only in part. They keep additional
state, drop the arguments with the block tables, or mask tokens in ways that an attention function cannot see.
A list of supported names would not stay correct. So the check records what a model passes to attention. It
then compares logits. A prompt in two chunks, batched with another prompt, must give the same logits as the
model without paging. The other prompt must also give the same logits when it is batched with a sequence at
the model's last positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from quire.engine.kv_cache.memory import KvMemory, dtype_name
from quire.engine.model.collectives import RanksError
from quire.engine.model.layers import attention
from quire.engine.model.layers.attention import PagedStep
from quire.engine.model.layers.latent_attention import latent_expansion
from quire.engine.model.layers.packed_linear import PackedLinear
from quire.engine.model.mask_check import MaskObserver, Window, mask_problem
from quire.engine.model.states import States, StateShape, with_states
from quire.engine.model.step_tensors import Forward, StepTensors
from quire.kernels.cpu.recurrence import Recurrence
from quire.kernels.metadata import AttentionMetadata
from quire.kvindex.kv_layout import KvShape

_OBSERVER = "quire_observer"
_ANY_STEP = object()
_BLOCK_SIZE = 16
_FIRST_CHUNK, _PROMPT, _OTHER_PROMPT = 23, 40, 20
_MOST_POSITIONS = 8192
"""Positions up to which a model's rotations are compared."""
_LAST_POSITION = 1 << 17
"""Largest position that is batched with a short prompt; models without a limit have no table of positions."""
_TOLERANCE = {torch.float32: 0.01}
_HALF_TOLERANCE = 0.1
"""Largest relative error of logits for 16-bit dtypes, and if linear layers round their inputs to 8 bits.

Wrong computations have errors of about 1.
"""


_NEEDS_LATENTS = (
    "its latent attention has keys and values of different sizes, so blocks must keep its latents: "
    "this needs a kv_b_proj without bias"
)


class UnsupportedModelError(Exception):
    """The model cannot be served; the message says which of its features paging does not cover."""


class AttentionCall(NamedTuple):
    """What a layer passes to attention in addition to queries, keys and values.

    Attributes:
        window: how many tokens a token attends to; None means all.
        is_chunked: whether a token attends to its chunk, which is as large as a window, up to itself.
        scale: factor of the dot products.
        softcap: cap of the scores; None if there is none.
        sinks: a logit for each head that has no value; None if there is none.
    """

    window: int | None
    is_chunked: bool
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None


class KvHeads(NamedTuple):
    """The shape of the keys and values of a token, and how each layer calls attention.

    Attributes:
        num_layers: number of calls of attention, each of which has its own KV blocks.
        num_kv_heads, head_dim: those of the memory of a layer, which is large enough for each layer.
        are_alike: whether all keys and values have this shape.
        states: the states of further layers, which keep no keys and values.
        latent_dim: elements of a latent, see ``KvShape``; 0 if layers keep keys and values.
        arithmetic: name of attention's order of sums on the CPU.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    calls: tuple[AttentionCall, ...]
    latent_dim: int = 0
    are_alike: bool = True
    states: StateShape | None = None
    arithmetic: str | None = None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many tokens a token attends to; None means all."""
        return tuple(call.window for call in self.calls)


def observe_attention(module: torch.nn.Module, config: Any, num_positions: int) -> KvHeads:
    """Run one token through a model and return the shapes that its layers pass to attention.

    Args:
        module: the model.
        config: the configuration of the text model.
        num_positions: number of positions for which the layers' masks are checked.

    Raises:
        UnsupportedModelError: no layer calls attention, or the mask of a layer is not its causal window.
    """
    seen: list[_Observed] = []
    recurrences: dict[torch.nn.Module, Recurrence] = {}
    observer = MaskObserver()
    AttentionInterface.register(_OBSERVER, partial(_observe, seen, recurrences))
    AttentionMaskInterface.register(_OBSERVER, observer)
    with (
        _attention(module, _OBSERVER),
        refusing("cannot run with another attention"),
        torch.inference_mode(),
    ):
        token = torch.zeros((1, 1), dtype=torch.long, device=_device(module))
        module(input_ids=token, use_cache=False, paged_step=_ANY_STEP)
    states = _number_states(recurrences)
    if states is not None and not seen:
        return _with_states_only(states)
    arithmetic: str | None = getattr(module, "arithmetic", None)
    _connect([each.layer for each in seen], arithmetic)
    if droppers := dict.fromkeys(each.layer for each in seen if each.drops_step):
        attention.pass_step_to(module, droppers)
    if len({each.latent_dim for each in seen}) > 1:
        raise UnsupportedModelError("only some of its layers have latent attention")
    calls = tuple(each.call for each in seen)
    with refusing("has attention masks that cannot be checked"):
        functions = [observer.function_of(each.mask) for each in seen]
        windows = [Window(call.window, call.is_chunked) for call in calls]
        problem = mask_problem(windows, functions, _types_of_calls(seen, config), num_positions)
    if problem is not None:
        raise UnsupportedModelError(f"{problem}: paged attention would see other tokens")
    # Freed blocks are left out of tables if no layer sees them, and chunks depend on what is left out.
    if any(call.is_chunked for call in calls) and all(call.window is not None for call in calls):
        raise UnsupportedModelError("layers attend within chunks, and none sees all tokens")
    sizes = {(each.key[1], shape[3]) for each in seen for shape in (each.key, each.value)}
    num_kv_heads = max(heads for heads, _ in sizes)
    head_dim = max(-(-heads * size // num_kv_heads) for heads, size in sizes)
    if states is not None and any(call.window for call in calls):
        raise UnsupportedModelError("it has layers with a state beside layers with a window")
    latent_dim = seen[0].latent_dim
    return KvHeads(len(seen), num_kv_heads, head_dim, calls, latent_dim, len(sizes) == 1, states, arithmetic)


class _Observed(NamedTuple):
    """How a layer called attention: with a mask and with keys and values of these shapes."""

    layer: torch.nn.Module
    call: AttentionCall
    mask: object
    key: torch.Size
    value: torch.Size
    latent_dim: int
    drops_step: bool


def _observe(
    seen: list[_Observed],
    recurrences: dict[torch.nn.Module, Recurrence],
    layer: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    *_: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_chunked: bool = False,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged_step: object = None,
    recurrence: Recurrence | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Record a call of attention, and return zeros of the shape that the layer expects."""
    if recurrence is not None:
        recurrences[layer] = recurrence
        return query.new_zeros((*query.shape[:2], recurrence.num_outputs)), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(sliding_window, is_chunked, scale, softcap, s_aux)
    size, value_shape, latent_dim = value.shape[-1], value.shape, 0
    if (expansion := latent_expansion(layer)) is not None:
        # The value of a latent is the beginning of its row, which is the key.
        size, value_shape, latent_dim = expansion.value_dim, key.shape, expansion.latent_dim
    elif hasattr(layer, "expand_kv") and value_shape != key.shape:
        raise UnsupportedModelError(_NEEDS_LATENTS)
    seen.append(
        _Observed(layer, call, attention_mask, key.shape, value_shape, latent_dim, paged_step is None)
    )
    return query.new_zeros((*query.shape[:1], *query.shape[2:0:-1], size)), None


def _types_of_calls(seen: Sequence[_Observed], config: Any) -> list[str] | None:
    """Return the configured type of the layer of each call of attention; None if layers have no types."""
    types = getattr(config, "layer_types", None)
    numbers = {layer: number for number, layer in enumerate(dict.fromkeys(each.layer for each in seen))}
    if types is None or len(types) != len(numbers):
        return types
    return [types[numbers[each.layer]] for each in seen]


def _connect(layers: Sequence[torch.nn.Module], arithmetic: str | None) -> None:
    """Tell the layers that call attention its arithmetic, and the numbers of their calls.

    The numbers are their places in the memory.

    Raises:
        UnsupportedModelError: there is no such layer.
    """
    if not layers:
        raise UnsupportedModelError("the model has no layer that calls transformers' attention interface")
    for layer in layers:
        layer.arithmetic = arithmetic  # type: ignore[assignment]
        layer.kv_layers = [number for number, each in enumerate(layers) if each is layer]  # type: ignore[assignment]


def _number_states(recurrences: dict[torch.nn.Module, Recurrence]) -> StateShape | None:
    """Tell the layers with a state their numbers; return the shape of the states, None if there are none."""
    shapes = {(each.num_rows, each.row_size) for each in recurrences.values()}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"the states of its layers differ in shape: {sorted(shapes)}")
    for number, layer in enumerate(recurrences):
        layer.state_number = number  # type: ignore[assignment]
    return next((StateShape(len(recurrences), *shape) for shape in shapes), None)


def _with_states_only(states: StateShape) -> KvHeads:
    """Return the heads of a model without attention.

    Its blocks have the keys and values of one layer, which nobody writes, since states are stored in units
    of a layer. They are of such a size that about 512 units with 16 tokens hold all states.
    """
    num_floats = states.num_layers * states.num_rows * states.row_size
    return KvHeads(1, 1, -(-num_floats // (512 * 32 * 16)) * 16, (), states=states)


def check_paging(module: torch.nn.Module, heads: KvHeads, vocab_size: int, num_positions: int) -> None:
    """Compare a model's logits over paged blocks with those of its own eager attention.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding errors, or a prompt's logits depend on
            the number of computed tokens of another sequence in the step.
    """
    device, dtype = _device(module), next(module.parameters()).dtype
    tokens = torch.arange(1, _PROMPT + _OTHER_PROMPT + 1, device=device) * 7919 % vocab_size
    prompt, other = tokens[:_PROMPT], tokens[_PROMPT:]
    memory = _memory(heads, dtype, device)
    with torch.inference_mode():
        with _attention(module, attention.IMPLEMENTATION), refusing("cannot run over paged blocks"):
            forward = _forward(module, memory, heads.states)
            first = forward(_chunks([(0, prompt[:_FIRST_CHUNK], [4, 1, 2]), (0, other, [5, 3])]))
            rest = forward(_chunks([(_FIRST_CHUNK, prompt[_FIRST_CHUNK:], [4, 1, 2])]))
            # This repeats the step of the first chunk at the last positions, with the same shapes.
            shift = min(num_positions, _LAST_POSITION) - _FIRST_CHUNK
            chunks = _chunks([(0, prompt[:_FIRST_CHUNK], [4, 1, 2]), (0, other, [5, 3])], [max(0, shift), 0])
            beside_last = forward(chunks)
        with _attention(module, "eager"), refusing("cannot run with eager attention, to be compared with"):
            whole, beside = (
                module(input_ids=each[None], use_cache=False).logits[0] for each in (prompt, other)
            )
            kept = module(input_ids=other[None], use_cache=False, logits_to_keep=tokens[:1] * 0).logits
    if kept.shape[1] != 1:
        raise UnsupportedModelError("it ignores logits_to_keep, which names the tokens that get logits")
    parts = {
        "a prompt": (first[:_FIRST_CHUNK], whole[:_FIRST_CHUNK]),
        "a prompt beside another": (first[_FIRST_CHUNK:], beside),
        "the second chunk of a prompt": (rest, whole[_FIRST_CHUNK:]),
    }
    tolerance = _HALF_TOLERANCE if _rounds_inputs(module) else _TOLERANCE.get(dtype, _HALF_TOLERANCE)
    for name, (paged, expected) in parts.items():
        error = _relative_error(paged, expected)
        if not error <= tolerance and not expected.isfinite().all():
            raise UnsupportedModelError(
                f"the logits of {name} are not finite: the weights are damaged, or do not fit {dtype}"
            )
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"over paged blocks the logits of {name} differ from the model's own by {error:.0%}: "
                "it keeps something that attention does not see"
            )
    error = _relative_error(beside_last[_FIRST_CHUNK:], first[_FIRST_CHUNK:])
    if not error <= tolerance / 100:
        raise UnsupportedModelError(
            f"the logits of a prompt differ by {error:.2%} next to a sequence at the last positions: "
            "something depends on the longest sequence of the batch, so cached keys would depend on others"
        )


def _rounds_inputs(module: torch.nn.Module) -> bool:
    linears = (each for each in module.modules() if isinstance(each, PackedLinear))
    return any(each.packed.rounds_inputs for each in linears)


@torch.inference_mode()
def runs_alike(
    module: torch.nn.Module,
    heads: KvHeads,
    vocab_size: int,
    num_positions: int,
    other: Callable[[KvMemory], Forward],
) -> bool:
    """Return whether another implementation of a model's steps gives the same bits as its modules.

    The first step has a chunk of a prompt. The next one has the rest of it, together with another prompt at
    the last positions. The others have single tokens.
    """
    device, dtype = _device(module), next(module.parameters()).dtype
    tokens = torch.arange(1, _PROMPT + _OTHER_PROMPT + 1, device=device) * 7919 % vocab_size
    prompt, second = tokens[:_PROMPT], tokens[_PROMPT:]
    shift = max(0, min(num_positions, _MOST_POSITIONS) - _OTHER_PROMPT)
    last = _OTHER_PROMPT - 1
    steps = [
        _chunks([(0, prompt[:_FIRST_CHUNK], [4, 1, 2])]),
        _chunks([(_FIRST_CHUNK, prompt[_FIRST_CHUNK:-1], [4, 1, 2]), (0, second[:-1], [5, 3])], [0, shift]),
        _chunks([(_PROMPT - 1, prompt[-1:], [4, 1, 2]), (last, second[-1:], [5, 3])], [0, shift]),
    ]
    memory, others_memory = (_memory(heads, dtype, device) for _ in range(2))
    forward, others_forward = _forward(module, memory, heads.states), other(others_memory)
    # What a module keeps of a step is out of date when the other implementation begins.
    expected = [forward(each) for each in steps]
    if heads.states is not None:
        steps = [each._replace(metadata=_in_frames(each.metadata, others_memory)) for each in steps]
    return all(
        torch.equal(others_forward(each).to(dtype), logits)
        for each, logits in zip(steps, expected, strict=True)
    )


def _forward(module: torch.nn.Module, memory: KvMemory, states_shape: StateShape | None = None) -> Forward:
    states = None if states_shape is None else States(memory, states_shape)

    def forward(step: StepTensors) -> torch.Tensor:
        metadata = step.metadata if states is None else _in_frames(step.metadata, memory)
        output = module(
            input_ids=step.input_ids[None],
            position_ids=step.positions[None],
            paged_step=PagedStep(metadata, memory.layers, memory.scales, count(), memory.frames, states),
            use_cache=False,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    return forward


def _memory(heads: KvHeads, dtype: torch.dtype, device: torch.device) -> KvMemory:
    num_layers, num_kv_heads, head_dim, _, latent_dim, _, states, _ = heads
    shape = KvShape(num_layers, num_kv_heads, _BLOCK_SIZE, head_dim, dtype_name(dtype), latent_dim=latent_dim)
    return KvMemory(shape if states is None else with_states(shape, states), 6, device, is_pool=False)


def _in_frames(metadata: AttentionMetadata, memory: KvMemory) -> AttentionMetadata:
    """Return the metadata of a step over memory in which the frames of a block follow each other."""
    number, size = memory.shape.num_frames, memory.shape.block_size
    frames, slots = torch.arange(number, dtype=torch.int32), metadata.slot_mapping
    return metadata._replace(
        block_tables=metadata.block_tables * number + frames[:, None, None],
        slot_mapping=(slots // size * number + frames[:, None]) * size + slots % size,
    )


def _chunks(
    chunks: list[tuple[int, torch.Tensor, list[int]]], shifts: list[int] | None = None
) -> StepTensors:
    """Return a step of chunks (first index, tokens, block table) that gives logits for all tokens.

    Args:
        chunks: the chunks.
        shifts: difference between the positions and the indices of each chunk's tokens.
    """
    device = chunks[0][1].device
    tables = torch.zeros((len(chunks), max(len(table) for _, _, table in chunks)), dtype=torch.int32)
    for row, (_, _, table) in enumerate(chunks):
        tables[row, : len(table)] = torch.tensor(table)
    lengths = [len(tokens) for _, tokens, _ in chunks]
    indices = [torch.arange(first, first + len(tokens)) for first, tokens, _ in chunks]
    positions = [each + shift for each, shift in zip(indices, shifts or [0] * len(chunks), strict=True)]
    slots = [
        tables[row][each // _BLOCK_SIZE] * _BLOCK_SIZE + each % _BLOCK_SIZE
        for row, each in enumerate(indices)
    ]
    metadata = AttentionMetadata(
        block_tables=tables,
        query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
        seq_lens=torch.tensor([int(each[-1]) + 1 for each in indices], dtype=torch.int32),
        slot_mapping=torch.cat(slots).long(),
    )
    tokens = torch.cat([tokens for _, tokens, _ in chunks])
    step = StepTensors(tokens, torch.cat(positions), torch.arange(len(tokens)), metadata)
    return step.to(device)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the median of the tokens' errors: rounding may route a single token to another expert."""
    expected = expected.float()
    errors = (actual.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(errors.median())


@contextmanager
def _attention(module: torch.nn.Module, implementation: str) -> Iterator[None]:
    """Make a model use another attention implementation within the block."""
    module.set_attn_implementation(implementation)  # type: ignore[operator]
    try:
        yield
    finally:
        module.set_attn_implementation(attention.IMPLEMENTATION)  # type: ignore[operator]


@contextmanager
def refusing(problem: str) -> Iterator[None]:
    """Turn any other exception of the model's code into an UnsupportedModelError."""
    try:
        yield
    except (RanksError, UnsupportedModelError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"the model {problem}: {type(error).__name__}: {error}") from error


def _device(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device
