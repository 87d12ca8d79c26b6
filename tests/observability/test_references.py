"""What an expression speaks of."""

from __future__ import annotations

import pytest

from tests.testing.promql import references


def test_series_matchers_and_groupings_are_found() -> None:
    found = references(
        'sum by (le, job) (rate(a_bucket{job="x{y}",le!~"1|2"}[5m] offset 1h))'
        " / on() group_left(zone) b_total > 0"
    )
    assert [selector.name for selector in found.selectors] == ["a_bucket", "b_total"]
    assert found.selectors[0].labels == {"job", "le"}
    assert found.selectors[0].text == 'a_bucket{job="x{y}",le!~"1|2"}'
    assert found.grouping == {"le", "job", "zone"}


def test_functions_and_keywords_are_no_series() -> None:
    found = references(
        "clamp_min(histogram_quantile(0.9, up), 0) and max_over_time(up[1d]) unless up == bool 1"
    )
    assert {selector.name for selector in found.selectors} == {"up"}


def test_an_interval_of_grafana_is_read() -> None:
    (selector,) = references("sum(rate(a_total[$__rate_interval]))").selectors
    assert selector.name == "a_total"


@pytest.mark.parametrize("wrong", ["sum(rate(up[5m])", "rate(up)", "up{job=}", "up >"])
def test_malformed_promql_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        references(wrong)
