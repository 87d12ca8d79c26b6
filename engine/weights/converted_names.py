"""Reads the tensors of a checkpoint by the names of a model's parameters, where these differ.

Checkpoints store experts one by one, and transformers stacks them when it loads a whole model. It also has
new names for parameters of some models. Its own rules tell here which stored tensors make up a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from quire.engine.weights.checkpoint import Checkpoint
from quire.engine.weights.packed_codes import take_part


@dataclass
class _Source:
    """What a parameter is made of.

    Attributes:
        converter: the rule that makes it; None if it only has another name.
        stored: the names of the stored tensors in order, by the rule's patterns.
    """

    converter: WeightConverter | None
    stored: dict[str, list[str]] = field(default_factory=dict)


class ConvertedCheckpoint:
    """The tensors of a checkpoint by the names of a model's parameters.

    A tensor that no rule makes into a parameter keeps its name.

    Args:
        checkpoint: what the tensors are read from.
        model: the model, whose parameters need no memory.
    """

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel) -> None:
        self._checkpoint, self._model = checkpoint, model
        self._sources: dict[str, _Source] = {}
        rules = get_model_conversion_mapping(model)
        renamings = [each for each in rules if isinstance(each, WeightRenaming)]
        converters = [each for each in rules if isinstance(each, WeightConverter)]
        state = model.state_dict()
        rename = partial(rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=state)
        self.names: set[str] = set()
        for stored in sorted(checkpoint.names, key=dot_natural_key):
            name, pattern = (stored, None) if stored in state else rename(stored, renamings, converters)
            converter = next((each for each in converters if pattern in each.source_patterns), None)
            makes_many = converter is not None and len(converter.target_patterns) > 1
            if name == stored or name not in state or makes_many:
                self.names.add(stored)
                continue
            self.names.add(name)
            source = self._sources.setdefault(name, _Source(converter))
            source.stored.setdefault(pattern or "", []).append(stored)

    def read(self, name: str, part: tuple[int, slice] | None) -> torch.Tensor:
        """Return a parameter, or a part of it along one dimension; see ``Checkpoint.read``."""
        source = self._sources.get(name)
        if source is None:
            return self._checkpoint.read(name, part)
        if source.converter is None:
            return self._checkpoint.read(source.stored[""][0], part)
        first = source.converter.operations[0]
        if part is not None and part[0] == 0 and isinstance(first, MergeModulelist) and first.dim == 0:
            return self._convert(name, source, part[1])
        return take_part(self._convert(name, source, slice(None)), part)

    def read_packed(self, name: str, part: tuple[int, slice] | None, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter, or what stands for it; see ``Checkpoint.read_packed``."""
        if name in self._sources:
            return self.read(name, part)
        return self._checkpoint.read_packed(name, part, dtype)

    def _convert(self, name: str, source: _Source, own: slice) -> torch.Tensor:
        """Return what a rule makes of some tensors of each of its patterns."""
        converter = source.converter
        assert converter is not None
        tensors = {
            pattern: [self._checkpoint.read(each, None) for each in stored[own]]
            for pattern, stored in source.stored.items()
        }
        for operation in converter.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=name,
                model=self._model,
                config=self._model.config,
                missing_keys=None,
            )
        (result,) = tensors.values()
        tensor: torch.Tensor = result[0] if isinstance(result, list) else result
        return tensor
