"""Steps as one compiled program on the CPU, instead of a call of each module of each layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.check import Forward, KvHeads, runs_alike
from quire.engine.model.collectives import Collectives
from quire.engine.model.compiled_states import StateLayers
from quire.engine.model.layer_records import columns, fill_layer, first_column, linear_record, norm_record
from quire.engine.model.layers.attention import PagedStep
from quire.engine.model.layers.packed_linear import PackedEmbedding, PackedLinear
from quire.engine.model.layers.parallel_layers import RowLinear
from quire.engine.model.state_recipe import StateRecipe
from quire.engine.model.states import States
from quire.engine.model.step_recipe import (
    AttentionRecipe,
    NoRecipeError,
    StepRecipe,
    read_recipe,
    shared_expert,
)
from quire.engine.model.step_tensors import StepTensors
from quire.kernels.cpu import attention, attention_program, threads
from quire.kernels.cpu.attention_tiles import (
    AttentionShape,
    DecodeTiles,
    make_parts,
    make_tiles,
    one_part_each,
    part_tokens,
)
from quire.kernels.cpu.exchange import EXCHANGE
from quire.kernels.cpu.intrinsics import STORAGE
from quire.kernels.cpu.products.linear import UNIT
from quire.kernels.cpu.products.low_rank import SLOTS
from quire.kernels.cpu.products.packed_product import first_of_form, form_of_inputs
from quire.kernels.cpu.step import program, records
from quire.kernels.metadata import AttentionMetadata
from quire.kernels.quantization import KV_FORMATS

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[Any]]

_MIN_THREADED_WORK = 1 << 19
"""With fewer multiplications in a step than this, waking up threads costs more time than it saves."""
_FEWEST_POSITIONS = 512
_MOST_KEPT_LOGITS = 256
"""Memory for this number of logits rows is reused from step to step."""
_KEPT = {"hidden": "qkv", "attended": "queries"}
"""Buffers of the tokens that the last layer computes, each with the free buffer for its copy."""
_CACHE_LINE = 8
"""Counters that fill a cache line."""
_FIRST_STATE_COUNTER = 5
"""The first of a layer's counters that belong to the kernels of its state."""
_KV_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}


class CompiledStep:
    """Runs any step of one model over one memory.

    Args:
        recipe: description of the model's computation.
        heads: how it calls attention.
        memory: its KV blocks.
        vocab_size: number of logits.
        collectives: those of the ranks that the model is divided among; None if there is one process.
    """

    def __init__(
        self,
        recipe: StepRecipe,
        heads: KvHeads,
        memory: KvMemory,
        vocab_size: int,
        collectives: Collectives | None = None,
    ) -> None:
        self._recipe = recipe
        self._collectives = collectives
        self._dtype = _dtype(recipe)
        self._vocab_size = vocab_size
        self._modules = [
            (number, is_mlp, part)
            for number, layer in enumerate(recipe.layers)
            for is_mlp, part in ((False, layer.attention), (True, layer.mlp))
            if isinstance(part, torch.nn.Module)
        ]
        self._has_mixers = not all(is_mlp for _, is_mlp, _ in self._modules)
        self._states = None if heads.states is None else States(memory, heads.states)
        self._memory = memory
        self._num_heads, self._shape = _heads(recipe, heads, memory.shape.block_size)
        self._decode_tiles = DecodeTiles(self._shape)
        self._part_tokens = part_tokens(
            self._shape.group, heads.head_dim + (heads.latent_dim or heads.head_dim)
        )
        # One program fits all weights whose inputs have the same form, unless it reads embeddings from them.
        stored = first_of_form(_linears(recipe)[0].packed.stored)
        head_stored = recipe.head.packed.stored
        if not isinstance(recipe.embedding, PackedEmbedding):
            head_stored = first_of_form(head_stored)
        self._program = program.program(STORAGE[self._dtype], stored, head_stored)
        self._work_per_token = _num_weights(recipe)
        num_layers = len(recipe.layers)
        num_linear = records.COUNTERS_PER_LAYER * num_layers + 1
        self._counters = np.zeros(2 * _CACHE_LINE + num_linear + num_layers, np.int64)
        self._step = np.zeros(2, records.STEP)
        self._step_address = self._step.ctypes.data
        self._layers = np.zeros(num_layers, records.LAYER)
        self._attention = np.zeros(num_layers, attention_program.ARGUMENTS)
        # The program contains only addresses, so these references keep the memory alive.
        self._held: list[Any] = []
        self._adapted: list[Any] = []
        self._parts: list[Array] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._tables: list[tuple[torch.Tensor, ...]] = []
        self._tables32 = self._tables
        self._keeps_all_rows = True
        self._num_positions = 0
        attentions = [layer.attention for layer in recipe.layers]
        self._frames = np.array(
            [memory.frames[each.number] if isinstance(each, AttentionRecipe) else 0 for each in attentions]
        )
        self._num_sums = sum(isinstance(each, RowLinear) for each in _linears(recipe))
        self._fill_layers(heads, memory)
        self._fill_step(heads, memory)
        self._state_layers = self._make_state_layers()
        self._grow_tables(_FEWEST_POSITIONS)

    def run(self, tensors: StepTensors) -> torch.Tensor:
        """Run a step; return its logits ``[num_logits, vocab_size]``, valid until the next step."""
        metadata = tensors.metadata
        num_tokens, num_kept = tensors.input_ids.shape[0], tensors.logit_rows.shape[0]
        num_logits = tensors.num_logits
        self._grow_tables(int(tensors.positions.max()) + 1)
        self._grow_buffers(max(num_tokens, num_kept))
        logits = self._logits(num_logits)
        steps = self._step
        steps["num_tokens"] = num_tokens, num_kept
        steps["num_logits"] = num_logits
        steps["token_ids"] = tensors.input_ids.data_ptr()
        steps["positions"] = tensors.positions.data_ptr()
        self._layers["slots"] = _entry_addresses(metadata.slot_mapping, 1, self._frames)
        steps["kept_rows"] = tensors.logit_rows.data_ptr()
        steps["logits"] = logits.data_ptr() + 4 * first_column(self._recipe.head)
        if self._collectives is not None:
            steps["last_round"] = self._collectives.num_rounds
        self._place_adapters(tensors)
        keeps_all_rows = metadata.max_new_tokens == 1 and num_kept == num_tokens
        if keeps_all_rows != self._keeps_all_rows:
            self._place_kept_rows(keeps_all_rows)
        if self._recipe.attentions:
            self._place_attention(tensors)
        if self._state_layers is not None:
            self._state_layers.place(metadata, num_tokens)
        work = num_tokens * self._work_per_token
        num_threads = torch.get_num_threads() if work >= _MIN_THREADED_WORK else 1
        self._run_program(tensors, num_threads)
        if self._collectives is not None:
            # With adapters, the ranks gather the inputs of each of these layers too.
            self._collectives.num_rounds += self._num_sums * (1 if tensors.adapters is None else 2)
            self._collectives.meet()
        chosen = logits[:, : self._vocab_size]
        finish = self._recipe.finish
        return chosen if finish is None else finish(chosen.to(self._dtype))

    def _run_program(self, tensors: StepTensors, num_threads: int) -> None:
        """Run the program, and between its parts the modules."""
        first_layer, begins_with_mlp = 0, False
        options = self._options(tensors) if self._has_mixers else {}
        for number, is_mlp, module in self._modules:
            self._run_part(first_layer, begins_with_mlp, num_threads)
            is_last = number == len(self._layers) - 1
            if is_mlp:
                first_layer, begins_with_mlp = number + 1, False
                shared = None if self._recipe.layers[number].shared is None else shared_expert(module)
                self._run_mlp(module, shared, len(tensors.logit_rows if is_last else tensors.input_ids))
            else:
                first_layer, begins_with_mlp = number, True
                self._run_mixer(module, options, tensors.logit_rows if is_last else None)
        self._run_part(first_layer, begins_with_mlp, num_threads)

    def _options(self, tensors: StepTensors) -> dict[str, Any]:
        """Return the arguments of the modules that have the place of attention."""
        memory, positions = self._memory, tensors.positions
        tables = self._tables[0] if len(self._tables) == 1 else ()
        return {
            "position_embeddings": tuple(each[positions][None] for each in tables) or None,
            "attention_mask": None,
            "position_ids": positions[None],
            "past_key_values": None,
            "paged_step": PagedStep(
                tensors.metadata, memory.layers, memory.scales, iter(()), memory.frames, self._states
            ),
        }

    def _run_mixer(
        self, module: torch.nn.Module, options: dict[str, Any], kept_rows: torch.Tensor | None
    ) -> None:
        """Run what a layer has in the place of attention, and keep some rows; None keeps all."""
        paged_step = options["paged_step"]
        inputs = self._inputs(len(options["position_ids"][0]))
        numbers = iter(getattr(module, "kv_layers", ()))
        outputs = module(
            hidden_states=inputs, **{**options, "paged_step": paged_step._replace(numbers=numbers)}
        )
        rows = _rows(outputs)
        if kept_rows is not None and not self._keeps_all_rows:
            rows, size = rows[kept_rows], inputs.shape[-1]
            copies = self._buffers[_KEPT["hidden"]].view(-1)[: len(rows) * size]
            copies.view(-1, size).copy_(self._buffers["hidden"][kept_rows])
        self._update(rows)

    def _run_mlp(self, module: torch.nn.Module, shared: torch.nn.Module | None, num_rows: int) -> None:
        """Run a module of experts; the program has computed the one that is ``shared`` by all tokens."""
        if not num_rows:
            return
        inputs = self._inputs(num_rows)
        computed = self._buffers["update"][:num_rows, : inputs.shape[-1]].to(self._dtype)
        with _returning(computed, shared):
            self._update(_rows(module(inputs)))

    def _inputs(self, num_rows: int) -> torch.Tensor:
        """Return the inputs of a module, ``[1, num_rows, hidden_size]``."""
        return self._buffers["normed"][:num_rows].to(self._dtype)[None]

    def _update(self, rows: torch.Tensor) -> None:
        """Keep what a module adds to the residual stream."""
        self._buffers["update"][: rows.shape[0], : rows.shape[1]] = rows

    def _run_part(self, first_layer: int, begins_with_mlp: bool, num_threads: int) -> None:
        self._counters.fill(0)
        self._step["first_layer"], self._step["begins_with_mlp"] = first_layer, begins_with_mlp
        threads.run(self._program.address, self._step_address, num_threads)

    def hidden_states(self, tensors: StepTensors) -> torch.Tensor:
        """Return float32 ``[num_hidden, hidden_size]`` of the step that has just run."""
        return self._buffers["normed"][tensors.num_logits : tensors.logit_rows.shape[0]]

    def _place_attention(self, tensors: StepTensors) -> None:
        """Tell the program's calls of attention which sequences there are."""
        metadata, calls = tensors.metadata, self._attention
        calls["block_tables"] = _entry_addresses(metadata.block_tables, 2, self._frames)
        calls["table_width"] = metadata.block_tables.shape[-1]
        calls["query_starts"] = metadata.query_starts.data_ptr()
        calls["seq_lens"] = metadata.seq_lens.data_ptr()
        parts, tiles = last_parts, last_tiles = self._tiles(metadata)
        if not self._keeps_all_rows and len(tensors.logit_rows) == len(metadata.query_starts) - 1:
            last_parts = _one_row_each(tensors.logit_rows, metadata.query_starts)
            last_tiles = one_part_each(len(tensors.logit_rows))
        self._parts = [parts, tiles, last_parts, last_tiles]
        calls["parts"][:-1], calls["parts"][-1] = parts.ctypes.data, last_parts.ctypes.data
        calls["tiles"][:-1], calls["tiles"][-1] = tiles.ctypes.data, last_tiles.ctypes.data
        calls["num_programs"][:-1] = len(tiles) * self._shape.num_kv_heads
        calls["num_programs"][-1] = len(last_tiles) * self._shape.num_kv_heads

    def _tiles(self, metadata: AttentionMetadata) -> tuple[Array, Array]:
        """Return the parts and tiles of a step."""
        starts = metadata.query_starts.numpy()
        # Sequences that share a block share all its frames, so the first frame is enough.
        sequences = (metadata.of_frame(0).block_tables.numpy(), starts, metadata.seq_lens.numpy())
        num_threads = torch.get_num_threads()
        if metadata.slot_mapping.shape[-1] == len(starts) - 1:
            return self._decode_tiles.of(*sequences, num_threads)
        parts = make_parts(starts, np.diff(starts), self._part_tokens)
        return make_tiles(parts, *sequences, self._shape, num_threads)

    def _place_kept_rows(self, keeps_all_rows: bool) -> None:
        """Give the program its second step, which uses the first step's buffers, or free ones for copies."""
        self._keeps_all_rows = keeps_all_rows
        for name, copies in _KEPT.items():
            self._step[1][name] = self._step[0][name if keeps_all_rows else copies]

    def _place_adapters(self, tensors: StepTensors) -> None:
        """Tell the program which tokens have which adapters; the second step has only the kept tokens."""
        adapters = tensors.adapters
        if adapters is None:
            self._step["adapted"]["num_rows"] = self._step["adapted"]["max_rank"] = 0
            return
        sums = torch.empty(
            (max(tensors.input_ids.shape[0], tensors.logit_rows.shape[0]), SLOTS, adapters.max_rank)
        )
        kept = adapters.addresses[tensors.logit_rows.numpy()]
        self._adapted = [sums]
        for fields, addresses in zip(self._step["adapted"], (adapters.addresses, kept), strict=True):
            rows = np.argsort(addresses, kind="stable")[np.count_nonzero(addresses == 0) :]
            self._adapted += [addresses, rows]
            fields["num_rows"], fields["rows"] = len(rows), rows.ctypes.data
            fields["updates"], fields["sums"] = addresses.ctypes.data, sums.data_ptr()
            fields["max_rank"], fields["item_bytes"] = adapters.max_rank, self._dtype.itemsize

    def _logits(self, num_logits: int) -> torch.Tensor:
        stride = int(self._step[0]["logits_stride"])
        if self._collectives is not None:
            return self._collectives.logits(num_logits)
        if num_logits > _MOST_KEPT_LOGITS:
            return torch.empty((num_logits, stride))
        kept = self._buffers.get("logits")
        if kept is None or kept.shape[0] < num_logits:
            size = min(_MOST_KEPT_LOGITS, 1 << (num_logits - 1).bit_length())
            kept = self._buffers["logits"] = torch.empty((size, stride))
        return kept[:num_logits]

    def _grow_buffers(self, num_rows: int) -> None:
        """Make room for the values of ``num_rows`` tokens."""
        hidden = self._buffers.get("hidden")
        if hidden is not None and hidden.shape[0] >= num_rows:
            return
        capacity = max(64, 1 << (num_rows - 1).bit_length())
        fields = self._step[0]
        recipe = self._recipe
        attended = self._num_heads * int(fields["head_dim"])
        outputs = [each.output for each in recipe.attentions] + [each.output for each in recipe.states]
        attended = max((attended, *(each.in_features for each in outputs)))
        projected = 0 if self._state_layers is None else self._state_layers.num_columns
        expanded = (each.query_up.out_features for each in recipe.latents if each.query_up)
        widths = {
            "hidden": fields["hidden_size"],
            "normed": fields["hidden_size"],
            "qkv": max(fields["qkv_stride"], fields["hidden_size"], projected),
            "queries": attended,
            "attended": attended,
            "update": fields["update_stride"],
            "mlp": fields["mlp_stride"],
            "operands": max(fields["hidden_size"], fields["mlp_stride"], attended, *expanded),
        }
        for name, width in widths.items():
            self._buffers[name] = torch.empty((capacity, int(width)))
            self._step[name] = self._buffers[name].data_ptr()
        if self._state_layers is not None:
            self._state_layers.grow(capacity, int(fields["attended"]))
        self._attention["query"] = fields["queries"]
        # With latent attention, the results of heads are computed from sums of latents.
        self._attention["output"] = fields["operands" if recipe.latents else "attended"]
        self._place_kept_rows(self._keeps_all_rows)

    def _grow_tables(self, num_positions: int) -> None:
        """Compute the cosines and sines of the first ``num_positions`` positions."""
        if num_positions <= self._num_positions or not self._recipe.rotations:
            return
        self._num_positions = 1 << (num_positions - 1).bit_length()
        positions = torch.arange(self._num_positions)
        self._tables = [rotate(positions) for rotate in self._recipe.rotations]
        self._tables32 = [tuple(each.float().contiguous() for each in both) for both in self._tables]
        self._step["rotary_dim"] = self._tables[0][0].shape[1]
        for row, layer in zip(self._layers, self._recipe.layers, strict=True):
            if isinstance(layer.attention, AttentionRecipe) and layer.attention.rotation is not None:
                tables = self._tables32[layer.attention.rotation]
                row["cosines"], row["sines"] = (each.data_ptr() for each in tables)

    def _fill_layers(self, heads: KvHeads, memory: KvMemory) -> None:
        for index, layer in enumerate(self._recipe.layers):
            fill_layer(self._layers[index], layer)
            if isinstance(layer.attention, AttentionRecipe):
                self._fill_attention(index, layer.attention, heads, memory)
        added = [row[name] for row in self._layers for name in ("output", "down")]
        for number, each in enumerate(each for each in added if each["borders"]):
            each["number"] = number

    def _make_state_layers(self) -> StateLayers | None:
        numbers = [
            number
            for number, each in enumerate(self._recipe.layers)
            if isinstance(each.attention, StateRecipe)
        ]
        if self._states is None or not numbers:
            return None
        first = self._counters.ctypes.data + 8 * (2 * _CACHE_LINE + _FIRST_STATE_COUNTER)
        counters = [first + 8 * records.COUNTERS_PER_LAYER * number for number in numbers]
        layers = StateLayers(self._recipe.states, self._states, counters)
        self._layers["states"][numbers] = layers.addresses
        return layers

    def _fill_attention(self, index: int, layer: AttentionRecipe, heads: KvHeads, memory: KvMemory) -> None:
        """Fill in how a layer calls attention."""
        number = layer.number
        call, kv_layer, scales = heads.calls[number], memory.layers[number], memory.scales[number]
        row, arguments = self._layers[index], self._attention[index]
        first_counter = 2 * _CACHE_LINE + records.COUNTERS_PER_LAYER * len(self._layers) + 1
        row["kv"] = kv_layer.data_ptr()
        row["kv_scales"] = 0 if scales is None else scales.data_ptr()
        row["query_stride"] = heads.head_dim * (2 if layer.is_gated else 1)
        row["attention"] = self._attention.ctypes.data + index * attention_program.ARGUMENTS.itemsize
        arguments["kv"], arguments["kv_scales"] = row["kv"], row["kv_scales"]
        arguments["block_stride"], arguments["value_offset"], arguments["head_stride"] = kv_layer.stride()[:3]
        if layer.latents is not None:
            arguments["value_offset"] = arguments["head_stride"] = 0
        if scales is not None:
            arguments["scale_block_stride"], arguments["scale_value_offset"] = scales.stride()[:2]
        sinks = (
            torch.full((self._num_heads,), -torch.inf) if call.sinks is None else call.sinks.float().clone()
        )
        arguments["sinks"], arguments["slopes"] = self._hold(sinks), self._hold(torch.zeros(self._num_heads))
        arguments["next_program"] = self._counters.ctypes.data + 8 * (first_counter + index)
        arguments["num_kv_heads"], arguments["num_heads"] = self._shape.num_kv_heads, self._num_heads
        arguments["window"], arguments["is_chunked"] = call.window or 0, call.is_chunked
        arguments["scale"], arguments["softcap"] = call.scale, call.softcap or 0.0

    def _fill_step(self, heads: KvHeads, memory: KvMemory) -> None:
        recipe, steps = self._recipe, self._step
        shape, hidden_size = memory.shape, recipe.head.in_features
        table, is_packed = recipe.embedding, False
        if isinstance(table, PackedEmbedding):
            table, is_packed = table.packed.panels, True
        kv_dtype = memory.layers[0].dtype
        values = {
            "embedding": self._hold(table),
            "is_embedding_packed": is_packed,
            "embedding_scale": recipe.embedding_scale,
            "position_offset": recipe.position_offset,
            "layers": self._layers.ctypes.data,
            "counters": self._counters.ctypes.data + 8 * 2 * _CACHE_LINE,
            "next_thread": self._counters.ctypes.data,
            "arrivals": self._counters.ctypes.data + 8 * _CACHE_LINE,
            "team_size": threads.team_size_address(),
            "yield_core": threads.yield_address(),
            "exchange": self._exchange_address(),
            "num_layers": len(recipe.layers),
            "hidden_size": hidden_size,
            "num_heads": self._num_heads,
            "num_kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "update_stride": -(-hidden_size // UNIT) * UNIT,
            "mlp_stride": int(max(row["gate"]["num_units"] for row in self._layers)) * UNIT,
            "logits_stride": self._logits_width,
            "block_size": shape.block_size,
            "block_stride": memory.layers[0].stride(0),
            "value_offset": memory.layers[0].stride(1),
            "head_stride": memory.layers[0].stride(2),
            "kv_format": _KV_FORMATS.get(kv_dtype, 0),
        }
        if recipe.position_embedding is not None:
            values["position_embedding"] = self._hold(recipe.position_embedding)
        if memory.scales[0] is not None:
            values["scale_block_stride"], values["scale_value_offset"] = memory.scales[0].stride()[:2]
            values["scale_per_magnitude"] = KV_FORMATS[kv_dtype].scale_per_magnitude
        if recipe.attentions:
            kernel = attention.kernel_for(
                heads.head_dim,
                shape.block_size,
                self._shape.group,
                STORAGE[kv_dtype],
                heads.latent_dim or None,
                heads.arithmetic,
            )
            own_columns = columns(recipe.attentions[0], self._num_heads, heads)
            values["attend"] = kernel.address
            values |= zip(("key_column", "value_column", "qkv_stride"), own_columns, strict=True)
        if recipe.latents:
            values["value_offset"] = heads.latent_dim
        for name, value in values.items():
            steps[name] = value
        steps["head"] = linear_record(recipe.head)
        if recipe.final_norm is not None:
            steps["final_norm"] = norm_record(recipe.final_norm)

    def _exchange_address(self) -> int:
        if self._collectives is None:
            nothing = np.zeros(1, EXCHANGE)
            self._held.append(nothing)
            return int(nothing.ctypes.data)
        return self._collectives.address

    @property
    def _logits_width(self) -> int:
        if self._collectives is None:
            return self._recipe.head.packed.num_units * UNIT
        return self._collectives.memory.sizes.logits_width

    def _hold(self, tensor: torch.Tensor) -> int:
        """Keep a tensor and return its address."""
        held = tensor.contiguous()
        self._held.append(held)
        return held.data_ptr()


@contextmanager
def _returning(rows: torch.Tensor, module: torch.nn.Module | None) -> Iterator[None]:
    """Let a module return these rows, whose inputs are all rows of the step."""
    if module is None:
        yield
        return
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda inputs: rows.view(inputs.shape)
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


def _rows(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the rows that a module computes; some modules return more than that."""
    return (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).flatten(0, -2)


def _dtype(recipe: StepRecipe) -> torch.dtype:
    return recipe.head.packed.dtype


def _entry_addresses(tensor: torch.Tensor, num_dims: int, frames: Array) -> Array | int:
    """Return the address of the entry of each layer's frame; of the whole tensor if blocks are one frame."""
    if tensor.dim() == num_dims:
        assert not frames.any(), "the tables are those of blocks of one frame"
        return tensor.data_ptr()
    return tensor.data_ptr() + frames * (tensor.stride(0) * tensor.element_size())


def _one_row_each(rows: torch.Tensor, starts: torch.Tensor) -> Array:
    """Return parts of attention with one token each; see ``make_parts``."""
    sequences = torch.searchsorted(starts.long(), rows, right=True) - 1
    return torch.stack((sequences, rows, rows + 1), dim=1).numpy()


def _linears(recipe: StepRecipe) -> list[PackedLinear]:
    """Return the linear layers that the program computes; the output layer only if there are no others."""
    of_attention = [layer for each in recipe.attentions for layer in (*each.projections, each.output)]
    of_attention += [each.query_up for each in recipe.latents if each.query_up is not None]
    of_attention += [layer for each in recipe.states for layer in each.linears]
    mlps = recipe.mlps + [each.shared for each in recipe.layers if each.shared is not None]
    of_mlps = [layer for each in mlps for layer in (each.gate, each.up or each.gate, each.down)]
    return of_attention + of_mlps or [recipe.head]


def _num_weights(recipe: StepRecipe) -> int:
    return sum(each.in_features * each.out_features for each in _linears(recipe))


def recipe_of(module: PreTrainedModel) -> StepRecipe:
    """Return the recipe of a model; its layers with a state are modules if their weights need other inputs.

    Raises:
        NoRecipeError: some part of the model is not of a known shape.
    """
    recipe = read_recipe(module)
    return recipe if _has_one_form(recipe) else recipe.without_states()


def find_recipe(
    module: PreTrainedModel,
    heads: KvHeads,
    vocab_size: int,
    num_positions: int,
    collectives: Collectives | None = None,
) -> StepRecipe | None:
    """Return the recipe of a model on the CPU if its program gives the same bits as its modules.

    Otherwise log the reason and return None: the model then runs module by module.
    """
    try:
        recipe = recipe_of(module)
        _check_heads(recipe, heads)
        if recipe.has_modules and collectives is not None:
            raise NoRecipeError("parts of its layers are modules, which divide themselves among ranks")

        def other(memory: KvMemory) -> Forward:
            return CompiledStep(recipe, heads, memory, vocab_size, collectives).run

        with _refusing_modules(recipe):
            is_alike = runs_alike(module, heads, vocab_size, num_positions, other)
        if not is_alike:
            raise NoRecipeError("as one program it would give other bits")
    except NoRecipeError as error:
        logger.info("%s runs module by module: %s", module.config.model_type, error)
        return None
    return recipe


@contextmanager
def _refusing_modules(recipe: StepRecipe) -> Iterator[None]:
    """Turn any exception of a recipe with modules into a NoRecipeError: they may need other arguments."""
    try:
        yield
    except (MemoryError, NoRecipeError):
        raise
    except Exception as error:
        if not recipe.has_modules:
            raise
        raise NoRecipeError(f"a module cannot be called alone: {type(error).__name__}: {error}") from error


def _check_heads(recipe: StepRecipe, heads: KvHeads) -> None:
    if not heads.are_alike:
        raise NoRecipeError("its keys and values, or its layers, differ in shape")
    if not _has_one_form(recipe):
        raise NoRecipeError("its linear layers have different dtypes or forms of inputs")
    for each in recipe.attentions:
        if each.latents is not None:
            _check_latents(recipe, each, heads)
        elif len(each.projections) not in (1, 3) or each.output.in_features % heads.head_dim:
            raise NoRecipeError(f"its heads of {heads.head_dim} values do not fill its projections")


def _has_one_form(recipe: StepRecipe) -> bool:
    """Return whether the linear layers have one dtype, and one form of inputs."""
    forms = {(each.packed.dtype, form_of_inputs(each.packed.stored)) for each in _linears(recipe)}
    return len(forms) == 1 and {_dtype(recipe)} == {dtype for dtype, _ in forms}


def _check_latents(recipe: StepRecipe, layer: AttentionRecipe, heads: KvHeads) -> None:
    sizes = [
        (each.latents.key_heads.num_heads, each.latents.key_heads.packed.in_features, columns(each, 0, heads))
        for each in (layer, recipe.attentions[0])
        if each.latents is not None
    ]
    if len(set(sizes)) != 1:
        raise NoRecipeError("its queries or latents differ in size")
    if layer.rotation is not None:
        cosines, _ = recipe.rotations[layer.rotation](torch.zeros(1, dtype=torch.long))
        if cosines.shape[1] != heads.head_dim - heads.latent_dim:
            raise NoRecipeError(f"its rotation has {cosines.shape[1]} values")


def _heads(recipe: StepRecipe, heads: KvHeads, block_size: int) -> tuple[int, AttentionShape]:
    """Return the number of query heads that the program computes, and what its tiles depend on."""
    if recipe.latents:
        num_heads = recipe.latents[0].key_heads.num_heads
        return num_heads, AttentionShape(
            block_size, num_heads, num_heads // attention.latent_group(num_heads)
        )
    num_heads = max((each.output.in_features for each in recipe.attentions), default=0) // heads.head_dim
    most_heads = max(num_heads, heads.num_kv_heads)
    return num_heads, AttentionShape(block_size, most_heads, heads.num_kv_heads)
