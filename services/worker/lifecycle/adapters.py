"""Loads and unloads a worker's adapters, at its start and while it serves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

from quire.engine.weights.adapters import Adapter, UnsupportedAdapterError
from quire.rpc.errors import BadFileError, FailedPrecondition, InvalidArgument, NotFound
from quire.services.server.log import EventLogger
from quire.services.worker.state import WorkerState

_NAME = re.compile(r"[A-Za-z0-9_.:/\-]{1,128}")
_log = EventLogger("worker")


class Adapters:
    """The adapters of one worker, by their names, in its state.

    Requests keep the adapter that they began with. Its memory is freed when nothing refers to it any more.

    Args:
        load: loads the adapter at a path.
        model_name: name of the served model, which no adapter may have.
    """

    def __init__(self, load: Callable[[str], Adapter], model_name: str, state: WorkerState) -> None:
        self._load = load
        self._model_name = model_name
        self._state = state
        self._loading = asyncio.Lock()

    async def load_all(self, named: Sequence[str]) -> None:
        """Load adapters that are given as ``name=path``.

        Raises:
            BadFileError: one cannot be loaded.
        """
        for name, _, path in (each.partition("=") for each in named):
            try:
                await self.load(name, path)
            except (FailedPrecondition, InvalidArgument) as error:
                raise BadFileError(error.message) from error

    async def load(self, name: str, path: str) -> Adapter:
        """Load an adapter, or other weights under the name of one, and report it to the routers.

        Raises:
            InvalidArgument: the name is not allowed.
            FailedPrecondition: the adapter cannot be loaded; the message says why.
            ChildProcessError: another process that the model is divided among has failed.
        """
        if not _NAME.fullmatch(name) or name == self._model_name:
            raise InvalidArgument(
                "name",
                "must have from 1 to 128 letters, digits, '_', '-', '.', ':' and '/', and not be the model's "
                f"name; got {name!r}",
            )
        async with self._loading:
            try:
                adapter = await asyncio.to_thread(self._load, path)
            except ChildProcessError:
                raise  # not the adapter's fault: the worker is about to end
            except (UnsupportedAdapterError, OSError) as error:
                problem = f"cannot load the adapter {name} from {path}: {error}"
                raise FailedPrecondition(problem, reason="BAD_ADAPTER") from error
            self._state.set_adapter(name, adapter)
        _log.info("adapter_loaded", adapter=name, digest=adapter.digest, path=path)
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter and report that to the routers; requests that use it continue with it.

        Raises:
            NotFound: there is none of that name.
        """
        if name not in self._state.adapters:
            raise NotFound(f"no adapter {name!r} is loaded here", reason="ADAPTER_NOT_FOUND")
        self._state.set_adapter(name, None)
        _log.info("adapter_unloaded", adapter=name)
