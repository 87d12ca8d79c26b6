"""Asks workers whether they serve, and repeats the question until they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc.aio

from quire.rpc.channels import ChannelClosedError
from quire.rpc.cluster_proof import ClusterTrust
from quire.services.router.workers.probe import Probe, StrangerError, probe_worker
from quire.services.router.workers.worker import Worker, WorkerConnection

PROBE_SECONDS = 2.0
ASK_AGAIN_SECONDS = 0.2
"""Pause between two probes of a worker that is set aside."""


@dataclass(eq=False)
class Probing:
    """Probes workers, records their answers in their health, and ends the calls of those that are gone.

    Attributes:
        trust: checks the proofs of the answers.
        silent_seconds: a worker that answers no probe for this long is gone.
        clock: returns the time in seconds.
        on_answer: called with each answer of a worker, and with its role and the time when it was asked.
        on_gone: called with each worker that is gone, and the reason.
    """

    trust: ClusterTrust
    silent_seconds: float
    clock: Callable[[], float]
    on_answer: Callable[[Worker, Probe, str, float], None]
    on_gone: Callable[[Worker, str], None]

    def __post_init__(self) -> None:
        self.probe_seconds = min(PROBE_SECONDS, self.silent_seconds / 3)
        self._until_answered: dict[Worker, asyncio.Task[None]] = {}
        """Probes of the workers that are set aside."""
        self._once: dict[Worker, asyncio.Task[None]] = {}
        """Probes for the sake of suspects, which share them."""

    async def meet(self, connection: WorkerConnection) -> Probe | None:
        """Probe a process that has not joined; return None if it does not answer or is about to end."""
        try:
            probe = await probe_worker(connection, self.trust, self.probe_seconds)
        except (grpc.aio.AioRpcError, ChannelClosedError):
            return None
        return None if probe.is_stopping else probe

    async def ask(self, worker: Worker) -> Probe | None:
        """Probe a worker and return its answer, or None if there is none or the worker is gone.

        A worker that answers no probe for ``silent_seconds`` leaves, and its calls end.
        """
        begin, role, health = self.clock(), worker.role, worker.health
        try:
            probe = await probe_worker(worker.connection, self.trust, self.probe_seconds)
        except StrangerError:
            self.on_gone(worker, "stranger")
        except ChannelClosedError:
            pass
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self.on_gone(worker, "no_answer")
            else:
                health.probe_missed(begin)
                if health.has_missed_probes(self.silent_seconds):
                    health.lost()
                    self.on_gone(worker, "silent")
        else:
            if not health.is_gone:
                health.answered(begin)
                self.on_answer(worker, probe, role, begin)
                return probe
        return None

    async def ask_once(self, workers: Iterable[Worker]) -> None:
        """Ask some workers, sharing probes with concurrent callers; return when all have been asked."""
        asking = []
        for worker in workers:
            if worker not in self._once:
                self._once[worker] = asyncio.create_task(self._ask_once(worker))
            asking.append(self._once[worker])
        if asking:
            await asyncio.wait(asking)

    def ask_until_answered(self, worker: Worker) -> asyncio.Task[None]:
        """Return the task that asks a worker until it is no longer set aside, or is gone."""
        if worker not in self._until_answered:
            self._until_answered[worker] = asyncio.create_task(self._ask_until_answered(worker))
        return self._until_answered[worker]

    async def close(self) -> None:
        """End all probes that were started here."""
        tasks = [*self._until_answered.values(), *self._once.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_once(self, worker: Worker) -> None:
        try:
            await self.ask(worker)
        finally:
            del self._once[worker]

    async def _ask_until_answered(self, worker: Worker) -> None:
        health = worker.health
        try:
            while health.is_set_aside and not health.is_gone:
                await self.ask(worker)
                if health.is_set_aside:
                    await asyncio.sleep(ASK_AGAIN_SECONDS)
        finally:
            del self._until_answered[worker]
