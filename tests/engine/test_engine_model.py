"""Pool, tables, groups and scheduler under random schedules, against undisturbed runs of each request.

The model is a fake that shows every error of the ledger: a "key" is its token, so a forward pass can compare
what it reads through the block table with the tokens of the sequence, and its logits are a hash of what it
read.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from quire.benchmarks.harness.engines import model_without_layers
from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_cache.disk_cache import DiskCache
from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import NO_FRAME, KvMemory
from quire.engine.model import states
from quire.engine.model.step_tensors import StepTensors
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.sequences.sequence import NO_BLOCK, ScheduledSequence, Sequence, SequenceStatus
from quire.engine.speculation.speculator import DraftRequest, Speculator
from quire.kernels import ops
from quire.kvindex.kv_layout import KvShape
from quire.sampling.params import BeamParams, SamplingParams
from tests.testing.manual_disk import ManualExecutor, open_disk
from tests.testing.tiny_engine import Outputs, add_tokens

T = TypeVar("T")
BLOCK_SIZE, NUM_BLOCKS, NUM_SWAP_BLOCKS, VOCAB_SIZE, EOS = 4, 24, 20, 12, 1
NUM_HOST_BLOCKS, NUM_DISK_BLOCKS = 10, 40
SHAPE = KvShape(1, 1, BLOCK_SIZE, 1, "float32")
MIXED_SHAPE = KvShape(2, 1, BLOCK_SIZE, 1, "float32", window=6, window_layers=(0,))
"""A layer with a window, and one that sees all tokens."""
CONVOLUTION_SHAPE = KvShape(4, 1, BLOCK_SIZE, 1, "float32", window=3, window_layers=(0, 1, 2))
"""A layer that sees all tokens, and short convolutions that see three."""
STATE_SHAPE = KvShape(2, 1, BLOCK_SIZE, 1, "float32", window=states.WINDOW, window_layers=(1,))
"""A layer that sees all tokens, and the place of a state."""
CPU = torch.device("cpu")


def hash_block(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.sha256(parent + bytes(tokens)).digest()[:16]


def write_token(memory: KvMemory, block_id: int, position: int, tokens: list[int]) -> None:
    """Write a token as its key, and a value that makes blocks matter more or less.

    If blocks hold states, write the one after this token in place of that after an earlier token.
    """
    token_id, frames = tokens[position], frames_of(memory, block_id)
    if memory.shape == STATE_SHAPE and len(frames) == 2:
        memory.blocks[frames.pop()] = state_after(tokens[: position + 1])
    blocks, value = memory.blocks.numpy(), token_id * (position % 7 + 1) % 13
    for frame in frames:
        blocks[frame, 0, :, 0, position % BLOCK_SIZE, 0] = token_id, value


def read_tokens(memory: KvMemory, block_id: int, part: int = 0) -> list[int]:
    """Return the tokens that a block holds as its keys."""
    keys = memory.blocks.numpy()[frames_of(memory, block_id)[part], 0, 0, 0, :, 0]
    tokens: list[int] = keys.astype(int).tolist()
    return tokens


def state_after(tokens: list[int]) -> int:
    """Return a number that float32 can hold and that depends on all tokens."""
    return int.from_bytes(hash_block(b"", tokens)[:3], "little")


def check_state(memory: KvMemory, block_id: int, tokens: list[int]) -> None:
    """Raise AssertionError unless a block holds the state after these tokens, if blocks hold states."""
    if memory.shape == STATE_SHAPE:
        assert set(read_tokens(memory, block_id, 1)) == {state_after(tokens)}, (
            "not the state after the tokens"
        )


def frames_of(memory: KvMemory, block_id: int) -> list[int]:
    if memory.frame_tables is None:
        return [block_id]
    return [frame for frame in memory.frame_tables[block_id].tolist() if frame != NO_FRAME]


def clear_unused(engine: Engine) -> None:
    """Overwrite the frames that hold nothing; others may be read still."""
    tables, pool = engine.memory.frame_tables, engine.pool
    if tables is not None:
        held = [b for b in range(len(tables)) if pool.ref_cnt(b) or pool.hash_of(b)]
        used = {frame for block_id in held for frame in frames_of(engine.memory, block_id)}
        engine.memory.blocks[[each for each in range(len(engine.memory.blocks)) if each not in used]] = -1


class FakeRunner(ModelRunner):
    """Keeps tokens in the KV memory and reads them back through the block tables.

    Attributes:
        ref_cnt: returns how many sequences use a block.
    """

    ref_cnt: Callable[[int], int]

    def prepare(self, scheduled: list[ScheduledSequence]) -> StepTensors:
        self._scheduled = scheduled
        step = super().prepare(scheduled)
        tables = step.metadata.block_tables
        if self.memory.frame_tables is None:
            self._check_tables(tables.tolist())
        else:
            self._check_frames(tables.tolist(), self.memory.frame_tables.tolist())
        return step

    def _check_frames(self, tables: list[list[list[int]]], frames: list[list[int]]) -> None:
        """Raise AssertionError unless the tables name the frames that a window shows, and all others."""
        for row, (sequence, _) in enumerate(self._scheduled):
            first_seen = self.memory.shape.first_seen_block(sequence.num_computed_tokens)
            for index, block_id in enumerate(sequence.block_table):
                assert tables[0][row][index] == frames[block_id][0] != NO_FRAME, "an outdated table"
                if index >= first_seen:
                    for part, frame in enumerate(frames[block_id][1:], 1):
                        assert tables[part][row][index] == frame != NO_FRAME, "an outdated table"

    def _check_tables(self, tables: list[list[int]]) -> None:
        """Raise AssertionError unless the array of tables, which steps patch, equals the sequences' own."""
        alignment = ops.blocks_summed_together(CPU, BLOCK_SIZE) if self.model.window else 1
        for (sequence, _), row in zip(self._scheduled, tables, strict=True):
            held = [block_id for block_id in sequence.block_table if block_id != NO_BLOCK]
            num_dummies = sequence.num_dropped_blocks % alignment
            assert row[num_dummies : num_dummies + len(held)] == held, "the step reads an outdated table"

    def forward(self, step: StepTensors) -> torch.Tensor:
        rows = []
        for sequence, num_tokens in self._scheduled:
            first, tokens = sequence.num_computed_tokens, sequence.token_ids + sequence.draft_token_ids
            if first:
                check_state(self.memory, sequence.block_table[(first - 1) // BLOCK_SIZE], tokens[:first])
            for position in range(first, first + num_tokens):
                block_id = sequence.block_table[position // BLOCK_SIZE]
                assert self.ref_cnt(block_id) == 1, "a shared block is written"
                write_token(self.memory, block_id, position, tokens)
            num_drafts = len(sequence.draft_token_ids)
            lengths = range(first + num_tokens - num_drafts, first + num_tokens + 1)
            rows += [self._logits(sequence, tokens[:length]) for length in lengths]
        return torch.stack(rows)

    def _logits(self, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
        if sequence.params.kv_budget_tokens is not None:
            return self._logits_after(self._kept(sequence, len(tokens)))
        # The step's first token sees furthest back; the logits are those of its last.
        window = self.model.window
        furthest = max(0, sequence.num_computed_tokens + 1 - window) if window else 0
        first_block = furthest // BLOCK_SIZE
        table = sequence.block_table[first_block:]
        assert NO_BLOCK not in table, "a block that is seen was given back"
        held = [token for block_id in table for token in read_tokens(self.memory, block_id)]
        held = held[: len(tokens) - first_block * BLOCK_SIZE]
        seen = tokens[first_block * BLOCK_SIZE :]
        assert held == seen, "the blocks do not hold the sequence's tokens"
        if self.memory.frame_tables is not None and self.memory.shape != STATE_SHAPE:
            first_block = self.memory.shape.first_seen_block(sequence.num_computed_tokens)
            table = sequence.block_table[first_block:]
            seen = tokens[first_block * BLOCK_SIZE :]
            for part in range(1, self.memory.shape.num_frames):
                in_window = [each for block_id in table for each in read_tokens(self.memory, block_id, part)]
                assert in_window[: len(seen)] == seen, "the window does not hold the sequence's tokens"
        return self._logits_after(tokens[-window:] if window else held)

    def _kept(self, sequence: Sequence, length: int) -> list[int]:
        """Return the tokens that a sequence with a budget has not given back."""
        table = sequence.block_table
        positions = [p for p in range(length) if table[p // BLOCK_SIZE] != NO_BLOCK]
        kept = [read_tokens(self.memory, table[p // BLOCK_SIZE])[p % BLOCK_SIZE] for p in positions]
        assert kept == [sequence.token_ids[p] for p in positions], "the blocks do not hold the tokens"
        return kept

    def _logits_after(self, held: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int.from_bytes(hash_block(b"", held)[:6], "little"))
        return torch.randn(VOCAB_SIZE, generator=generator) * 3


class Tiers(NamedTuple):
    """Host memory and a disk below the pool."""

    host: HostCache
    disk: DiskCache | None


class OracleProposer:
    """Proposes the tokens that will be sampled, with an error here and there."""

    def __init__(self, window: int | None) -> None:
        self._window = window

    def propose(self, wanted: list[DraftRequest]) -> list[list[int]]:
        drafts = []
        for sequence, num_tokens in wanted:
            prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
            output = undisturbed(prompt, sequence.params, self._window)[sequence.index]
            following = output[sequence.num_output_tokens :]
            draft = following[: random.Random(sequence.num_tokens).randint(0, num_tokens)]
            place = random.Random(sequence.num_tokens + 1).randint(0, 6)
            drafts.append([(token + (at == place)) % VOCAB_SIZE for at, token in enumerate(draft)])
        return drafts


def make_engine(
    num_blocks: int,
    num_swap_blocks: int,
    window: int | None,
    tiers: Tiers | None = None,
    *,
    has_drafts: bool = False,
    shape: KvShape = SHAPE,
) -> Engine:
    model = model_without_layers(128, window=window)
    if shape == STATE_SHAPE:
        model = replace(model, heads=model.heads._replace(states=states.StateShape(1, 1, 1)))
    memory = KvMemory(shape, num_blocks, CPU)
    swap_memory = KvMemory(shape, num_swap_blocks, CPU, is_pool=False) if num_swap_blocks else None
    runner = FakeRunner(model, memory, swap_memory)
    limits = SchedulerConfig(BLOCK_SIZE, max_num_seqs=10, max_num_batched_tokens=16)
    parts = EngineParts(
        swap_memory=swap_memory,
        host_cache=tiers and tiers.host,
        disk_cache=tiers and tiers.disk,
        speculator=Speculator(OracleProposer(window), 6) if has_drafts else None,
        runner=runner,
        clock=lambda: 0.0,
    )
    engine = Engine(model, memory, limits, parts=parts)
    runner.ref_cnt = engine.pool.ref_cnt
    return engine


def collect(engine: Engine, outputs: Outputs) -> None:
    for update in engine.step():
        add_tokens(outputs, update)


@cache
def undisturbed(prompt: tuple[int, ...], params: SamplingParams, window: int | None) -> dict[int, list[int]]:
    """Return the tokens of each sequence of a request that has the engine to itself."""
    engine = make_engine(512, 0, window)
    engine.add_request(Sequence("r", list(prompt), len(prompt), params, b"root"))
    outputs: Outputs = {}
    while not engine.is_idle:
        collect(engine, outputs)
    return {index: tokens for (_, index), tokens in outputs.items()}


many_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 14),
    ignore_eos=st.booleans(),
    kv_budget_tokens=st.sampled_from([None, None, 12, 19]),
    n=st.sampled_from([1, 1, 2, 4]),
) | st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10),
    beam=st.builds(BeamParams, st.integers(2, 4), early_stopping=st.sampled_from([True, False])),
)
# Few tokens and few lengths, so that many prompts begin alike.
prompts = st.builds(
    lambda seed, length: random.Random(seed).choices(range(2, VOCAB_SIZE), k=length),
    st.integers(0, 2),
    st.sampled_from([1, 3, 4, 5, 8, 13, 20]),
)


class TransferState(Enum):
    """How far another worker's blocks are."""

    ACCEPTED = auto()
    WAITING = auto()
    RESERVED = auto()
    LOST = auto()
    """Its sender died after the blocks were granted, and the engine does not know it yet."""


@dataclass(eq=False)
class Transfer:
    """A prompt that another worker computes."""

    sequence: Sequence
    first_block: int
    state: TransferState = TransferState.ACCEPTED


class EngineMachine(RuleBasedStateMachine):
    """Requests come, are computed here or elsewhere, are preempted, aborted or finish."""

    requests: Bundle[str] = Bundle("requests")
    window: int | None = None
    num_blocks = NUM_BLOCKS
    shape = SHAPE
    has_drafts = True
    clients: tuple[str, ...] = ("",)
    patiences: tuple[float, ...] = (0.0,)

    def __init__(self) -> None:
        super().__init__()
        self.engine = make_engine(
            self.num_blocks, NUM_SWAP_BLOCKS, self.window, has_drafts=self.has_drafts, shape=self.shape
        )
        self.wanted: dict[str, tuple[list[int], SamplingParams]] = {}
        self.transfers: dict[str, Transfer] = {}
        self.aborted: set[str] = set()
        self.outputs: Outputs = {}

    def adapt(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """Make of a request one that fits the model."""
        return prompt, params

    @rule(target=requests, prompt=prompts, params=many_params, client=st.integers(0, 3))
    def submit(self, prompt: list[int], params: SamplingParams, client: int) -> str:
        prompt, params = self.adapt(prompt, params)
        name = str(len(self.wanted))
        self.wanted[name] = (prompt, params)
        sequence = self.sequence(name, client)
        self.command(lambda e: e.add_request(sequence))
        return name

    @rule(target=requests, prompt=prompts, params=many_params, client=st.integers(0, 3))
    def accept(self, prompt: list[int], params: SamplingParams, client: int) -> str:
        """Take a prompt whose blocks another worker computes."""
        prompt, params = self.adapt(prompt, params)
        name = str(len(self.wanted))
        self.wanted[name] = (prompt, params)
        sequence = self.sequence(name, client)
        self.transfers[name] = Transfer(sequence, self.command(lambda e: e.transfers.accept(sequence)))
        return name

    def sequence(self, name: str, client: int) -> Sequence:
        prompt, params = self.wanted[name]
        client_name = self.clients[client % len(self.clients)]
        sequence = Sequence(name, list(prompt), len(prompt), params, b"root", client=client_name)
        sequence.weight = 1 + self.clients.index(client_name)
        sequence.patience = self.patiences[client % len(self.patiences)]
        return sequence

    @rule()
    def open(self) -> None:
        """Let a transfer wait for its blocks."""
        if accepted := self.transfers_in(TransferState.ACCEPTED):
            transfer = accepted[0]
            transfer.state = TransferState.WAITING
            name = transfer.sequence.attempt_id

            def on_outcome(is_reserved: bool) -> None:
                if is_reserved:
                    transfer.state = TransferState.RESERVED
                else:
                    self.transfers.pop(name, None)
                    self.aborted.add(name)

            self.command(lambda e: e.transfers.reserve(name, on_outcome))

    @rule(place=st.integers(0, 3))
    def deliver(self, place: int = 0) -> None:
        """Write a transfer's blocks, and begin to decode; later ones may be faster."""
        if reserved := self.transfers_in(TransferState.RESERVED):
            transfer = reserved[place % len(reserved)]
            sequence = transfer.sequence
            name, prompt, params = sequence.attempt_id, sequence.token_ids, sequence.params
            del self.transfers[name]
            for position in range(transfer.first_block * BLOCK_SIZE, sequence.num_transferred_tokens):
                block_id = sequence.block_table[position // BLOCK_SIZE]
                assert self.engine.pool.ref_cnt(block_id) == 1, "a shared block is written"
                write_token(self.engine.memory, block_id, position, prompt)
            # The first token, as the other worker samples it.
            first = (
                undisturbed(tuple(prompt), params, self.window)[0][0] if params.num_sequences == 1 else None
            )
            if first is not None:
                self.outputs[name, 0] = [first]
            self.command(lambda e: e.transfers.admit(name, first))

    @rule(place=st.integers(0, 3))
    def lose(self, place: int) -> None:
        """Let a sender die that holds blocks here: they come back with the request's deadline only."""
        if reserved := self.transfers_in(TransferState.RESERVED):
            reserved[place % len(reserved)].state = TransferState.LOST

    @rule()
    def end_lost(self) -> None:
        """Let the deadline of a request pass whose sender died."""
        if lost := self.transfers_in(TransferState.LOST):
            self.abort(lost[0].sequence.attempt_id)

    def transfers_in(self, state: TransferState) -> list[Transfer]:
        return [each for each in self.transfers.values() if each.state == state]

    @rule(name=requests)
    def abort(self, name: str) -> None:
        self.transfers.pop(name, None)
        self.aborted.add(name)
        self.command(lambda e: e.abort(name))

    def command(self, command: Callable[[Engine], T]) -> T:
        """Run a command between two steps, as the engine's thread does."""
        result = command(self.engine)
        with self.in_order():
            self.engine.transfers.grant_blocks()
        return result

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Check that no group gets its first blocks before an older one that waits for its own.

        A group may pass a larger one that waits for a sequence in a step.
        Where clients share the pool, those of other clients may, and those that were preempted more often.
        """
        before = self.groups_without_blocks()
        yield
        owed, transfers = self.engine.queues.num_owed_blocks, set(self.engine.queues.transfers)
        after = self.groups_without_blocks()
        given = [each for each in before - after if each.sequences]
        for group in given:
            waiting = [each for each in before & after if not each.is_loading]
            is_passed = {e for e in waiting if e.client in owed and e.num_slots > group.num_slots} - transfers
            waiting = [each for each in waiting if each not in is_passed]
            if len(self.clients) > 1:
                waiting = [each for each in waiting if each.client == group.client]
                waiting = [each for each in waiting if each.num_preemptions >= group.num_preemptions]
            assert all(group.arrival < each.arrival for each in waiting)

    def groups_without_blocks(self) -> set[SequenceGroup]:
        """Return the groups that wait for all of their blocks, or for those that will be pushed."""
        waiting = {group for group in self.engine.queues.waiting if not group.holds_blocks}
        return waiting | set(self.engine.queues.transfers)

    @rule(num_steps=st.integers(1, 6))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.advance()

    @rule(force=st.sampled_from([True, False]))
    def change_costs(self, force: bool) -> None:
        """Make the one way of preemption or the other the cheaper."""
        self.engine.preemption.prefers_swap = lambda num_tokens, num_blocks: force

    def advance(self) -> None:
        with self.in_order():
            collect(self.engine, self.outputs)
        self.engine.check_conservation()
        clear_unused(self.engine)
        if self.engine.is_blocked and not self.engine.is_idle:
            assert self.is_awaited(), "requests wait, none runs, and no event to come can change that"

    def is_awaited(self) -> bool:
        """Whether an event from outside will give blocks back, or let a group run."""
        states = (TransferState.ACCEPTED, TransferState.RESERVED, TransferState.LOST)
        return any(map(self.transfers_in, states))

    @invariant()
    def ledger_agrees(self) -> None:
        self.engine.check_conservation()

    @invariant()
    def no_transfer_waits_for_blocks_that_are_there(self) -> None:
        waiting = self.transfers_in(TransferState.WAITING)
        queues = self.engine.queues
        assert {group.prompt for group in queues.transfers} == {each.sequence for each in waiting}
        is_shared = len(self.clients) > 1
        if waiting and not is_shared and not any(not group.holds_blocks for group in queues.waiting):
            sequence = next(iter(queues.transfers)).prompt
            num_missing = self.engine.tables.num_missing(sequence)
            num_kept = 1 if queues.running else 0
            assert num_missing > self.engine.pool.num_allocatable - num_kept

    @invariant()
    def waiting_groups_with_blocks_are_known(self) -> None:
        queues = self.engine.queues
        assert queues.waiting_with_blocks() == [group for group in queues.waiting if group.holds_blocks]

    @invariant()
    def a_budget_bounds_what_is_held(self) -> None:
        for group in self.engine.groups.values():
            for sequence in group.sequences:
                budget = sequence.params.kv_budget_tokens
                if budget is not None and sequence.num_computed_tokens > sequence.num_prompt_tokens:
                    assert len(sequence.held_blocks) <= budget // BLOCK_SIZE

    @invariant()
    def a_window_bounds_what_is_held(self) -> None:
        if self.window is not None:
            for group in self.engine.groups.values():
                for sequence in group.sequences:
                    limit = self.engine.tables.max_held_blocks(group.prompt, 1, sequence.num_tokens)
                    assert len(sequence.held_blocks) <= limit

    @invariant()
    def no_sequence_holds_blocks_that_it_has_no_tokens_for(self) -> None:
        for group in self.engine.groups.values():
            for sequence in group.sequences:
                assert (len(sequence.block_table) - 1) * BLOCK_SIZE < sequence.num_tokens

    def teardown(self) -> None:
        for number in range(10_000):
            self.open()
            if self.transfers_in(TransferState.RESERVED):
                self.deliver()
            elif self.engine.is_idle and not self.transfers:
                break
            else:
                self.advance()
                # Without the blocks of a lost sender, a group may be computed and preempted again and again.
                if not self.engine.num_stepped or number % 100 == 99:
                    self.end_lost()
        assert self.engine.is_idle, "the engine does not come to its end"
        assert self.engine.pool.counts.used == 0
        assert self.engine.swap_space.num_free == NUM_SWAP_BLOCKS
        for name, (prompt, params) in self.wanted.items():
            if name not in self.aborted:
                got = {index: tokens for (owner, index), tokens in self.outputs.items() if owner == name}
                assert got == undisturbed(tuple(prompt), params, self.window), (prompt, params)


class WindowedEngineMachine(EngineMachine):
    """The same of a model whose layers all forget, in a pool that does not hold the longest sequence."""

    window = 6
    num_blocks = 20

    def adapt(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        return prompt * 5, replace(params, kv_budget_tokens=None)


class MixedEngineMachine(EngineMachine):
    """The same of a model of which one layer forgets, and another does not."""

    num_blocks = 32
    shape = MIXED_SHAPE

    def adapt(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        return prompt * 3, replace(params, kv_budget_tokens=None)


class ConvolutionEngineMachine(MixedEngineMachine):
    """The same of a model with layers that see only the tokens just before their own."""

    shape = CONVOLUTION_SHAPE


class StateEngineMachine(MixedEngineMachine):
    """The same of a model with states: a block has the one after its last token, and drafts are refused."""

    shape = STATE_SHAPE
    has_drafts = False


def open_small_disk(folder: Path, executor: Executor | None = None, shape: KvShape = SHAPE) -> DiskCache:
    return open_disk(folder, executor, block_bytes=shape.block_bytes, num_blocks=NUM_DISK_BLOCKS)


class TieredEngineMachine(EngineMachine):
    """The same with a pool so small that everything cycles through host memory and disk.

    The runner compares every block that it reads with the tokens, so a block that came back wrong fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.later = ManualExecutor()
        self.disk = open_small_disk(Path(self.folder.name), self.later, self.shape)
        self.host = HostCache(KvMemory(self.shape, NUM_HOST_BLOCKS, CPU, is_pool=False))
        self.pinned: tuple[list[int], list[int]] = [], []
        tiers = Tiers(self.host, self.disk)
        self.engine = make_engine(
            self.num_blocks, NUM_SWAP_BLOCKS, self.window, tiers, has_drafts=self.has_drafts, shape=self.shape
        )
        self.num_advanced = 0

    @rule(prompt=prompts)
    def lend(self, prompt: list[int]) -> None:
        """Pin a prompt's blocks, bringing them into the pool, and compare them with its tokens."""
        self.unpin()
        prompt, _ = self.adapt(prompt, SamplingParams())
        sequence = Sequence("pin", list(prompt), len(prompt), SamplingParams(), b"root")
        sequence.extend_hashes(BLOCK_SIZE)
        self.pinned = self.command(lambda e: e.pin("pin", sequence.block_hashes)), prompt
        self.engine.check_conservation()

    @rule()
    def unpin(self) -> None:
        """Compare what is pinned with its tokens still, and let it go."""
        block_ids, prompt = self.pinned
        if self.shape == STATE_SHAPE and block_ids:
            check_state(self.engine.memory, block_ids[-1], prompt[: len(block_ids) * BLOCK_SIZE])
        for part in range(1 if self.shape == STATE_SHAPE else self.shape.num_frames):
            first = self.shape.num_bare(len(block_ids)) if part else 0
            table = block_ids[first:]
            held = [token for each in table for token in read_tokens(self.engine.memory, each, part)]
            assert held == prompt[first * BLOCK_SIZE :][: len(held)]
        self.pinned = [], []
        self.command(lambda e: e.pins.unpin("pin"))

    @rule()
    def clear_cache(self) -> None:
        """Forget what no request uses, in all tiers."""
        self.command(Engine.clear_cache)
        assert self.engine.pool.counts.cached == 0
        assert not len(self.disk)
        assert not len(self.host)

    def is_awaited(self) -> bool:
        # The disk wakes the engine, and a pin is let go.
        return super().is_awaited() or bool(self.later.calls) or self.engine.pins.num_blocks > 0

    def advance(self) -> None:
        self.num_advanced += 1
        if self.num_advanced % 3 == 0:  # what is read or written takes a step or two
            self.later.run()
        super().advance()

    def teardown(self) -> None:
        self.unpin()
        super().teardown()
        self.disk.close()
        self.folder.cleanup()


class TieredWindowedEngineMachine(TieredEngineMachine, WindowedEngineMachine):
    """Tiers below a pool from which sequences give their first blocks back before their end."""


class TieredMixedEngineMachine(TieredEngineMachine, MixedEngineMachine):
    """Tiers below a pool of blocks with two parts."""


class TieredConvolutionEngineMachine(TieredEngineMachine, ConvolutionEngineMachine):
    """Tiers below a pool of blocks with the inputs of short convolutions."""


class TieredStateEngineMachine(TieredEngineMachine, StateEngineMachine):
    """Tiers below a pool of blocks with states."""


class SharedEngineMachine(EngineMachine):
    """The same with clients that share the pool, by weight, and requests that are more or less urgent."""

    clients = ("a", "a", "b", "c")
    patiences = (0.0, -10.0, 5.0, 0.0)


class SharedWindowedEngineMachine(TieredWindowedEngineMachine):
    """Clients that share a pool with tiers below it, of a model that forgets."""

    clients = SharedEngineMachine.clients


TestEngine = EngineMachine.TestCase
TestSharedEngine = pytest.mark.slow(SharedEngineMachine.TestCase)
TestSharedWindowedEngine = pytest.mark.slow(SharedWindowedEngineMachine.TestCase)
TestWindowedEngine = pytest.mark.slow(WindowedEngineMachine.TestCase)
TestMixedEngine = MixedEngineMachine.TestCase
TestConvolutionEngine = pytest.mark.slow(ConvolutionEngineMachine.TestCase)
TestTieredConvolutionEngine = pytest.mark.slow(TieredConvolutionEngineMachine.TestCase)
TestStateEngine = StateEngineMachine.TestCase
TestTieredStateEngine = pytest.mark.slow(TieredStateEngineMachine.TestCase)
TestTieredMixedEngine = pytest.mark.slow(TieredMixedEngineMachine.TestCase)
TestTieredEngine = pytest.mark.slow(TieredEngineMachine.TestCase)
TestTieredWindowedEngine = pytest.mark.slow(TieredWindowedEngineMachine.TestCase)
for _machine in (
    *(TestEngine, TestSharedEngine, TestSharedWindowedEngine, TestWindowedEngine, TestMixedEngine),
    *(TestTieredMixedEngine, TestTieredEngine, TestTieredWindowedEngine),
    *(TestConvolutionEngine, TestTieredConvolutionEngine, TestStateEngine, TestTieredStateEngine),
):
    _machine.settings = settings(max_examples=100, stateful_step_count=30)
del _machine  # or else pytest would run the last one twice


def test_a_working_set_larger_than_the_pool_is_read_back_from_every_tier(tmp_path: Path) -> None:
    """Requests one after the other, with the disk's own threads."""
    disk = open_small_disk(tmp_path)
    tiers = Tiers(HostCache(KvMemory(SHAPE, NUM_HOST_BLOCKS, CPU)), disk)
    engine = make_engine(8, 0, None, tiers)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    prompts = [random.Random(seed).choices(range(2, VOCAB_SIZE), k=21) for seed in range(6)]
    for number, index in enumerate([0, 0, 1, 0, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]):
        name = str(number)
        engine.add_request(Sequence(name, list(prompts[index]), 21, params, b"root"))
        outputs: Outputs = {}
        while not engine.is_idle:
            collect(engine, outputs)
            engine.check_conservation()
        assert outputs[name, 0] == undisturbed(tuple(prompts[index]), params, None)[0]
    assert engine.tiers is not None
    hits = engine.tiers.counts.hits
    assert all(hits[tier] >= 3 for tier in ("pool", "host", "disk")), hits
    assert hits.total() == 5 * 8  # five blocks of each prompt, of all but its first time
    disk.close()


def test_blocks_from_host_memory_do_not_evict_their_prefix() -> None:
    """What a window drops of a cached prefix would be evicted for the blocks that go on after it."""
    engine = make_engine(8, 0, 6, Tiers(HostCache(KvMemory(SHAPE, 16, CPU)), None))
    params = SamplingParams(temperature=0.0, max_tokens=1)
    beginning = random.Random(0).choices(range(2, VOCAB_SIZE), k=32)
    for prompt in ([*beginning[:8], 2], [*beginning, 3], [*beginning, 4]):
        engine.add_request(Sequence("r", list(prompt), len(prompt), params, b"root"))
        outputs: Outputs = {}
        while not engine.is_idle:
            collect(engine, outputs)
            engine.check_conservation()
        assert outputs["r", 0] == undisturbed(tuple(prompt), params, 6)[0]


def test_blocks_that_were_not_filled_yet_are_not_swapped_out() -> None:
    """A request of two samples is preempted in the step that has planned its copies from host memory."""
    engine = make_engine(12, NUM_SWAP_BLOCKS, None, Tiers(HostCache(KvMemory(SHAPE, 16, CPU)), None))
    engine.preemption.prefers_swap = lambda num_tokens, num_blocks: False
    generator = random.Random(1)
    first, second = (generator.choices(range(2, VOCAB_SIZE), k=length) for length in (12, 8))
    params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=14, ignore_eos=True)
    request = Sequence("second", list(second), 8, params, b"root")
    alone = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    engine.add_request(Sequence("first", first, 12, alone, b"root"))
    engine.add_request(request)
    outputs: Outputs = {}
    while "first" in engine.groups:
        collect(engine, outputs)
    assert request.status is SequenceStatus.PREEMPTED
    engine.pin("lent", request.block_hashes[:2])
    engine.pins.reserve("pulled", 7)
    engine.preemption.prefers_swap = lambda num_tokens, num_blocks: True
    num_preempted = engine.preemption.num_preempted
    collect(engine, outputs)
    assert engine.preemption.num_preempted > num_preempted
    engine.check_conservation()
    engine.pins.unpin("pulled")
    engine.pins.unpin("lent")
    while not engine.is_idle:
        collect(engine, outputs)
    engine.check_conservation()
    got = {index: tokens for (owner, index), tokens in outputs.items() if owner == "second"}
    assert got == undisturbed(tuple(second), params, None)
