"""Reads blocks out of other workers' pools with NIXL, over the fabric that UCX finds.

::

    sender (has the blocks)                        receiver (needs them)
    registers its whole pool, once
    offer: metadata, address, size    ────────►    prepares one descriptor per block of that pool
    frames: index, digest, place      ────────►    READs the blocks, copies them, checks the copies

A READ writes into a slab, a separate buffer, and never into the receiver's pool. Copies out of the slab are
checked. **NIXL cannot cancel a READ.** It releases a running READ and its peer without an error, but the
bytes still arrive when the peer continues. A READ that has not ended in time therefore keeps its slab and its
peer until it ends. READs from other peers do not wait for it.

The sender's blocks are pinned until their push or lease ends. A READ that runs longer may copy a block that
now belongs to another sequence. Its frame's digest then detects this.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import NotSharedError, ProtocolError, SenderGoneError
from quire.kvtransfer.frame import Frame, Transport
from quire.kvtransfer.transports.interface import Intake, OwnPool, Tell, ToldOnce
from quire.protos import kvtransfer_pb2 as pb
from quire.rpc.loopback import REMEDY

logger = logging.getLogger("quire.kvtransfer")

READ_SECONDS = 10.0
"""Time limit of one READ, including the wait for its peer and its slab."""
POLL_SECONDS = 0.0001
PAUSE_MICROSECONDS = 100
"""Pause of NIXL's thread when there is nothing to do."""
SLAB_BYTES = 16 << 20
"""Size of a slab, which has room for the blocks that one message names."""
MAX_SLABS = 8
"""Most READs at a time, including those that exceeded their time. Each peer has one."""
MAX_PEERS = 64
IDLE_SECONDS = 300.0
"""When a new peer is added, a peer without READs for this time is forgotten."""
MEASURED_READS = 8
MEASURED_BYTES = 1 << 20
"""The speed of a peer is the best of this many READs of at least this size. The first ones also connect."""
SLOW_GIB_PER_SECOND = 1.0
"""At a lower speed, UCX has probably fallen back to TCP."""
MAX_THREADS = 32
"""Number of threads that wait for READs. Each may be stuck for ``READ_SECONDS``."""


def open_transports(pool: OwnPool, tell: Tell) -> NixlPools:
    """Offer this worker's pool to others through NIXL.

    Raises:
        NotSharedError: NIXL is not installed, cannot start, or would let strangers reach the pool.
    """
    if pool.has_tls:
        # UCX neither encrypts nor checks certificates, so it would bypass TLS.
        raise NotSharedError("it cannot be used with TLS between workers: use auto or messages")
    if not pool.has_secret:
        # Anyone with a pool's UCX keys can read and write the whole pool.
        raise NotSharedError(f"it needs a cluster secret, since strangers would get the pool: {REMEDY}")
    if pool.is_divided:
        raise NotSharedError("it can be used without --tensor-parallel-size only: use auto or messages")
    if pool.device != "cpu":
        raise NotSharedError("it can be used for pools on the CPU only")
    transports = NixlPools(pool.epoch, tell)
    transports.share(pool.address, pool.num_bytes)
    return transports


class NixlPools:
    """The ``Transports`` of a worker that reads the pools of others with NIXL, and refuses other transports.

    Args:
        epoch: the worker's epoch.
        tell: called once for each peer that is read with NIXL.

    Raises:
        NotSharedError: NIXL is not installed, or cannot start.
    """

    def __init__(self, epoch: str, tell: Tell = lambda epoch, transport, reason: None) -> None:
        self.offer = pb.SharedPool()
        self.allowed = frozenset({Transport.NIXL})
        self._tell = ToldOnce(tell)
        self._agent = NixlAgent(epoch)
        # Stuck READs must not use up the threads in which other transfers copy blocks. There is no shutdown,
        # after which a late READ would not be a SenderGoneError: the threads end with the last reference to
        # the executor.
        self._executor = ThreadPoolExecutor(MAX_THREADS, "nixl")

    def share(self, address: int, num_bytes: int) -> None:
        """Offer this worker's pool, which is at an address of this process."""
        self.offer = self._agent.offer(address, num_bytes)

    async def choose(self, offer: pb.SharedPool) -> Intake:
        """Return the peer's pool; see ``Transports.choose``."""
        if not offer.keys:
            raise NotSharedError("the other worker does not offer its pool by NIXL")
        self._tell(offer.epoch, Transport.NIXL, "")
        return NixlPool(self._agent, offer, self._executor)

    def close(self) -> None:
        """End all READs, and stop offering the pool."""
        self._agent.close()


@dataclass(eq=False, slots=True)
class _Slab:
    """A buffer into which READs write.

    Attributes:
        rows: [blocks, bytes of a block].
        registered: NIXL's handle of the memory.
        blocks: descriptors of the rows.
    """

    rows: np.ndarray[Any, np.dtype[np.uint8]]
    registered: Any
    blocks: Any


@dataclass(eq=False, slots=True)
class _Read:
    """A READ that NIXL may still work on.

    Attributes:
        handle: None until it is prepared.
        is_left: whether its caller has stopped waiting for it.
        has_failed: whether NIXL has ended it with an error.
    """

    slab: _Slab
    handle: Any = None
    is_left: bool = False
    has_failed: bool = False

    def release(self) -> bool:
        """Release the handle; return whether NIXL accepts that."""
        if not _release(self.handle):
            return False
        self.handle = None
        return True


@dataclass(eq=False, slots=True)
class _Peer:
    """A worker whose pool is known to the agent.

    Attributes:
        blocks: descriptors of its blocks.
        read: the READ that it has not finished.
        rates: GiB/s of its READs that are large enough.
        used: when its last READ began.
    """

    epoch: str
    blocks: Any
    read: _Read | None = None
    rates: list[float] = field(default_factory=list)
    used: float = field(default_factory=time.monotonic)


class NixlPool:
    """The ``Intake`` of a peer whose pool READs can reach."""

    transport = Transport.NIXL

    def __init__(self, agent: NixlAgent, offer: pb.SharedPool, executor: Executor) -> None:
        self.executor: Executor | None = executor
        self._agent = agent
        self._offer = offer

    def frames(
        self, messages: Iterable[pb.BlockFrame], block_bytes: int, bare_bytes: int = 0, frame_bytes: int = 0
    ) -> Iterator[Frame]:
        """Yield the blocks that messages name, each checked; see ``Intake.frames``."""
        named = list(messages)
        for each in named:
            if not each.HasField("block_id") or (each.block_id + 1) * block_bytes > self._offer.num_bytes:
                raise ProtocolError(f"block {each.index} is not in the sender's pool")
        step = blocks_per_read(block_bytes)
        for start in range(0, len(named), step):
            part = named[start : start + step]
            payloads = self._agent.read(self._offer, [each.block_id for each in part], block_bytes)
            for each, payload in zip(part, payloads, strict=True):
                frame = Frame(each.index, each.block_hash, payload)
                frames.check(frame, payload, each.digest)
                yield frame


class NixlAgent:
    """One worker's NIXL agent. All methods may wait, so threads call them; ``close`` waits only briefly.

    Args:
        epoch: the worker's epoch, used as the agent's name: a restarted worker is another agent.

    Raises:
        NotSharedError: NIXL is not installed, or cannot start.
    """

    def __init__(self, epoch: str) -> None:
        try:
            # This way of importing is needed because the bindings have no annotations.
            api, bindings = import_module("nixl_cu12._api"), import_module("nixl_cu12._bindings")
        except ImportError as error:
            raise NotSharedError(
                f"it needs the extra 'nixl' ({error}): in quire's clone, run "
                ".venv/bin/pip install -e '.[nixl]'"
            ) from error
        self._epoch = epoch
        try:
            self._agent: Any = api.nixl_agent(epoch, api.nixl_agent_config(backends=[]))
            # The wrapper has no setting for the pause of the thread that answers other agents. Without a
            # pause, this thread keeps a processor busy for as long as the worker runs.
            config = bindings.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = PAUSE_MICROSECONDS
            config.syncMode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE.value
            self._agent.agent = bindings.nixlAgent(epoch, config)
            # With "peer", the death of a peer is an error instead of a hang.
            settings = self._agent.get_plugin_params("UCX") | {"ucx_error_handling_mode": "peer"}
            self._agent.create_backend("UCX", settings)
        except Exception as error:  # the bindings' errors have no common class
            raise NotSharedError(f"NIXL cannot start: {error!r}") from error
        # Only one thread may use the agent at a time. Waiting threads are notified when a slab is free.
        self._changed = threading.Condition()
        self._pool: Any = None
        self._peers: dict[str, _Peer] = {}
        self._slabs: list[_Slab] = []
        self._free: list[_Slab] = []
        self._block_bytes = 0
        self._num_reading = 0
        self._is_closed = False

    def offer(self, address: int, num_bytes: int) -> pb.SharedPool:
        """Register this worker's pool, so that others may read it; return the metadata that they need."""
        with self._changed:
            self._pool = self._agent.register_memory([(address, num_bytes, 0, "kv")], "DRAM")
            # Slabs are registered later, so the offer does not contain their keys.
            metadata = self._agent.get_agent_metadata()
        return pb.SharedPool(epoch=self._epoch, keys=metadata, address=address, num_bytes=num_bytes)

    @property
    def known_epochs(self) -> set[str]:
        """The epochs of the workers that the agent knows."""
        return set(self._peers)

    @property
    def num_free_slabs(self) -> int:
        """Number of slabs for further READs, including slabs that are not allocated yet."""
        with self._changed:
            self._settle()
            return MAX_SLABS - len(self._slabs) + len(self._free)

    def read(self, offer: pb.SharedPool, block_ids: Sequence[int], block_bytes: int) -> list[bytes]:
        """Return copies of blocks of a peer's pool; at most ``blocks_per_read``.

        Raises:
            SenderGoneError: the peer has ended, does not answer within ``READ_SECONDS``, or has not yet
                answered an earlier READ; or this agent was closed.
        """
        deadline = time.monotonic() + READ_SECONDS
        peer, read = self._begin(offer, block_bytes, deadline)
        start = time.perf_counter()
        try:
            state = self._post(peer, read, block_ids)
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                state = self._state(read)
            if state != "DONE":
                raise SenderGoneError(f"the READ of blocks did not end within {READ_SECONDS:g} s")
            rate = len(block_ids) * block_bytes / (time.perf_counter() - start) / (1 << 30)
            payloads = [read.slab.rows[slot].tobytes() for slot in range(len(block_ids))]
        except SenderGoneError:
            raise
        except Exception as error:
            read.has_failed = True
            raise SenderGoneError(f"the READ of blocks failed: {error!r}") from error
        finally:
            self._leave(read)
        if len(block_ids) * block_bytes >= MEASURED_BYTES:
            self._measure(peer, rate)
        return payloads

    def close(self) -> None:
        """Release all threads and memory. READs fail, and those that have not ended write nothing more."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_reading)
            with suppress(Exception):
                self._settle()
            for peer in list(self._peers.values()):
                if peer.read is not None:
                    peer.read.release()
                self._forget(peer)
            for slab in self._slabs:
                _release(slab.blocks)
                slab.blocks = None
                self._deregister(slab.registered)
            self._deregister(self._pool)
            # Every handle refers to the agent. READs have surely ended only when the last reference to it is
            # gone, and slabs may be freed only after that.
            self._agent = None
            self._slabs, self._free = [], []

    def _begin(self, offer: pb.SharedPool, block_bytes: int, deadline: float) -> tuple[_Peer, _Read]:
        """Wait for the peer and a slab, and reserve both."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise SenderGoneError("this worker is ending")
                self._settle()
                peer = self._peer(offer, block_bytes)
                if peer.read is not None and peer.read.is_left:
                    raise SenderGoneError("the sender has not answered an earlier READ")
                if peer.read is None and (slab := self._take_slab()) is not None:
                    peer.read, peer.used = _Read(slab), time.monotonic()
                    self._num_reading += 1
                    return peer, peer.read
                if (seconds := deadline - time.monotonic()) <= 0:
                    raise SenderGoneError(f"no READ could begin within {READ_SECONDS:g} s")
                self._changed.wait(min(seconds, 0.05))

    def _post(self, peer: _Peer, read: _Read, block_ids: Sequence[int]) -> str:
        ours, theirs = np.arange(len(block_ids), dtype=np.int32), np.array(block_ids, np.int32)
        with self._changed:
            read.handle = self._agent.make_prepped_xfer(
                "READ", read.slab.blocks, ours, peer.blocks, theirs, b""
            )
            state: str = self._agent.transfer(read.handle)
            return state

    def _state(self, read: _Read) -> str:
        with self._changed:
            if self._is_closed:
                raise SenderGoneError("this worker is ending")
            state: str = self._agent.check_xfer_state(read.handle)
            return state

    def _leave(self, read: _Read) -> None:
        with self._changed:
            read.is_left = True
            self._num_reading -= 1
            self._settle()
            self._changed.notify_all()

    def _measure(self, peer: _Peer, rate: float) -> None:
        """Log the speed of a peer once it is known, since UCX falls back to TCP silently."""
        with self._changed:
            peer.rates.append(rate)
            if len(peer.rates) != MEASURED_READS:
                return
            best = max(peer.rates)
        level = logging.WARNING if best < SLOW_GIB_PER_SECOND else logging.INFO
        speed = {"peer_epoch": peer.epoch, "gib_per_second": round(best, 3)}
        logger.log(level, "nixl_speed", extra={"fields": speed})

    def _settle(self) -> None:
        """Free the slabs of abandoned READs that have ended; forget failed peers."""
        for peer in list(self._peers.values()):
            read = peer.read
            if read is None or not read.is_left or not self._has_ended(read):
                continue
            peer.read = None
            self._free.append(read.slab)
            if read.has_failed:
                self._forget(peer)

    def _has_ended(self, read: _Read) -> bool:
        if read.handle is None:
            return True
        try:
            if self._agent.check_xfer_state(read.handle) == "PROC":
                return False
        except Exception:
            read.has_failed = True
        return read.release()

    def _peer(self, offer: pb.SharedPool, block_bytes: int) -> _Peer:
        if (peer := self._peers.get(offer.epoch)) is not None:
            return peer
        # The layouts of two workers are compared before blocks move between them.
        if self._block_bytes not in (0, block_bytes):
            raise ProtocolError(f"blocks have {self._block_bytes} bytes here, not {block_bytes}")
        self._block_bytes = block_bytes
        self._make_room()
        try:
            name = self._agent.add_remote_agent(offer.keys)
            name = name.decode() if isinstance(name, bytes) else name
            if name != offer.epoch:
                if name not in self._peers:
                    self._agent.remove_remote_agent(name)
                raise ProtocolError("the sender's NIXL agent is that of another start of it")
            rows = _rows(offer.address, offer.num_bytes // block_bytes, block_bytes)
            blocks = self._agent.prep_xfer_dlist(offer.epoch, rows, "DRAM")
        except ProtocolError:
            raise
        except Exception as error:
            raise SenderGoneError(f"the sender's pool cannot be reached by NIXL: {error!r}") from error
        peer = self._peers[offer.epoch] = _Peer(offer.epoch, blocks)
        return peer

    def _make_room(self) -> None:
        """Forget idle peers, and the one that was idle for longest if there are too many."""
        idle = [peer for peer in self._peers.values() if peer.read is None]
        num_surplus = len(self._peers) + 1 - MAX_PEERS
        for index, peer in enumerate(sorted(idle, key=lambda peer: peer.used)):
            if index < num_surplus or time.monotonic() - peer.used > IDLE_SECONDS:
                self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        del self._peers[peer.epoch]
        _release(peer.blocks)
        peer.blocks = None
        with suppress(Exception):  # NIXL has already forgotten it
            self._agent.remove_remote_agent(peer.epoch)

    def _take_slab(self) -> _Slab | None:
        if self._free:
            return self._free.pop()
        if len(self._slabs) == MAX_SLABS:
            return None
        number = blocks_per_read(self._block_bytes)
        rows = np.zeros((number, self._block_bytes), np.uint8)
        address = rows.ctypes.data
        try:
            registered = self._agent.register_memory([(address, rows.nbytes, 0, "slab")], "DRAM")
            blocks = self._agent.prep_xfer_dlist(
                "NIXL_INIT_AGENT", _rows(address, number, self._block_bytes), "DRAM"
            )
        except Exception as error:
            raise SenderGoneError(f"NIXL cannot register memory for READs: {error!r}") from error
        self._slabs.append(_Slab(rows, registered, blocks))
        return self._slabs[-1]

    def _deregister(self, registered: Any) -> None:
        if registered is not None:
            with suppress(Exception):  # the end of the agent ends it too
                self._agent.deregister_memory(registered)


def blocks_per_read(block_bytes: int) -> int:
    """Return the most blocks of one READ; at least 1."""
    return max(1, SLAB_BYTES // block_bytes)


def _release(handle: Any) -> bool:
    """Release one of NIXL's handles; return whether that worked."""
    try:
        if handle is not None:
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
