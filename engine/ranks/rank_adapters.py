"""The adapters of a rank other than 0. Rank 0 reads their files and sends their weights."""

from __future__ import annotations

import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from quire.engine.model.step_tensors import RowAdapters
from quire.engine.weights.adapters import Adapter, AdapterWeights, place_adapter
from quire.engine.weights.loader import LoadedModel

PLACED, NOT_PLACED = b"1", b"0"


def weights_file(weights: AdapterWeights) -> int:
    """Return the descriptor of a file in memory with an adapter's weights."""
    descriptor = os.memfd_create("quire-adapter")
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            torch.save(weights, file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class RankAdapters:
    """Places adapters in a thread of its own, since steps without them go on.

    Args:
        model: this rank's part of the model.
        control: the socket to rank 0, which gets ``PLACED`` or ``NOT_PLACED`` for each adapter.
    """

    def __init__(self, model: LoadedModel, control: socket.socket) -> None:
        self._model = model
        self._control = control
        self._placing = ThreadPoolExecutor(1)
        self._adapters: dict[int, Future[Adapter]] = {}

    def load(self, address: int, descriptor: int) -> None:
        """Load an adapter from a ``weights_file``.

        Args:
            address: the adapter's address in rank 0.
            descriptor: the file's descriptor, which is closed afterwards.
        """
        self._adapters[address] = placed = self._placing.submit(self._load, descriptor)
        placed.add_done_callback(lambda each: self._control.send(NOT_PLACED if each.exception() else PLACED))

    def _load(self, descriptor: int) -> Adapter:
        try:
            # The ranks share the position of the descriptor, but not that of a file that each one opens.
            weights = torch.load(f"/proc/self/fd/{descriptor}", weights_only=False)
        finally:
            os.close(descriptor)
        return place_adapter(weights, self._model)

    def drop(self, address: int) -> None:
        """Forget an adapter that no later step uses."""
        del self._adapters[address]

    def own(self, adapters: RowAdapters) -> RowAdapters:
        """Return the adapters of a step with their addresses in this rank."""
        addresses = np.zeros_like(adapters.addresses)
        for address in np.unique(adapters.addresses).tolist():
            if address:
                own = self._adapters[address].result().address
                addresses[adapters.addresses == address] = own
        return adapters._replace(addresses=addresses)
