"""The adapters of ``LLM``, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.engine.weights.adapters import Adapter, UnsupportedAdapterError


def load_adapters(paths: Mapping[str, str], load: Callable[[str], Adapter]) -> dict[str, Adapter]:
    """Load the adapter at each path by the given function.

    Raises:
        ValueError: a name is empty, which would name the model itself.
        UnsupportedAdapterError: an adapter cannot be served, or not with this model.
        OSError: there is no such adapter, or a file of it is missing or damaged.
    """
    if "" in paths:
        raise ValueError('each adapter must have a name: "" is the model without an adapter')
    return {name: _load(name, path, load) for name, path in paths.items()}


def _load(name: str, path: str, load: Callable[[str], Adapter]) -> Adapter:
    try:
        return load(path)
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
