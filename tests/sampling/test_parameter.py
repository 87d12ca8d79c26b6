"""The description of parameters: what a range allows, and what an error says."""

from __future__ import annotations

import math
import pickle
import struct
from dataclasses import dataclass
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling.parameter import Parameter, ParameterError, Range, check, check_values, table

bounds = st.floats(-1e6, 1e6)


@dataclass(frozen=True)
class Params:
    """Parameters of all kinds."""

    share: Annotated[float, Parameter("sampling.share", Range(0, 1, excludes_low=True))] = 1.0
    seed: Annotated[int | None, Parameter("sampling.seed", Range(0))] = None
    biases: Annotated[
        tuple[tuple[int, float], ...], Parameter("sampling.biases", Range(-1, 1), max_items=2)
    ] = ()
    names: Annotated[tuple[str, ...], Parameter("stopping.names", max_items=1)] = ()


@given(low=bounds, high=bounds, excludes_low=st.booleans(), value=st.floats(allow_nan=True))
def test_a_range_holds_the_numbers_between_its_ends(
    low: float, high: float, excludes_low: bool, value: float
) -> None:
    low, high = min(low, high), max(low, high)
    numbers = Range(low, high, excludes_low)
    if low < value <= high:
        assert value in numbers
    elif value == low:
        assert (value in numbers) != excludes_low
    elif value > high or math.isnan(value):
        assert value not in numbers


@given(low=bounds)
def test_the_lower_end_counts_in_single_precision_too(low: float) -> None:
    (single,) = struct.unpack("f", struct.pack("f", low))
    assert single in Range(low, 1e7)
    assert math.nextafter(min(single, low), -math.inf) not in Range(low, 1e7)


def test_the_limit_is_the_end_that_a_client_may_break() -> None:
    assert (Range(1).limit, Range(0, 20).limit, Range(0.5, 2.5).limit) == ("1", "20", "2.5")
    assert [str(each) for each in (Range(1), Range(0.01, 100))] == ["at least 1", "from 0.01 to 100"]


def test_the_table_has_each_type_without_none() -> None:
    rows = table(Params)
    assert list(rows) == ["share", "seed", "biases", "names"]
    assert (rows["seed"].type, rows["seed"].default) == (int, None)
    assert rows["biases"].type == tuple[tuple[int, float], ...]
    assert table(Params) is rows


@pytest.mark.parametrize(
    ("params", "field", "problem", "limit"),
    [
        (Params(share=0.0), "sampling.share", "must be above 0 and at most 1; got 0", "1"),
        (Params(share=math.nan), "sampling.share", "must be above 0 and at most 1; got nan", "1"),
        (Params(seed=-1), "sampling.seed", "must be at least 0; got -1", "0"),
        (Params(biases=((7, 0.5), (8, 2.0))), "sampling.biases[8]", "must be from -1 to 1; got 2", "1"),
        (Params(biases=((7, 9.0),) * 3), "sampling.biases", "must be at most 2; got 3", "2"),
        (Params(names=("a", "b")), "stopping.names", "must be at most 1; got 2", "1"),
    ],
)
def test_an_error_names_the_field_the_limit_and_the_value(
    params: Params, field: str, problem: str, limit: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        check(params)
    error = caught.value
    assert (error.field, error.problem, error.limit) == (field, problem, limit)
    assert str(error) == f"{field.split('.')[1]} {problem}"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.field, copy.problem, copy.limit, str(copy)) == (field, problem, limit, str(error))


def test_defaults_are_not_checked_and_single_values_are() -> None:
    check(Params())
    check_values(Params, {"share": 0.5, "seed": 3})
    with pytest.raises(ParameterError, match="share must be above 0"):
        check_values(Params, {"seed": 3, "share": 0.0})
