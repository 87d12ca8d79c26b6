"""The adapters of ``LLM``, by their names."""

from __future__ import annotations

from collections.abc import Mapping

from quire.engine.weights.adapters import Adapter, UnsupportedAdapterError, load_adapter
from quire.engine.weights.loader import LoadedModel


def load_adapters(paths: Mapping[str, str], model: LoadedModel) -> dict[str, Adapter]:
    """Load the adapter at each path for a model.

    Raises:
        ValueError: a name is empty, which would name the model itself.
        UnsupportedAdapterError: an adapter cannot be served, or not with this model.
        OSError: there is no such adapter, or a file of it is missing or damaged.
    """
    if "" in paths:
        raise ValueError('each adapter must have a name: "" is the model without an adapter')
    return {name: _load(name, path, model) for name, path in paths.items()}


def _load(name: str, path: str, model: LoadedModel) -> Adapter:
    try:
        return load_adapter(path, model)
    except UnsupportedAdapterError as error:
        raise UnsupportedAdapterError(f"cannot load the adapter {name} from {path}: {error}") from error


def find_adapter(adapters: Mapping[str, Adapter], field: str, name: str) -> Adapter:
    """Return the adapter of a name that ``field`` has; raise ValueError if there is none."""
    if name not in adapters:
        known = ", ".join(map(repr, adapters)) or "none"
        raise ValueError(
            f"{field} must be the name of an adapter of this LLM, which has {known}; got {name!r}"
        )
    return adapters[name]
