"""Short runs of chaos and of the fuzz: every answer is right or a clear error."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.soak.chaos.cluster import ClusterConfig
from tests.soak.chaos.commands import Variant
from tests.soak.chaos.journal import Journal
from tests.soak.chaos.load import RIGHT
from tests.soak.chaos.run import ChaosConfig, run_chaos
from tests.soak.fuzz.run import fuzz

SEED, NUM_FAULTS, NUM_OF_EACH, CONCURRENCY = 45, 8, 2, 2


@pytest.mark.parametrize("variant", ["tiers", "messages"])
async def test_no_fault_makes_an_answer_wrong_or_leaks_resources(variant: Variant) -> None:
    """Workers share pools (with tiers), or send blocks in messages."""
    config = ChaosConfig(
        seed=SEED,
        num_faults=NUM_FAULTS,
        num_of_each=NUM_OF_EACH,
        concurrency=CONCURRENCY,
        cluster=ClusterConfig(variant=variant, num_prefill=1),
    )
    report = await run_chaos(config, Journal(), Console(quiet=True))
    assert report.defects == []
    assert report.faults.total() == NUM_FAULTS
    assert sum(count for (_, outcome), count in report.load.outcomes.items() if outcome == RIGHT) >= 20


async def test_random_requests_find_no_defect() -> None:
    report = await fuzz(seed=20, seconds=60.0, concurrency=8, num_requests=200, is_quiet=True)
    assert report.defects == []
    assert sum(count for (_, outcome), count in report.outcomes.items() if outcome == "answered") >= 20
