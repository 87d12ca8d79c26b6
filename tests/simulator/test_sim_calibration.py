"""Costs between and beyond the points that were measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.simulator.calibration import (
    Calibration,
    CalibrationError,
    demo_calibration,
    interpolate,
    load_calibration,
    write_calibration,
)


def test_costs_are_linear_between_the_points_and_beyond() -> None:
    points = ((10.0, 1.0), (20.0, 3.0))
    values = [interpolate(points, x) for x in (0.0, 5.0, 10.0, 15.0, 20.0, 30.0)]
    assert values == [0.0, 0.5, 1.0, 2.0, 3.0, 5.0]


def test_later_tokens_cost_more_as_the_curve_rises(calibration: Calibration) -> None:
    curved = replace(calibration, prefill=((100, 0.1), (200, 0.4)))
    assert curved.prefill_seconds(200) == pytest.approx(0.4)
    assert curved.prefill_seconds(200, 100) == pytest.approx(0.3)
    assert curved.prefill_seconds(100, 100) == 0.0


def test_a_step_of_one_sequence_takes_the_measured_time(calibration: Calibration) -> None:
    assert calibration.step_seconds(1) == pytest.approx(0.01)
    assert calibration.step_seconds(2) == pytest.approx(0.011)
    assert calibration.step_seconds(7) == pytest.approx(0.016)


def test_a_traces_blocks_are_larger_and_fewer(calibration: Calibration) -> None:
    scaled = calibration.scaled_blocks(512)
    assert (scaled.block_tokens, scaled.block_bytes, scaled.num_blocks) == (512, 32e6, 31)
    assert scaled.prefill == calibration.prefill


def test_a_calibration_survives_its_file(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, calibration)
    assert load_calibration(path) == calibration


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"prefill": 3}', '{"prefill": [], "decode_step": []}'])
def test_a_malformed_calibration_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=r"calibration.json is not a calibration.*--calibrate"):
        load_calibration(path)


@pytest.mark.parametrize("prefill", [(), ((0, 1.0),), ((10, 0.0),), ((20, 1.0), (10, 2.0))])
def test_points_must_be_positive_and_in_order(calibration: Calibration, prefill: tuple[()]) -> None:
    with pytest.raises(CalibrationError, match="prefill"):
        replace(calibration, prefill=prefill)


def test_the_demo_models_costs_are_bundled() -> None:
    assert demo_calibration().block_tokens == 16
