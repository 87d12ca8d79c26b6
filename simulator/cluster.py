"""Replays requests on a simulated cluster, in which the router's planner places them."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from random import Random
from typing import Any, NamedTuple

from quire.routing.demand import RoleState, Totals
from quire.routing.elastic_roles import ElasticRoles
from quire.routing.placement import PlannedPrompt, Planner, PolicyConfig, PullOutcome
from quire.routing.policy import CandidateWorker
from quire.routing.pressure import Targets
from quire.routing.pulls import Blocks, Pulls
from quire.simulator.block_cache import BlockCache
from quire.simulator.calibration import Calibration, CalibrationError
from quire.simulator.machine import Errand, Machine
from quire.simulator.servers import Job, Server
from quire.simulator.trace import TraceRequest

PUBLISH_SECONDS = 0.01
"""Time between the computation of a block and its entry in the index."""
DECISION_SECONDS = 1.0
"""Interval at which the controller of elastic roles decides, as in the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The cluster to simulate."""

    num_prefill: int
    num_decode: int
    placing: PolicyConfig = field(default_factory=PolicyConfig)
    max_requests: int = 1024
    """Most requests in the cluster at a time; further ones are refused."""
    seed: int = 0
    is_one_machine: bool = False
    """Whether all workers share the processors that were calibrated; else each worker has them for itself."""
    elastic: Targets | None = None
    """Targets for which workers change their roles; None: roles are fixed."""

    def __post_init__(self) -> None:
        if self.num_decode < 1 or self.num_prefill < 0:
            raise ValueError(
                f"there must be at least one decode worker, and at least 0 prefill workers; "
                f"got {self.num_decode} and {self.num_prefill}"
            )


class RequestOutcome(NamedTuple):
    """The latencies and cache hits of one request; times in seconds."""

    request: TraceRequest
    ttft_seconds: float
    tpot_seconds: float
    """Mean time of each token after the first; 0 if there is none."""
    cached_tokens: int
    """Prompt tokens that the worker had cached or pulled."""
    pulled_bytes: float
    is_local: bool
    """Whether the decode worker computed the prompt."""


class Replay(NamedTuple):
    """The outcomes of all requests of one run."""

    outcomes: Sequence[RequestOutcome]
    num_rejected: int
    seconds: float
    """Time from the first arrival to the last token."""
    prefill_busy_share: float
    """Share of the time in which a prefill worker was busy, on average."""
    decode_busy_share: float
    role_changes: Sequence[tuple[float, str, str]] = ()
    """Time, worker and new role of each change of a role."""


class Simulation:
    """Simulates one replay: takes events from a heap and advances the time to each of them."""

    def __init__(self, config: ClusterConfig, calibration: Calibration) -> None:
        self.now = 0.0
        self._config = config
        self._calibration = calibration
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._names = count()

        shared = Machine() if config.is_one_machine else None

        def server(name: str, role: str) -> Server:
            cache, machine = BlockCache(calibration.num_blocks), shared or Machine()
            return Server(name, role, calibration, self, machine, cache, self._computed, self._finished)

        self._servers = {
            name: server(name, role)
            for role, number in (("prefill", config.num_prefill), ("decode", config.num_decode))
            for name in (f"{role}-{index}" for index in range(number))
        }
        self._planner = Planner(
            config.placing
            if calibration.pull_bytes_per_second
            else replace(config.placing, pulls=Pulls.NEVER),
            Blocks(calibration.block_tokens, int(calibration.block_bytes)),
            lambda: self.now,
            Random(config.seed),
        )
        self._elastic = None if config.elastic is None else ElasticRoles(config.elastic, lambda: self.now)
        self._role_changes: list[tuple[float, str, str]] = []
        self._num_open = 0
        self._num_rejected = 0
        self._ended_at = 0.0
        """Time of the latest answer's end. Events that have become pointless may come later."""
        self._outcomes: list[RequestOutcome] = []

    def run(self, requests: Iterable[TraceRequest], on_arrival: Callable[[], None] = lambda: None) -> Replay:
        """Replay requests, in the order of their arrival, and return their outcomes."""
        first = None
        for request in requests:
            first = request.arrival_seconds if first is None else first
            self.at(request.arrival_seconds, self._arrive, request, on_arrival)
        if self._elastic is not None:
            self.at(first or 0.0, self._decide_roles, self._elastic)
        while self._events:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        seconds = self._ended_at - (first or 0.0)

        def busy(servers: Iterable[Server]) -> float:
            shares = [server.busy_seconds / seconds for server in servers] if seconds else []
            return sum(shares) / len(shares) if shares else 0.0

        return Replay(
            self._outcomes,
            self._num_rejected,
            seconds,
            busy(self._with_role("prefill")),
            busy(self._with_role("decode")),
            self._role_changes,
        )

    def at(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an action for a simulated time in seconds."""
        heapq.heappush(self._events, (seconds, next(self._names), action, arguments))

    # --- the life of a request ----------------------------------------------------------------------------

    def _arrive(self, request: TraceRequest, on_arrival: Callable[[], None]) -> None:
        on_arrival()
        if self._num_open >= self._config.max_requests:
            self._num_rejected += 1
            return
        block_tokens = self._calibration.block_tokens
        full = request.block_ids[: request.input_tokens // block_tokens]
        hashes = [block_id.to_bytes(8, "big") for block_id in full]
        published = {name: server.cache.num_published(hashes) for name, server in self._servers.items()}
        cached = {name: number * block_tokens for name, number in published.items() if number}
        placement = self._planner.place(
            # A trace does not contain the limit on the length of the answer.
            PlannedPrompt(request.input_tokens, hashes, cached, max_output_tokens=sys.maxsize),
            [self._candidate(server) for server in self._with_role("prefill")],
            [self._candidate(server) for server in self._with_role("decode")],
        )
        assert placement is not None, "there is a decode worker"
        job = Job(request, hashes, placement)
        computing, decoding = self._servers[placement.computing], self._servers[placement.decode.worker_id]
        self._num_open += 1
        computing.pending_tokens += placement.pending_tokens
        decoding.resident_tokens += placement.resident_tokens
        for server in {computing, decoding}:
            server.num_requests += 1
        self._serve(computing, self._calibration.overhead_seconds, partial(self._call, job))

    def _call(self, job: Job) -> None:
        job.called_at = self.now
        peer, cal = job.placement.estimate.peer, self._calibration
        server = self._servers[job.placement.computing]
        if peer is None or not cal.pull_bytes_per_second:
            server.compute(job)
            return
        num_there = self._servers[peer.worker_id].cache.num_cached(job.block_hashes[: peer.num_blocks])
        num_missing = max(0, num_there - server.cache.num_cached(job.block_hashes))
        job.pulled_bytes = num_missing * cal.block_bytes
        seconds = cal.pull_round_trip_seconds + job.pulled_bytes / cal.pull_bytes_per_second
        self._serve(server, seconds, partial(self._pulled, job, num_there))

    def _pulled(self, job: Job, num_blocks: int) -> None:
        server = self._servers[job.placement.computing]
        job.pull_seconds = self.now - job.called_at
        self._store(server, job.block_hashes[:num_blocks])
        server.compute(job)

    def _computed(self, job: Job) -> None:
        placement = job.placement
        server = self._servers[placement.computing]
        job.first_token_at = self.now
        self._store(server, job.block_hashes)
        server.pending_tokens -= placement.pending_tokens
        if placement.prefill is not None:
            server.num_requests -= 1
        self._planner.record_prefill(
            placement,
            job.cached_tokens,
            self.now - job.called_at,
            PullOutcome(
                int(job.pulled_bytes),
                job.pull_seconds,
                job.pull_seconds - self._calibration.pull_round_trip_seconds,
            ),
        )
        if job.request.output_tokens == 1:
            self._finished(job)
            return
        handoff = self._calibration.handoff_seconds if placement.prefill else 0.0
        self._serve(server, handoff, partial(self._hand_over, job))

    def _serve(self, server: Server, seconds: float, then: Callable[[], None]) -> None:
        """Let processes near a worker do something for one request; processors of the workers' are shared."""
        share = self._calibration.request_share if self._config.is_one_machine else 0.0
        Errand(self, server.machine, seconds, share, then)

    def _hand_over(self, job: Job) -> None:
        server = self._servers[job.placement.decode.worker_id]
        self._store(server, job.block_hashes, server.kept_blocks)
        server.decode(job)

    def _finished(self, job: Job) -> None:
        request, server = job.request, self._servers[job.placement.decode.worker_id]
        self._num_open -= 1
        self._ended_at = self.now
        server.resident_tokens -= job.placement.resident_tokens
        self._planner.record_answer(request.output_tokens)
        server.num_requests -= 1
        num_further = request.output_tokens - 1
        self._outcomes.append(
            RequestOutcome(
                request,
                ttft_seconds=job.first_token_at - request.arrival_seconds,
                tpot_seconds=(self.now - job.first_token_at) / num_further if num_further else 0.0,
                cached_tokens=job.cached_tokens,
                pulled_bytes=job.pulled_bytes,
                is_local=job.placement.prefill is None,
            )
        )

    # --- roles --------------------------------------------------------------------------------------------

    def _with_role(self, role: str) -> list[Server]:
        return [server for server in self._servers.values() if server.role == role]

    def _candidate(self, server: Server) -> CandidateWorker:
        return CandidateWorker(
            server.worker_id,
            capacity_tokens=max(1, self._calibration.num_blocks) * self._calibration.block_tokens,
            pending_tokens=server.pending_tokens,
            resident_tokens=server.resident_tokens,
            num_requests=server.num_requests,
        )

    def _decide_roles(self, controller: ElasticRoles) -> None:
        """Let the controller change a role, as the router does, until all requests have ended."""
        servers, work = self._servers.values(), self._planner.work
        for server in servers:
            server.advance()
        totals = Totals(
            work.num_prompts,
            work.remote_seconds,
            work.local_seconds,
            sum(server.num_tokens for server in servers),
            sum(server.token_seconds for server in servers),
        )
        for change in controller.decide([self._role_state(server) for server in servers], totals):
            self._servers[change.worker_id].role = change.role
            self._role_changes.append((self.now, change.worker_id, change.role))
        if self._events:
            self.at(self.now + DECISION_SECONDS, self._decide_roles, controller)

    def _role_state(self, server: Server) -> RoleState:
        return RoleState(
            server.worker_id,
            server.role,
            self._planner.pending_seconds(server.worker_id, server.pending_tokens),
            server.resident_tokens,
            self._calibration.num_blocks * self._calibration.block_tokens,
        )

    def _store(self, server: Server, block_hashes: Sequence[bytes], num_kept: int = 0) -> None:
        new = server.cache.store(block_hashes, num_kept)
        if new:
            self.at(self.now + PUBLISH_SECONDS, server.cache.publish, new)


def replay(
    config: ClusterConfig,
    calibration: Calibration,
    requests: Iterable[TraceRequest],
    on_arrival: Callable[[], None] = lambda: None,
) -> Replay:
    """Replay requests on a cluster; calibration and trace must have the same block size.

    Raises:
        CalibrationError: workers shall share processors, and the calibration does not say how much they use.
    """
    if config.is_one_machine and not calibration.prefill_share:
        raise CalibrationError("the calibration has no shares of the processors; make one with --calibrate")
    return Simulation(config, calibration).run(requests, on_arrival)
