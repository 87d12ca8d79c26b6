"""Computes the figures of a benchmark from the records of its requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

OK = "OK"
NOT_SENT = "NOT_SENT"
"""Status of a turn that would have followed a failed one."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The outcome and timings of one request. Times are seconds of one monotonic clock."""

    status: str
    """``OK``, or the name of the gRPC status with which the request failed."""
    start_seconds: float
    """When the request was due, so that a delay of the client counts as latency."""
    end_seconds: float
    arrivals_seconds: tuple[float, ...] = ()
    """When each message that carried tokens arrived."""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    """The answer."""

    @property
    def e2e_seconds(self) -> float:
        """Seconds that the whole request took."""
        return self.end_seconds - self.start_seconds

    @property
    def ttft_seconds(self) -> float:
        """Seconds to the first token."""
        return self.arrivals_seconds[0] - self.start_seconds

    @property
    def tpot_seconds(self) -> float:
        """Mean seconds of each token after the first; 0 if there is none."""
        return (self.arrivals_seconds[-1] - self.arrivals_seconds[0]) / max(self.output_tokens - 1, 1)

    @property
    def itl_seconds(self) -> list[float]:
        """Seconds between consecutive messages."""
        return [later - earlier for earlier, later in pairwise(self.arrivals_seconds)]

    def is_within(self, limits_ms: Mapping[str, float]) -> bool:
        """Return whether the request succeeded and kept every limit of ttft, tpot and e2el."""
        if self.status != OK or not self.arrivals_seconds:
            return False
        seconds = {"ttft": self.ttft_seconds, "tpot": self.tpot_seconds, "e2el": self.e2e_seconds}
        return all(1000 * seconds[name] <= limit for name, limit in limits_ms.items())


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of a latency in milliseconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of_seconds(cls, values: Iterable[float]) -> Distribution | None:
        """Return the distribution of times in seconds, or None if there are none."""
        milliseconds = sorted(value * 1000 for value in values)
        if not milliseconds:
            return None
        mean = math.fsum(milliseconds) / len(milliseconds)
        return cls(mean, percentile(milliseconds, 50), percentile(milliseconds, 99))


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a benchmark; tokens and latencies are those of the requests that succeeded."""

    num_requests: int
    num_succeeded: int
    failures: Mapping[str, int]
    """Number of failed requests by gRPC status."""
    duration_seconds: float
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    """Prompt and output tokens per second."""
    cached_token_ratio: float
    """Share of the prompt tokens whose keys and values were not computed for the request."""
    good_requests_per_second: float | None
    """Goodput: requests per second that kept every limit; None without limits."""
    attainment: float | None
    """Share of all requests, failed ones too, that kept every limit."""
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None


def summarize(
    records: Sequence[RequestRecord], duration_seconds: float, limits_ms: Mapping[str, float] | None = None
) -> Summary:
    """Return the figures of requests that together took ``duration_seconds``."""
    num_good = sum(record.is_within(limits_ms) for record in records) if limits_ms else None
    succeeded = [record for record in records if record.status == OK]
    answered = [record for record in succeeded if record.arrivals_seconds]
    prompt_tokens = sum(record.prompt_tokens for record in succeeded)
    cached_tokens = sum(record.cached_prompt_tokens for record in succeeded)
    output_tokens = sum(record.output_tokens for record in succeeded)
    return Summary(
        num_requests=len(records),
        num_succeeded=len(succeeded),
        failures=dict(sorted(Counter(each.status for each in records if each.status != OK).items())),
        duration_seconds=duration_seconds,
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=cached_tokens,
        output_tokens=output_tokens,
        requests_per_second=_ratio(len(succeeded), duration_seconds),
        output_tokens_per_second=_ratio(output_tokens, duration_seconds),
        total_tokens_per_second=_ratio(prompt_tokens + output_tokens, duration_seconds),
        cached_token_ratio=_ratio(cached_tokens, prompt_tokens),
        good_requests_per_second=None if num_good is None else _ratio(num_good, duration_seconds),
        attainment=None if num_good is None else _ratio(num_good, len(records)),
        ttft_ms=Distribution.of_seconds(record.ttft_seconds for record in answered),
        tpot_ms=Distribution.of_seconds(each.tpot_seconds for each in answered if each.output_tokens > 1),
        itl_ms=Distribution.of_seconds(gap for record in answered for gap in record.itl_seconds),
        e2e_ms=Distribution.of_seconds(record.e2e_seconds for record in succeeded),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, interpolated between the two nearest."""
    position = (len(ordered) - 1) * percent / 100
    below, above = math.floor(position), math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
