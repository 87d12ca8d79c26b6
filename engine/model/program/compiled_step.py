"""Steps as one compiled program on the CPU, instead of a call of each module of each layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.check import KvHeads
from quire.engine.model.collectives import Collectives
from quire.engine.model.layers.packed_linear import PackedEmbedding
from quire.engine.model.layers.parallel_layers import RowLinear
from quire.engine.model.program.attention_calls import AttentionCalls
from quire.engine.model.program.buffers import StepBuffers
from quire.engine.model.program.layer_records import fill_layers, first_column, linear_record, norm_record
from quire.engine.model.program.module_calls import ModuleCalls
from quire.engine.model.program.recipe import AttentionRecipe, StepRecipe
from quire.engine.model.program.state_layers import StateLayers
from quire.engine.model.program.state_recipe import StateRecipe
from quire.engine.model.states import States
from quire.engine.model.step_tensors import StepTensors
from quire.kernels.cpu import threads
from quire.kernels.cpu.exchange import EXCHANGE
from quire.kernels.cpu.intrinsics import STORAGE
from quire.kernels.cpu.products.low_rank import SLOTS
from quire.kernels.cpu.products.packed_weight import UNIT
from quire.kernels.cpu.products.stored_types import first_of_form
from quire.kernels.cpu.step.program import program
from quire.kernels.cpu.step.records import COUNTERS_PER_LAYER, FIRST_STATE_COUNTER, LAYER, STEP

_MIN_THREADED_WORK = 1 << 19
"""With fewer multiplications in a step than this, waking up threads costs more time than it saves."""
_FEWEST_POSITIONS = 512
_CACHE_LINE = 8
"""Counters that fill a cache line."""


class CompiledStep:
    """Runs any step of one model over one memory.

    Args:
        recipe: description of the model's computation.
        heads: how it calls attention.
        memory: its KV blocks.
        vocab_size: number of logits.
        most_positions: number of positions that the model has.
        collectives: those of the ranks that the model is divided among; None if there is one process.
    """

    def __init__(
        self,
        recipe: StepRecipe,
        heads: KvHeads,
        memory: KvMemory,
        vocab_size: int,
        most_positions: int,
        collectives: Collectives | None = None,
    ) -> None:
        self._most_positions = most_positions
        self._recipe, self._collectives, self._vocab_size = recipe, collectives, vocab_size
        # One program fits all weights whose inputs have the same form, unless it reads embeddings from them.
        stored, head_stored = first_of_form(recipe.linears[0].packed.stored), recipe.head.packed.stored
        if not isinstance(recipe.embedding, PackedEmbedding):
            head_stored = first_of_form(head_stored)
        self._program = program(STORAGE[recipe.dtype], stored, head_stored)
        self._work_per_token = sum(each.in_features * each.out_features for each in recipe.linears)
        self._num_sums = sum(isinstance(each, RowLinear) for each in recipe.linears)
        # The program contains only addresses, so these references keep the memory alive.
        self._held: list[Any] = []
        self._adapted: list[Any] = []
        # Two lines, the layers' counters, and that of the logits.
        num_counters = 2 * _CACHE_LINE + COUNTERS_PER_LAYER * len(recipe.layers) + 1
        self._counters = np.zeros(num_counters, np.int64)
        counters = self._counters.ctypes.data + 8 * 2 * _CACHE_LINE
        self._layers = np.zeros(len(recipe.layers), LAYER)
        fill_layers(self._layers, recipe.layers)
        self._attention = AttentionCalls(recipe, heads, memory, self._layers, counters)
        states = None if heads.states is None else States(memory, heads.states)
        self._state_layers = self._make_state_layers(states, counters)
        self._step = np.zeros(2, STEP)
        self._step_address = self._step.ctypes.data
        for name, value in (self._step_values(counters) | self._attention.step_values()).items():
            self._step[name] = value
        num_columns = 0 if self._state_layers is None else self._state_layers.num_columns
        self._buffers = StepBuffers(self._step, recipe, num_columns)
        self._modules = ModuleCalls(recipe, memory, states, self._buffers)
        self._tables: list[tuple[torch.Tensor, ...]] = []
        self._tables32 = self._tables
        self._num_positions = 0
        self._grow_tables(min(_FEWEST_POSITIONS, most_positions))
        self._placed: StepTensors | None = None
        """The tensors of which the program has the addresses."""
        self._num_threads = 0
        """The number of threads when it got them."""
        self._logits = torch.empty(0)

    def run(self, tensors: StepTensors) -> torch.Tensor:
        """Run a step; return its logits ``[num_logits, vocab_size]``, valid until the next step."""
        self._grow_tables(int(tensors.positions.max()) + 1)
        # Consecutive decodes of the same sequences have the same tensors, with other values.
        if tensors is not self._placed or torch.get_num_threads() != self._num_threads:
            self._place(tensors)
        if self._state_layers is not None:
            self._state_layers.place(tensors.metadata, tensors.input_ids.shape[0])
        if self._collectives is not None:
            self._step["last_round"] = self._collectives.num_rounds
        self._run_program(tensors)
        if self._collectives is not None:
            # With adapters, the ranks gather the inputs of each of these layers too.
            self._collectives.num_rounds += self._num_sums * (1 if tensors.adapters is None else 2)
            self._collectives.meet()
        finish = self._recipe.finish
        return self._logits if finish is None else finish(self._logits.to(self._recipe.dtype))

    def _place(self, tensors: StepTensors) -> None:
        """Tell the program where a step's tensors are, and how many tokens and sequences they have."""
        self._placed = None
        num_tokens, num_kept = tensors.input_ids.shape[0], tensors.logit_rows.shape[0]
        self._grow_buffers(max(num_tokens, num_kept))
        logits = (self._collectives or self._buffers).logits(tensors.num_logits)
        self._logits = logits[:, : self._vocab_size]
        steps = self._step
        steps["num_tokens"] = num_tokens, num_kept
        steps["num_logits"] = tensors.num_logits
        steps["token_ids"] = tensors.input_ids.data_ptr()
        steps["positions"] = tensors.positions.data_ptr()
        steps["kept_rows"] = tensors.logit_rows.data_ptr()
        steps["logits"] = logits.data_ptr() + 4 * first_column(self._recipe.head)
        self._place_adapters(tensors)
        keeps_all_rows = tensors.metadata.max_new_tokens == 1 and num_kept == num_tokens
        if keeps_all_rows != self._buffers.keeps_all_rows:
            self._buffers.keep_rows(keeps_all_rows)
        if self._recipe.attentions:
            self._attention.place(tensors, keeps_all_rows)
        self._placed, self._num_threads = tensors, torch.get_num_threads()

    def hidden_states(self, tensors: StepTensors) -> torch.Tensor:
        """Return float32 ``[num_hidden, hidden_size]`` of the step that has just run."""
        return self._buffers.normed(tensors.num_logits, tensors.logit_rows.shape[0])

    def _run_program(self, tensors: StepTensors) -> None:
        """Run the program, and between its parts the modules."""
        num_tokens = tensors.input_ids.shape[0]
        is_threaded = num_tokens * self._work_per_token >= _MIN_THREADED_WORK
        num_threads = torch.get_num_threads() if is_threaded else 1
        self._run_part(0, False, num_threads)
        if self._modules.calls:
            self._run_modules(tensors, num_threads)

    @torch.inference_mode()
    def _run_modules(self, tensors: StepTensors, num_threads: int) -> None:
        """Run the modules, and after each the next part of the program."""
        num_tokens, options = tensors.input_ids.shape[0], self._modules.options(tensors, self._tables)
        for call in self._modules.calls:
            is_last = call.number == len(self._layers) - 1
            self._modules.run(call, options, num_tokens, tensors.logit_rows if is_last else None)
            self._run_part(*call.next_part, num_threads)

    def _run_part(self, first_layer: int, begins_with_mlp: bool, num_threads: int) -> None:
        self._counters.fill(0)
        self._step["first_layer"], self._step["begins_with_mlp"] = first_layer, begins_with_mlp
        threads.run(self._program.address, self._step_address, num_threads)

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
            fields["max_rank"], fields["item_bytes"] = adapters.max_rank, self._recipe.dtype.itemsize

    def _grow_buffers(self, num_rows: int) -> None:
        """Make room for the values of ``num_rows`` tokens."""
        if not self._buffers.grow(num_rows):
            return
        fields = self._step[0]
        if self._state_layers is not None:
            self._state_layers.grow(self._buffers.capacity, int(fields["attended"]))
        # With latent attention, the results of heads are computed from sums of latents.
        outputs = fields["operands" if self._recipe.latents else "attended"]
        self._attention.place_rows(fields["queries"], outputs)

    def _grow_tables(self, num_positions: int) -> None:
        """Compute the cosines and sines of the first ``num_positions`` positions."""
        if num_positions <= self._num_positions or not self._recipe.rotations:
            return
        # Beyond the model's positions, some models rotate all positions in another way.
        doubled = min(1 << (num_positions - 1).bit_length(), self._most_positions)
        self._num_positions = max(num_positions, doubled)
        positions = torch.arange(self._num_positions)
        self._tables = [rotate(positions) for rotate in self._recipe.rotations]
        self._tables32 = [tuple(each.float().contiguous() for each in both) for both in self._tables]
        self._step["rotary_dim"] = self._tables[0][0].shape[1]
        for row, layer in zip(self._layers, self._recipe.layers, strict=True):
            if isinstance(layer.attention, AttentionRecipe) and layer.attention.rotation is not None:
                tables = self._tables32[layer.attention.rotation]
                row["cosines"], row["sines"] = (each.data_ptr() for each in tables)

    def _make_state_layers(self, states: States | None, counters: int) -> StateLayers | None:
        layers = enumerate(self._recipe.layers)
        numbers = [number for number, each in layers if isinstance(each.attention, StateRecipe)]
        if states is None or not numbers:
            return None
        own = [counters + 8 * (COUNTERS_PER_LAYER * number + FIRST_STATE_COUNTER) for number in numbers]
        state_layers = StateLayers(self._recipe.states, states, own)
        self._layers["states"][numbers] = state_layers.addresses
        return state_layers

    def _step_values(self, counters: int) -> dict[str, Any]:
        """Return the fields of a step's record that depend on the model, without its attention."""
        recipe, hidden_size = self._recipe, self._recipe.head.in_features
        table, is_packed = recipe.embedding, isinstance(recipe.embedding, PackedEmbedding)
        if isinstance(table, PackedEmbedding):
            table = table.packed.panels
        if self._collectives is None:
            nothing = np.zeros(1, EXCHANGE)
            self._held.append(nothing)
            exchange, logits_width = nothing.ctypes.data, recipe.head.packed.num_units * UNIT
        else:
            exchange, logits_width = self._collectives.address, self._collectives.memory.sizes.logits_width
        positions = recipe.position_embedding
        return {
            "embedding": self._hold(table),
            "is_embedding_packed": is_packed,
            "embedding_scale": recipe.embedding_scale,
            "position_embedding": 0 if positions is None else self._hold(positions),
            "position_offset": recipe.position_offset,
            "layers": self._layers.ctypes.data,
            "counters": counters,
            "next_thread": self._counters.ctypes.data,
            "arrivals": self._counters.ctypes.data + 8 * _CACHE_LINE,
            "team_size": threads.team_size_address(),
            "yield_core": threads.yield_address(),
            "exchange": exchange,
            "num_layers": len(recipe.layers),
            "hidden_size": hidden_size,
            "update_stride": -(-hidden_size // UNIT) * UNIT,
            "mlp_stride": int(max(row["gate"]["num_units"] for row in self._layers)) * UNIT,
            "logits_stride": logits_width,
            "head": linear_record(recipe.head),
            "final_norm": norm_record(recipe.final_norm),
        }

    def _hold(self, tensor: torch.Tensor) -> int:
        """Keep a tensor and return its address."""
        held = tensor.contiguous()
        self._held.append(held)
        return held.data_ptr()
