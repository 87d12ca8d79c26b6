"""Runs a kernel on the threads that torch's own operators use.

Two thread pools on the same cores would cost more time than the kernels themselves. OpenMP's threads spin for
a while after each operator, and the threads of another pool, such as Numba's, would wait for the cores. A
kernel is therefore a C function, which torch's OpenMP library calls once on each thread that torch has
already created.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_ParallelCall = Callable[[int, int | bytes, int, int], None]


def run(kernel_address: int, arguments: int | bytes, num_threads: int) -> None:
    """Call ``void kernel(void *arguments)`` on each of ``num_threads`` threads and wait for all of them.

    The arguments are an address, or the bytes themselves.

    If torch was built without GNU OpenMP, as on other platforms, the kernel is called once, on this thread.
    """
    parallel = _gomp_parallel()
    if num_threads == 1 or parallel is None:
        _function(kernel_address)(arguments)
    else:
        parallel(kernel_address, arguments, num_threads, 0)


def run_with_counter(kernel_address: int, values: tuple[int, ...], index: int, num_threads: int) -> None:
    """Run a kernel whose arguments are int64; that at an index becomes the address of a counter of tasks."""
    arguments = array("q", (*values, 0))
    address, _ = arguments.buffer_info()
    arguments[index] = address + arguments.itemsize * len(values)
    run(kernel_address, address, num_threads)


@cache
def _function(kernel_address: int) -> Callable[[int | bytes], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel_address)


@cache
def team_size_address() -> int:
    """Return the address of ``int f(void)``, the number of threads that run a kernel.

    It is 0 if only one can.
    """
    library = _gomp()
    if library is None:
        return 0
    return ctypes.cast(library.omp_get_num_threads, ctypes.c_void_p).value or 0


@cache
def yield_address() -> int:
    """Return the address of ``int f(void)``, with which a thread offers its core to others."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


@cache
def _gomp_parallel() -> _ParallelCall | None:
    """Return ``GOMP_parallel``; None if torch was built without GNU OpenMP."""
    library = _gomp()
    if library is None:
        return None
    function = library.GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    parallel: _ParallelCall = function
    return parallel


@cache
def _gomp() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch has loaded, which may not be the system's.

    Returns None if torch has no such library.
    """
    folder = Path(torch.__file__).parent
    for library in (*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")):
        return ctypes.CDLL(str(library))
    return None
