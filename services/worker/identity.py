"""The facts that identify a worker: its name, its model and its cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from quire.kvindex.block_hash import CacheScope, fingerprint, root_hash
from quire.kvindex.kv_layout import KvLayout
from quire.kvindex.worker_record import WorkerRecord
from quire.kvtransfer.layout import layout_to_proto
from quire.protos import worker_pb2
from quire.services.worker.state import WorkerState


@dataclass(frozen=True)
class WorkerIdentity:
    """Facts of a running worker that do not change; ``WorkerState`` has those that change."""

    worker_id: str
    epoch: str
    model: str
    model_path: str
    layout: KvLayout
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    cluster_secret: bytes = field(repr=False)
    embedding: worker_pb2.EmbeddingModel = field(default_factory=worker_pb2.EmbeddingModel)
    text_digest: str = ""
    """Equal in workers whose requests a router tokenizes in the same way."""

    @cached_property
    def cache_descriptor(self) -> bytes:
        """The bytes from which the root of block hashes is computed."""
        return self.layout.descriptor()

    @property
    def fingerprint(self) -> str:
        """A value that is equal in workers whose blocks are interchangeable."""
        return fingerprint(self.cache_descriptor, self.cluster_secret)

    def root_hash(self, scope: worker_pb2.CacheScope) -> bytes:
        """Return the parent of the first blocks of a scope."""
        parts = CacheScope(scope.tenant, scope.salt, scope.adapter)
        return root_hash(self.cache_descriptor, self.cluster_secret, parts)

    def record(self, address: str, state: WorkerState) -> WorkerRecord:
        """Return the cluster's record of a worker that is reached at ``address``."""
        return WorkerRecord(
            worker_id=self.worker_id,
            role=state.role,
            address=address,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            is_draining=state.is_draining,
        )

    def to_proto(self) -> worker_pb2.GetWorkerInfoResponse:
        """Return the facts that routers ask for, without the present state."""
        return worker_pb2.GetWorkerInfoResponse(
            worker_id=self.worker_id,
            epoch=self.epoch,
            model=self.model,
            model_path=self.model_path,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=sorted(self.eos_token_ids),
            layout=layout_to_proto(self.layout),
            num_blocks=self.num_blocks,
            cache_descriptor=self.cache_descriptor,
            embedding=self.embedding,
            text_digest=self.text_digest,
        )
