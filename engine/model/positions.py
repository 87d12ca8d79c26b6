"""Passes the positions of a step to models that would otherwise count the tokens of their input."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch


def pass_positions(model: torch.nn.Module) -> int:
    """Let a model's table of positions get the positions of its call, where the model drops or shifts them.

    Returns:
        How many rows of the table come before position 0, so that the model has as many positions less.
    """
    drops_them = "position_ids" not in inspect.signature(model.forward).parameters
    num_rows_before = 0
    kept: dict[str, Any] = {}
    if drops_them:
        model.register_forward_pre_hook(partial(_keep, kept), with_kwargs=True)
    for name, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            # RoBERTa's positions begin after that of padding. It shifts those that it counts itself, but not
            # those that it gets.
            num_rows_before = int(module.padding_idx) + 1
            module.register_forward_pre_hook(partial(_shift, num_rows_before), with_kwargs=True)
        elif drops_them and name.endswith("embed_positions"):
            module.register_forward_pre_hook(partial(_add, kept), with_kwargs=True)
    return num_rows_before


def _keep(kept: dict[str, Any], _: object, __: object, options: dict[str, Any]) -> None:
    kept["positions"] = options.get("position_ids")


def _add(kept: dict[str, Any], _: object, inputs: Any, options: dict[str, Any]) -> Any:
    positions = kept["positions"]
    return None if positions is None else (inputs, {**options, "position_ids": positions[0]})


def _shift(num_rows: int, _: object, inputs: Any, options: dict[str, Any]) -> Any:
    positions = options.get("position_ids")
    return None if positions is None else (inputs, {**options, "position_ids": positions + num_rows})
