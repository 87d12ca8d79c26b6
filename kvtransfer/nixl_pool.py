"""Reads blocks out of other workers' pools by NIXL, which moves them over whatever fabric UCX finds.

::

    sender (has the blocks)                        receiver (needs them)
    registers its whole pool, once
    offer: metadata, address, size    ────────►    prepares one descriptor per block of that pool
    frames: index, digest, place      ────────►    READs the blocks into slots, copies them, checks the copies

A READ lands in slots of a staging buffer, never in the receiver's pool. The slots of a READ that has not
ended in time stay out of use until NIXL has ended it; whatever it still writes reaches no block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import NotSharedError, ProtocolError, SenderGoneError
from quire.kvtransfer.frame import Frame
from quire.protos import kvtransfer_pb2 as pb

READ_SECONDS = 10.0
"""Time limit of one READ, with the wait for its slots."""
POLL_SECONDS = 0.0001
STAGING_BYTES = 32 << 20
"""Memory that READs land in: two of the largest messages."""

Measured = Callable[[str, float], None]
"""Is told the GiB/s of a READ from the worker with an epoch; called in a thread."""


class _Read(NamedTuple):
    """A READ that NIXL has not ended, and the slots that it may still write."""

    handle: Any
    slots: Sequence[int]


@dataclass(eq=False, slots=True)
class _Peer:
    """A worker whose pool is known here.

    Attributes:
        blocks: the descriptors of its blocks; None until their size is known.
        num_reads: READs that it has answered.
    """

    epoch: str
    address: int
    num_bytes: int
    blocks: Any = None
    num_reads: int = 0


class NixlPool:
    """The pool of a worker that READs reach; an ``Intake``."""

    transport: Literal["nixl"] = "nixl"

    def __init__(self, agent: NixlAgent, peer: _Peer) -> None:
        self._agent = agent
        self._peer = peer

    def frames(self, messages: Iterable[pb.BlockFrame], block_bytes: int) -> Iterator[Frame]:
        """Yield the blocks that messages name, each checked; see ``Intake.frames``."""
        named = list(messages)
        for each in named:
            if not each.HasField("block_id") or (each.block_id + 1) * block_bytes > self._peer.num_bytes:
                raise ProtocolError(f"block {each.index} is not in the sender's pool")
        step = self._agent.num_slots(block_bytes)
        for start in range(0, len(named), step):
            part = named[start : start + step]
            payloads = self._agent.read(self._peer, [each.block_id for each in part], block_bytes)
            for each, payload in zip(part, payloads, strict=True):
                frame = Frame(each.index, each.block_hash, payload)
                frames.check(frame, payload, each.digest)
                yield frame


class NixlAgent:
    """One worker's end of NIXL. All methods may wait, so they are called in threads.

    Args:
        epoch: the worker's epoch, which is the agent's name: a restarted worker is another agent.
        measured: is told the speed of the second READ from each peer; the first one connects.

    Raises:
        NotSharedError: NIXL is not installed, or cannot start.
    """

    def __init__(self, epoch: str, measured: Measured = lambda epoch, rate: None) -> None:
        try:
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise NotSharedError(f"NIXL needs the extra 'nixl': {error}") from error
        self._measured = measured
        self._epoch = epoch
        try:
            self._agent = nixl_agent(epoch, nixl_agent_config(enable_prog_thread=True, backends=[]))
            # With "peer", a peer that dies is an error and not a hang.
            settings = self._agent.get_plugin_params("UCX") | {"ucx_error_handling_mode": "peer"}
            self._agent.create_backend("UCX", settings)
        except Exception as error:  # the bindings' errors have no common class
            raise NotSharedError(f"NIXL cannot start: {error!r}") from error
        self._peers: dict[str, _Peer] = {}
        self._stuck: list[_Read] = []
        self._changed = threading.Condition()
        self._staging: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._slots: Any = None
        self._free: list[int] = []

    def offer(self, address: int, num_bytes: int) -> pb.SharedPool:
        """Register this worker's pool, so that others may read it, and return what they need to know."""
        self._agent.register_memory([(address, num_bytes, 0, "kv")], "DRAM")
        return pb.SharedPool(
            epoch=self._epoch,
            nixl_metadata=self._agent.get_agent_metadata(),
            pool_address=address,
            pool_bytes=num_bytes,
        )

    def connect(self, offer: pb.SharedPool) -> NixlPool:
        """Return the pool of a worker that has made this offer.

        Raises:
            NotSharedError: it offers none, or its metadata cannot be used.
        """
        if not offer.nixl_metadata:
            raise NotSharedError("it does not offer its pool by NIXL")
        with self._changed:
            self._end_stuck()
            if (peer := self._peers.get(offer.epoch)) is None:
                peer = self._peers[offer.epoch] = self._add(offer)
        return NixlPool(self, peer)

    def _add(self, offer: pb.SharedPool) -> _Peer:
        try:
            name = self._agent.add_remote_agent(offer.nixl_metadata)
        except Exception as error:
            raise NotSharedError(f"its NIXL metadata cannot be used: {error!r}") from error
        name = name.decode() if isinstance(name, bytes) else name
        if name != offer.epoch:
            if name not in self._peers:
                self._agent.remove_remote_agent(name)
            raise NotSharedError("its NIXL agent is that of another start of the worker")
        return _Peer(offer.epoch, offer.pool_address, offer.pool_bytes)

    def num_slots(self, block_bytes: int) -> int:
        """Return how many blocks one READ may bring. All blocks of a worker have one size."""
        with self._changed:
            if self._staging is None:
                number = max(1, STAGING_BYTES // block_bytes)
                staging = np.zeros((number, block_bytes), np.uint8)
                self._agent.register_memory([(staging.ctypes.data, staging.nbytes, 0, "slots")], "DRAM")
                rows = _rows(staging.ctypes.data, number, block_bytes)
                self._slots = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "DRAM")
                self._staging, self._free = staging, list(range(number))
            # Half of them, so that two pushes can read at a time.
            return max(1, len(self._staging) // 2)

    def read(self, peer: _Peer, block_ids: Sequence[int], block_bytes: int) -> list[bytes]:
        """Return copies of blocks of a peer's pool; at most ``num_slots``.

        Raises:
            SenderGoneError: the peer has ended, or does not answer within ``READ_SECONDS``.
        """
        deadline = time.monotonic() + READ_SECONDS
        slots = self._take(len(block_ids), deadline)
        handle: Any = None
        start = time.perf_counter()
        try:
            with self._changed:
                handle = self._prepare(peer, slots, block_ids, block_bytes)
                state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                with self._changed:
                    state = self._agent.check_xfer_state(handle)
        except Exception as error:
            self._give_up(peer, _Read(handle, slots))
            raise SenderGoneError(f"the READ of blocks failed: {error!r}") from error
        if state != "DONE":
            self._give_up(peer, _Read(handle, slots))
            raise SenderGoneError(f"the READ of blocks did not end within {READ_SECONDS:g} s: {state}")
        seconds = time.perf_counter() - start
        assert self._staging is not None
        payloads = [self._staging[slot].tobytes() for slot in slots]
        with self._changed:
            handle.release()
            self._give_back(slots)
            peer.num_reads += 1
            is_second = peer.num_reads == 2
        if is_second:
            self._measured(peer.epoch, len(block_ids) * block_bytes / seconds / (1 << 30))
        return payloads

    def _prepare(self, peer: _Peer, slots: Sequence[int], block_ids: Sequence[int], block_bytes: int) -> Any:
        if peer.blocks is None:
            rows = _rows(peer.address, peer.num_bytes // block_bytes, block_bytes)
            peer.blocks = self._agent.prep_xfer_dlist(peer.epoch, rows, "DRAM")
        ours, theirs = np.array(slots, np.int32), np.array(block_ids, np.int32)
        return self._agent.make_prepped_xfer("READ", self._slots, ours, peer.blocks, theirs, b"")

    def _take(self, number: int, deadline: float) -> Sequence[int]:
        with self._changed:
            while len(self._free) < number:
                self._end_stuck()
                if time.monotonic() > deadline:
                    raise SenderGoneError("other READs that do not end hold all the memory for READs")
                self._changed.wait(0.05)
            taken, self._free = self._free[:number], self._free[number:]
            return taken

    def _give_back(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)
        self._changed.notify_all()

    def _give_up(self, peer: _Peer, read: _Read) -> None:
        """Forget a peer whose READ failed; its slots come back once NIXL has ended the READ."""
        with self._changed:
            self._stuck.append(read)
            self._end_stuck()
            if self._peers.get(peer.epoch) is peer:
                del self._peers[peer.epoch]
                if not self._stuck:
                    self._agent.remove_remote_agent(peer.epoch)

    def _end_stuck(self) -> None:
        """Give back the slots of READs that have ended, and keep the others."""
        stuck, self._stuck = self._stuck, []
        for read in stuck:
            if self._has_ended(read.handle):
                self._give_back(read.slots)
            else:
                self._stuck.append(read)

    def _has_ended(self, handle: Any) -> bool:
        if handle is None:
            return True  # it was never begun
        try:
            if self._agent.check_xfer_state(handle) == "PROC":
                return False
        except Exception:
            pass  # it has failed; whether parts of it still run shows when it is released
        try:
            handle.release()
        except Exception:
            return False
        return True


def _rows(address: int, number: int, block_bytes: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return descriptors of consecutive blocks: [number, 3], address, length and device of each."""
    starts = np.uint64(address) + np.arange(number, dtype=np.uint64) * np.uint64(block_bytes)
    return np.stack([starts, np.full(number, block_bytes, np.uint64), np.zeros(number, np.uint64)], 1).astype(
        np.uint64
    )
