"""Compiles kernels, and caches them on disk for later processes.

Numba's own cache can give a process the wrong kernel in two ways. It checks only the file that defines a
kernel, so it misses a change of a function in another file. And two processes that store different kernels at
the same time may choose the same file name. Here all kernels are compiled again when any of the source files
changes. Each kernel is stored under a unique name while a lock is held.

Compiling takes seconds, and the workers of a machine need the same kernels. Another lock is therefore held
while a kernel is compiled. Processes that wait for this lock then read the kernel from disk.

A kernel calls about a hundred small functions, its parts. Numba would optimize each part and translate it to
machine code, although only the kernel is called. Here LLVM optimizes a kernel together with all its parts,
once, which takes less than half of the time.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import llvmlite
import numpy as np
from numba import from_dtype, njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys
from numba.core.sigutils import normalize_signature

logger = logging.getLogger(__name__)


def compile_kernel(arguments: np.dtype[Any], kernel: Callable[[Any], None]) -> Any:
    """Return a C function that runs a kernel, whose only argument points to a record of this dtype."""
    return compile_function(types.void(types.CPointer(from_dtype(arguments))), kernel)


def compile_function(signature: Any, function: Callable[..., Any]) -> Any:
    """Return a C function of a Numba signature; load it from disk if it was compiled before."""
    options = {"error_model": "numpy"}
    compiled: Any = _Kernel(function, normalize_signature(signature), locals={}, options=options)
    if (stored := _cache_of(function)) is None:
        compiled.compile()
        return compiled
    compiled._cache = stored
    with stored.turn_ends_with_error():
        compiled.compile()
    return compiled


def stored_njit(function: Callable[..., Any]) -> Any:
    """Compile a function for the types of each call, to run without the GIL, and cache it on disk."""
    compiled: Any = njit(nogil=True)(function)
    if (stored := _cache_of(function)) is not None:
        compiled._cache = stored
        compiled.compile = stored.turn_ends_with_error()(compiled.compile)
    return compiled


def _cache_of(function: Callable[..., Any]) -> _KernelCache | None:
    """Return the stored kernels of a function; None if there is no folder for them."""
    try:
        return _KernelCache(function)
    except RuntimeError:
        # Neither the folder of the sources nor the user's folder of caches can be written.
        _tell_that_nothing_is_stored()
        return None


@cache
def _tell_that_nothing_is_stored() -> None:
    logger.warning("each process compiles its kernels: name a folder for them with NUMBA_CACHE_DIR")


class _Kernel(CFunc):
    """A C function whose parts are optimized with it, and have no machine code of their own."""

    def _compile_uncached(self) -> Any:
        """Compile the function; ``CFunc.compile`` holds Numba's lock meanwhile."""
        with _in_parts(cpu_target.target_context.codegen()):
            result = super()._compile_uncached()  # type: ignore[misc]
        result.library.is_part = False
        return result


class _Library(JITCodeLibrary):
    """The code of a kernel, or of a part, which is only linked into kernels."""

    is_part = True

    def add_ir_module(self, ir_module: Any) -> None:
        """Let LLVM use registers of 512 bits, which it avoids on Intel's processors.

        The first ones that had them lowered their clock meanwhile.
        """
        for function in ir_module.functions:
            if not function.is_declaration:
                # llvmlite knows only some names of attributes, and checks them in ``add``.
                set.add(function.attributes, '"prefer-vector-width"="512"')
        super().add_ir_module(ir_module)  # type: ignore[no-untyped-call]

    def _optimize_final_module(self) -> None:
        if not self.is_part:
            super()._optimize_final_module()  # type: ignore[no-untyped-call]

    def _finalize_final_module(self) -> None:
        if self.is_part:
            self._finalized = True
        else:
            super()._finalize_final_module()  # type: ignore[no-untyped-call]


@contextmanager
def _in_parts(codegen: Any) -> Iterator[None]:
    """Let Numba's generator of code make a ``_Library`` for each function that it compiles."""
    codegen._library_class = _Library
    # It would write to a variable of the part, which has no address without machine code.
    codegen.set_env = lambda name, environment: None
    try:
        yield
    finally:
        del codegen._library_class, codegen.set_env


class _KernelCache(FunctionCache):
    """The kernels of one function: one for each signature and for each content of its closure."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._cache_file = _KernelFiles(  # type: ignore[no-untyped-call]
            self._cache_path, self._impl.filename_base, _digest_of_sources()
        )
        self._turn: IO[str] | None = None
        """The lock file, while this process compiles the function."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return a stored kernel; None if there is none and no other process is compiling the function."""
        # ``FunctionCache`` also lets Numba learn all the functions that it can compile, which takes 0.3 s.
        rtsys.initialize(target_context)
        found = self._load(sig, target_context)
        if found is not None:
            return found
        self._turn = self._wait_for_turn()
        found = self._load(sig, target_context)
        if found is not None:
            self._end_turn()
        return found

    @contextmanager
    def turn_ends_with_error(self) -> Iterator[None]:
        """Let the other processes compile the function after an error; the exception may be kept for long."""
        try:
            yield
        except BaseException:
            self._end_turn()
            raise

    def _load(self, sig: Any, target_context: Any) -> Any:
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        return None  # after an error

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a kernel; if that fails, the next process compiles it again."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError as error:
            logger.warning("a compiled kernel cannot be stored in %s: %s", self._cache_path, error)
        finally:
            self._end_turn()

    def _wait_for_turn(self) -> IO[str] | None:
        """Lock the function against other processes; return None if no file can be written."""
        path = Path(self._cache_path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            turn = (path / f"{self._impl.filename_base}.compiling").open("w")
        except OSError:
            return None
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            turn.close()
            return None
        return turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.close()
            self._turn = None


class _KernelFiles(IndexDataCacheFile):
    """The index of a function's kernels, and a file for each of them."""

    def save(self, key: Any, data: Any) -> None:
        """Store a kernel. The index names it only after the whole kernel was written."""
        index = Path(self._index_path)
        with index.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            names = self._load_index()  # type: ignore[no-untyped-call]
            name = names.setdefault(key, f"{index.stem}.{uuid4().hex}.nbc")
            self._save_data(name, data)  # type: ignore[no-untyped-call]
            self._save_index(names)  # type: ignore[no-untyped-call]
            for path in index.parent.glob(f"{index.stem}.*.nbc"):
                if path.name not in names.values():
                    path.unlink()


@cache
def _digest_of_sources() -> str:
    """Return a digest of the kernels' source files. Numba itself checks its own version."""
    digest = sha256(llvmlite.__version__.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
