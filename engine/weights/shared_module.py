"""Writes a loaded model to a ``WeightsFile``, and makes models of it whose weights are mapped, read-only.

The file has the bytes of all parameters and packed weights, then a pickle of the modules, in which these are
places in the file, and last the pickle's place. Buffers are small, and the code of a model may write to them,
so they are part of the pickle and each worker has its own.
"""

from __future__ import annotations

import ctypes
import io
import logging
import mmap
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from quire.engine.kv_cache.shared_memory import use_large_pages
from quire.engine.weights.weights_file import WeightsFile
from quire.kernels.cpu.products.packed_weight import Allocate, in_own_memory

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Bytes: a cache line, as torch aligns its own memory."""
_TRIM_BYTES = 256 << 20
"""Freed memory that the C library may keep while weights are written, in bytes."""
_CHUNK_BYTES = 64 << 20
"""Bytes of a file that are mapped together, at least."""
_PLACE_BYTES = 8
_MAP_FIXED = 0x10
"""Flag of mmap(2): replace what is at the address."""

Model = TypeVar("Model")


class Source(NamedTuple):
    """The source of the weights.

    Attributes:
        settings: the folder, the configuration and whatever else decides how weights are packed.
        files: size, time of change and inode of each file of weights, by name.
    """

    settings: tuple[str, ...]
    files: dict[str, tuple[int, int, int]]

    def is_made_of(self, other: Source) -> bool:
        """Return whether another source gives these weights. Files that are gone do not count."""
        return self.settings == other.settings and other.files.items() <= self.files.items()


def source_of(folder: Path, *settings: str) -> Source:
    """Return the source of the weights of a model's folder.

    Args:
        folder: the model's folder, with its configuration.
        settings: what else decides how the weights are packed.
    """
    stats = {path.name: path.stat() for path in folder.glob("*.safetensors")}
    files = {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}
    return Source((str(folder), (folder / "config.json").read_text("utf-8"), *settings), files)


def load_shared(
    file: WeightsFile,
    source: Source,
    module_of: Callable[[Model], torch.nn.Module],
    load: Callable[[Allocate], Model],
) -> tuple[Model, int]:
    """Return a model whose weights are in a file, and the bytes of the file.

    If the file is not complete, ``load`` returns the model that is written to it. The weights are the
    worker's own, and the bytes 0, if the file has those of another source, if another process takes too long
    to write it, if the system gives it no room, or if the model cannot be pickled.

    Args:
        source: what ``load`` makes the weights of.
        module_of: returns the modules of a model.
        load: loads the model; it allocates large weights by the given function.
    """
    try:
        with file.locked():
            if not file.is_complete:
                _complete(file, source, module_of, load)
    except (TimeoutError, _NotWrittenError) as error:
        reason = str(error)
    else:
        written, model = _read(file)
        if written.is_made_of(source):
            return model, os.fstat(file.descriptor).st_size
        reason = "its model or settings changed since they were written"
    logger.warning("this worker has weights of its own: %s", reason)
    return load(in_own_memory), 0


class _NotWrittenError(Exception):
    """A model cannot be written to a file."""


def _complete(
    file: WeightsFile,
    source: Source,
    module_of: Callable[[Model], torch.nn.Module],
    load: Callable[[Allocate], Model],
) -> None:
    """Load a model and write it to a file.

    Raises:
        _NotWrittenError: it cannot be written; the file is empty.
    """
    memory = _FileMemory(file.descriptor)
    try:
        model = load(memory.allocate)
        _write(file, source, model, module_of(model), memory)
    except _NotWrittenError:
        os.ftruncate(file.descriptor, 0)
        raise


@contextmanager
def _explained() -> Iterator[None]:
    """Tell what the system refuses apart from the errors of a checkpoint."""
    try:
        yield
    except OSError as error:
        raise _NotWrittenError(f"they cannot be shared: {error}") from error


class _FileMemory:
    """Allocates tensors at the beginning of an empty file, whose size grows.

    Attributes:
        end: the place after the last tensor.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mappings: list[tuple[int, mmap.mmap]] = []
        """The place of each mapping in the file, and the mapping."""
        self._places: dict[int, int] = {}
        """The place of each tensor by its address."""
        self.end = 0
        os.ftruncate(descriptor, 0)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in the file."""
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return in_own_memory(shape, dtype)
        start, mapping = self._mappings[-1] if self._mappings else (0, b"")
        if self.end + num_bytes > start + len(mapping):
            start = self.end = _aligned(self.end, mmap.ALLOCATIONGRANULARITY)
            size = max(_aligned(num_bytes, mmap.PAGESIZE), _CHUNK_BYTES)
            with _explained():
                os.ftruncate(self._descriptor, start + size)
                mapping = mmap.mmap(self._descriptor, size, offset=start)
            use_large_pages(mapping)
            self._mappings.append((start, mapping))
        tensor = torch.frombuffer(mapping, dtype=dtype, count=prod(shape), offset=self.end - start)
        self._places[tensor.data_ptr()] = self.end
        self.end = _aligned(self.end + num_bytes, _ALIGNMENT)
        return tensor.view(shape)

    def place_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the place of a storage in the file; None if it is not there."""
        return self._places.get(storage.data_ptr())

    def protect(self) -> None:
        """Replace the mappings by others at the same addresses, which can only be read.

        Raises:
            OSError: the system cannot do so.
        """
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        library.mmap.restype = ctypes.c_void_p
        # A mapping of a file that was opened for writing could be made writable again later.
        readable = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY)
        try:
            for start, mapping in self._mappings:
                address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
                flags = mmap.MAP_SHARED | _MAP_FIXED
                found = library.mmap(address, len(mapping), mmap.PROT_READ, flags, readable, start)
                if found != address:
                    raise OSError(ctypes.get_errno(), "the weights cannot be made read-only")
        finally:
            os.close(readable)


class _Pickler(pickle.Pickler):
    """Pickles a model without the storages that ``placed`` then has: their places in the file.

    Args:
        file: gets the pickle.
        module: the model's modules, whose buffers belong to the pickle.
        memory: the memory of weights that are in the file already; the others get places after it.
    """

    def __init__(self, file: io.BytesIO, module: torch.nn.Module, memory: _FileMemory) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.placed: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self.end = memory.end
        self._memory = memory
        self._buffers = {each.untyped_storage()._cdata for each in module.buffers()}

    def persistent_id(self, item: Any) -> tuple[int, int, torch.dtype] | None:
        if not isinstance(item, torch.storage.TypedStorage):
            return None
        storage: torch.UntypedStorage = item._untyped_storage
        if storage._cdata in self._buffers or not storage.nbytes():
            return None
        if (place := self._memory.place_of(storage)) is not None:
            return place, storage.nbytes(), item.dtype
        if storage._cdata not in self.placed:
            self.placed[storage._cdata] = self.end, storage
            self.end += _aligned(storage.nbytes(), _ALIGNMENT)
        return self.placed[storage._cdata][0], storage.nbytes(), item.dtype


class _Unpickler(pickle.Unpickler):
    """Makes a model whose storages are places of a mapping."""

    def __init__(self, mapping: mmap.mmap, start: int) -> None:
        super().__init__(io.BytesIO(mapping[start:-_PLACE_BYTES]))
        self._mapping = mapping
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, place: tuple[int, int, torch.dtype]) -> torch.storage.TypedStorage:
        start, num_bytes, dtype = place
        if start not in self._storages:
            values = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=start, count=num_bytes)
            self._storages[start] = values.untyped_storage()
        wrapped = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=self._storages[start], dtype=dtype, _internal=True
        )
        return wrapped


def _write(
    file: WeightsFile, source: Source, model: object, module: torch.nn.Module, memory: _FileMemory
) -> None:
    """Complete the file of a model's weights.

    Weights that are not in the file yet are written, and freed one after the other. The model cannot be used
    afterwards.

    Raises:
        _NotWrittenError: the model cannot be pickled, or the system refuses a step.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, module, memory)
    try:
        pickler.dump((source, model))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _NotWrittenError(f"its model cannot be pickled: {error}") from error
    with _explained():
        _write_rest(file, pickler, pickled)
        memory.protect()
        file.seal()


def _write_rest(file: WeightsFile, pickler: _Pickler, pickled: io.BytesIO) -> None:
    """Write the weights that are not in the file yet, the pickle and its place."""
    os.ftruncate(file.descriptor, pickler.end + len(pickled.getbuffer()) + _PLACE_BYTES)
    with mmap.mmap(file.descriptor, 0) as mapping:
        use_large_pages(mapping)
        freed = 0
        for start, storage in pickler.placed.values():
            num_bytes = storage.nbytes()
            values = (ctypes.c_char * num_bytes).from_address(storage.data_ptr())
            mapping[start : start + num_bytes] = values
            if storage.resizable():
                storage.resize_(0)
                freed += num_bytes
            if freed > _TRIM_BYTES:
                _trim()
                freed = 0
        mapping[pickler.end : -_PLACE_BYTES] = pickled.getbuffer()
        mapping[-_PLACE_BYTES:] = pickler.end.to_bytes(_PLACE_BYTES)
    _trim()


def _read(file: WeightsFile) -> tuple[Source, Any]:
    mapping = mmap.mmap(file.descriptor, 0, prot=mmap.PROT_READ)
    use_large_pages(mapping)
    start = int.from_bytes(mapping[-_PLACE_BYTES:])
    with warnings.catch_warnings():
        # torch warns that a tensor cannot be written to; this is intended.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        source, model = _Unpickler(mapping, start).load()
    return source, model


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def _trim() -> None:
    """Return freed memory to the system, which glibc otherwise keeps in pieces of up to 32 MiB."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
