"""Draws a schedule of faults from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Literal, NamedTuple

REDIS = "redis"
FIRST_SHARE = 0.1
"""Share of the faults after which the processes are measured for the first time, and some are spared."""

Kind = Literal[
    "kill",
    "kill decode",
    "stop",
    "terminate",
    "disk full",
    "redis kill",
    "redis flush",
    "redis stop",
    "redis read-only",
    "redis full",
    "link cut",
    "link delay",
    "link reset",
    "link corrupt",
]
ENDINGS: frozenset[Kind] = frozenset({"kill", "kill decode", "terminate"})
"""Faults that end a process; those that are spared do not get them."""


@dataclass(frozen=True)
class Shape:
    """The processes that faults may meet.

    Attributes:
        has_disk: whether the workers have a disk tier.
        has_tls: whether connections between router and workers are encrypted, so that damage is noticed
            wherever it is.
    """

    routers: tuple[str, ...]
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    has_disk: bool = False
    has_tls: bool = False

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of all workers."""
        return self.prefill + self.decode


class Fault(NamedTuple):
    """One fault of a schedule.

    Attributes:
        pause: seconds after the beginning of the fault before.
        targets: the process; or the two ends of a connection; or all processes of a role.
        lasts: seconds until the fault is healed, to which the start of a process is added.
        draw: a number in [0, 1) for details such as which byte is damaged.
    """

    number: int
    pause: float
    kind: Kind
    targets: tuple[str, ...]
    lasts: float
    draw: float


class _Weight(NamedTuple):
    """How often a kind of fault is drawn, and for how many seconds it lasts."""

    share: float
    least: float = 0.0
    most: float = 0.0


WEIGHTS: dict[Kind, _Weight] = {
    # A restart takes much longer than any other fault lasts.
    "kill": _Weight(2, 0.0, 2.0),
    "kill decode": _Weight(1.5, 0.0, 1.0),
    "stop": _Weight(12, 0.2, 4.0),
    "terminate": _Weight(1.5, 0.0, 1.0),
    "disk full": _Weight(6, 1.0, 4.0),
    "redis kill": _Weight(5, 0.0, 3.0),
    "redis flush": _Weight(6),
    "redis stop": _Weight(4, 0.2, 3.0),
    "redis read-only": _Weight(4, 0.5, 4.0),
    "redis full": _Weight(4, 0.5, 4.0),
    "link cut": _Weight(12, 0.2, 4.0),
    "link delay": _Weight(8, 0.5, 4.0),
    "link reset": _Weight(14, 0.0, 1.0),
    "link corrupt": _Weight(8, 1.0, 4.0),
}
MEAN_PAUSE = 1.1
LEAST_PAUSE_SHARE, MOST_PAUSE_SHARE = 0.2, 1.8


def rolling_restart(shape: Shape) -> list[Fault]:
    """Return faults that restart all workers and then all routers, one by one, as an upgrade does."""
    return [
        Fault(number, 0.0, "terminate", (name,), 0.0, 0.0)
        for number, name in enumerate((*shape.workers, *shape.routers))
    ]


def draw_schedule(
    seed: int, num_faults: int, shape: Shape, mean_pause_seconds: float = MEAN_PAUSE
) -> list[Fault]:
    """Return faults in their order; the same arguments give the same faults.

    After the first tenth, one process of each role is spared from faults that end it, so that what faults
    leave behind in a process adds up.
    """
    random = Random(f"chaos-{seed}")
    spared = spared_processes(seed, shape)
    kinds = [kind for kind in WEIGHTS if kind != "disk full" or shape.has_disk]
    faults = []
    for number in range(num_faults):
        is_first = number < num_first(num_faults)
        possible = [kind for kind in kinds if is_first or kind != "kill decode"]
        kind = random.choices(possible, [WEIGHTS[kind].share for kind in possible])[0]
        targets = _targets(kind, shape, () if is_first else spared, random)
        weight = WEIGHTS[kind]
        lasts = random.uniform(weight.least, weight.most)
        pause = mean_pause_seconds * random.uniform(LEAST_PAUSE_SHARE, MOST_PAUSE_SHARE)
        faults.append(Fault(number, pause, kind, targets, lasts, random.random()))
    return faults


def num_first(num_faults: int) -> int:
    """Return how many faults come before the first measurement of the processes."""
    return max(1, round(num_faults * FIRST_SHARE))


def spared_processes(seed: int, shape: Shape) -> tuple[str, ...]:
    """Return one process of each role, the same ones for the same seed."""
    random = Random(f"spared-{seed}")
    return tuple(random.choice(names) for names in (shape.routers, shape.prefill, shape.decode) if names)


def _targets(kind: Kind, shape: Shape, spared: Sequence[str], random: Random) -> tuple[str, ...]:
    if kind.startswith("redis"):
        return (REDIS,)
    if kind == "kill decode":
        return shape.decode
    if kind == "disk full":
        return (random.choice(shape.workers),)
    if kind.startswith("link"):
        return random.choice(_links(kind, shape))
    # A router takes its clients' requests with it, so it is a rarer target than a worker.
    names = [name for name in shape.workers * 3 + shape.routers if kind not in ENDINGS or name not in spared]
    return (random.choice(names),)


def _links(kind: Kind, shape: Shape) -> list[tuple[str, str]]:
    """Return the pairs of processes between which a fault can be: who connects, and to whom.

    Bytes are damaged only where quire promises to notice. Blocks between workers have digests. The index is a
    hint: what a process reads from Redis may be wrong. All else relies on the checksums of TCP or on TLS.
    """
    between_workers = [
        pair for one, other in combinations(shape.workers, 2) for pair in ((one, other), (other, one))
    ]
    if kind == "link corrupt":
        # Pushes carry most blocks.
        between_workers += 3 * [(one, other) for one in shape.prefill for other in shape.decode]
    to_redis = [(name, REDIS) for name in (*shape.routers, *shape.workers)]
    from_routers = [(router, worker) for router in shape.routers for worker in shape.workers]
    # As many of one sort as of the others.
    sorts = [between_workers, from_routers, to_redis]
    if kind == "link corrupt" and not shape.has_tls:
        sorts.remove(from_routers)
    largest = max(map(len, sorts), default=0)
    return [
        pair
        for sort in sorts
        for index in range(largest if sort else 0)
        for pair in [sort[index % len(sort)]]
    ]
