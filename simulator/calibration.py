"""The costs of a cluster's work, as measured on a real cluster."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

Point = tuple[float, float]

DECODE_PROMPT_TOKENS = 64
"""Tokens of the prompts whose decode steps a calibration has."""


class CalibrationError(ValueError):
    """A calibration cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured costs; times in seconds.

    Attributes:
        block_tokens: tokens of a block.
        block_bytes: bytes of a block.
        num_blocks: blocks of a worker's pool.
        max_num_seqs: most sequences that a worker decodes together.
        prefill: (tokens, seconds) of prompts, each computed by itself, without ``overhead_seconds``.
        decode_step: (sequences, seconds) of a decode step, for prompts of ``DECODE_PROMPT_TOKENS``.
        overhead_seconds: time of each request until its first token, without the computation.
        handoff_seconds: time between the first token and the second, without the decode step.
        pull_bytes_per_second: speed of a pull; None if it was not measured, and then nothing is pulled.
        pull_round_trip_seconds: time of a pull in addition to that of its bytes.
        context_seconds: time that each further prompt token adds to each step of its sequence.
        prefill_share: share of the cluster's processors that a prompt's computation uses when it is alone; 0
            if it slows no other worker.
        decode_share: the same of a decode worker's steps, with the other processes' work for their tokens.
        request_share: the same of the work for one request outside the engines.
    """

    block_tokens: int
    block_bytes: float
    num_blocks: int
    max_num_seqs: int
    prefill: tuple[Point, ...]
    decode_step: tuple[Point, ...]
    overhead_seconds: float
    handoff_seconds: float
    pull_bytes_per_second: float | None
    pull_round_trip_seconds: float
    context_seconds: float = 0.0
    prefill_share: float = 0.0
    decode_share: float = 0.0
    request_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prefill", "decode_step"):
            points: tuple[Point, ...] = getattr(self, name)
            if not points or any(x <= 0 or y <= 0 for x, y in points):
                raise CalibrationError(f"{name} must hold pairs of positive numbers; got {points}")
            if list(points) != sorted(points):
                raise CalibrationError(f"{name} must be in ascending order; got {points}")

    def prefill_seconds(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """Return the time of a prompt's uncached rest; later tokens cost more because they attend to more."""
        return max(0.0, interpolate(self.prefill, num_tokens) - interpolate(self.prefill, cached_tokens))

    def step_seconds(self, num_sequences: int, num_further: int = 0) -> float:
        """Return the time of a step of ``num_sequences``, with ``num_further`` further tokens of prompts."""
        steps = interpolate(self.decode_step, num_sequences, origin=self.decode_step[0][1])
        return steps + num_further * self.context_seconds

    def scaled_blocks(self, block_tokens: int) -> Calibration:
        """Return the same costs for blocks of ``block_tokens`` tokens, as a trace has them."""
        factor = block_tokens / self.block_tokens
        return replace(
            self,
            block_tokens=block_tokens,
            block_bytes=self.block_bytes * factor,
            num_blocks=max(1, int(self.num_blocks / factor)),
        )


def interpolate(points: Sequence[Point], x: float, origin: float = 0.0) -> float:
    """Return the value at x, linear between (0, origin) and the points, and extended beyond the last two."""
    line = [(0.0, origin), *points]
    index = min(max(1, bisect_left(line, (x, float("-inf")))), len(line) - 1)
    (x0, y0), (x1, y1) = line[index - 1], line[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def load_calibration(path: Path) -> Calibration:
    """Read a calibration.

    Raises:
        CalibrationError: the file is not one.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        points = {name: tuple(map(tuple, fields[name])) for name in ("prefill", "decode_step")}
        return Calibration(**{**fields, **points})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"{path} is not a calibration: {error!r}; make one with --calibrate"
        ) from error


def demo_calibration() -> Calibration:
    """Return the calibration that was measured with the bundled demo model on four shared CPU cores."""
    return load_calibration(Path(__file__).with_name("demo.json"))


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration."""
    path.write_text(json.dumps(asdict(calibration), indent=1) + "\n", encoding="utf-8")
