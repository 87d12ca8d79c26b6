"""A short run of the fuzz: every answer is right or an error, and no worker ends."""

from __future__ import annotations

from tests.soak.fuzz.run import fuzz

SEED, NUM_REQUESTS, CONCURRENCY, MOST_SECONDS = 20, 200, 8, 60.0


async def test_random_requests_find_no_defect() -> None:
    report = await fuzz(SEED, MOST_SECONDS, CONCURRENCY, NUM_REQUESTS, is_quiet=True)
    assert report.defects == []
    assert sum(count for (_, outcome), count in report.outcomes.items() if outcome == "answered") >= 20
