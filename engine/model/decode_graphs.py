"""Decode steps as CUDA graphs: one launch per step instead of one for each kernel of each layer.

A graph replays fixed kernels over fixed memory, so there is one graph for each batch size in ``LADDER``, and
a step takes the smallest that fits. The rest of the batch is padding: sequences without new tokens, which the
attention kernels skip, and tokens without a slot, which are not written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from quire.engine.model.step_tensors import Forward, StepTensors
from quire.kernels.metadata import AttentionMetadata

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Function that captures another one; the result replays the same kernels over the same memory."""


class CudaCapture:
    """Captures functions as CUDA graphs. They share one memory pool, so only one may run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], object]) -> Replay:
        """Run a function once to compile its kernels; return a function that replays them.

        Raises:
            RuntimeError: the function waits for the device even in its second run.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
            with _refusing_to_wait():
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            function()
        return graph.replay


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise an error in the block if anything waits for the device.

    Waiting within a capture would leave torch's allocator in a broken state.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the sync debug mode is a prototype.
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class DecodeGraphs:
    """Runs steps in which every sequence has one new token.

    Args:
        forward: runs the model.
        capture: captures a function, such as ``CudaCapture()``.
        max_num_seqs: the largest batch size.
        max_blocks: most entries of a block table.
        device: the device of the model.
        num_frames: frames of a block.
    """

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        max_num_seqs: int,
        max_blocks: int,
        device: torch.device,
        num_frames: int = 1,
    ) -> None:
        self._forward = forward
        self._sizes = (*(size for size in LADDER if size < max_num_seqs), max_num_seqs)
        self._inputs = _static_inputs(max_num_seqs, max_blocks, device, num_frames)
        logits = forward(_of_size(self._inputs, 1))
        self._logits = logits.new_zeros((max_num_seqs, logits.shape[-1]))
        # The largest is captured first, so that the others reuse its memory.
        self._replays = {size: capture(partial(self._run, size)) for size in reversed(self._sizes)}

    def fits(self, step: StepTensors) -> bool:
        """Return whether a step only decodes, has one row of logits per sequence, and fits into a graph."""
        num_seqs, num_entries = step.metadata.block_tables.shape[-2:]
        return (
            step.metadata.max_new_tokens == 1
            and step.logit_rows.shape[0] == num_seqs <= self._sizes[-1]
            and num_entries <= self._inputs.metadata.block_tables.shape[-1]
        )

    def run(self, step: StepTensors) -> torch.Tensor:
        """Run a step that fits; return its logits ``[num_seqs, vocab_size]``, valid until the next step."""
        num_seqs = step.logit_rows.shape[0]
        size = next(size for size in self._sizes if size >= num_seqs)
        self._fill(step, num_seqs, size)
        self._replays[size]()
        return self._logits[:num_seqs]

    def _run(self, size: int) -> None:
        self._logits[:size] = self._forward(_of_size(self._inputs, size))

    def _fill(self, step: StepTensors, num_seqs: int, size: int) -> None:
        """Copy a step into the graphs' inputs.

        The padding may keep old token ids and positions, since nothing reads its results.
        """
        ours, theirs = self._inputs.metadata, step.metadata
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = (
            (self._inputs.input_ids, step.input_ids),
            (self._inputs.positions, step.positions),
            (ours.query_starts, theirs.query_starts),
            (ours.seq_lens, theirs.seq_lens),
            (ours.slot_mapping, theirs.slot_mapping),
        )
        for static, fresh in pairs:
            static[..., : fresh.shape[-1]].copy_(fresh, non_blocking=True)
        tables = theirs.block_tables
        ours.block_tables[..., :num_seqs, : tables.shape[-1]].copy_(tables, non_blocking=True)
        ours.query_starts[num_seqs + 1 : size + 1] = num_seqs
        ours.seq_lens[num_seqs:size] = 0
        ours.slot_mapping[..., num_seqs:size] = -1


def _static_inputs(size: int, max_blocks: int, device: torch.device, num_frames: int) -> StepTensors:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    frames = (num_frames,) if num_frames > 1 else ()
    metadata = AttentionMetadata(
        block_tables=zeros(*frames, size, max_blocks, dtype=torch.int32),
        query_starts=zeros(size + 1, dtype=torch.int32),
        seq_lens=zeros(size, dtype=torch.int32),
        slot_mapping=torch.full((*frames, size), -1, device=device),
        max_new_tokens=1,
    )
    return StepTensors(zeros(size), zeros(size), torch.arange(size, device=device), metadata)


def _of_size(inputs: StepTensors, size: int) -> StepTensors:
    metadata = inputs.metadata
    return StepTensors(
        inputs.input_ids[:size],
        inputs.positions[:size],
        inputs.logit_rows[:size],
        metadata._replace(
            block_tables=metadata.block_tables[..., :size, :],
            query_starts=metadata.query_starts[: size + 1],
            seq_lens=metadata.seq_lens[:size],
            slot_mapping=metadata.slot_mapping[..., :size],
        ),
    )
