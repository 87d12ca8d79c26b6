"""Uses Linux's futex, with which a thread sleeps until another process changes a counter in shared memory."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from quire.kernels.cpu.intrinsics import instruction

_INT64 = ir.IntType(64)
_NUMBERS = {"x86_64": 202, "aarch64": 98}
"""The number of the system call, by machine."""
_WAIT, _WAKE = 0, 1
_ALL = (1 << 31) - 1


@cache
def futex_call() -> tuple[int, int]:
    """Return the address of ``long syscall(long number, ...)``, and the number of futex.

    Raises:
        OSError: the number is not known for this machine.
    """
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(f"processes cannot wait for each other on this machine: {platform.machine()}")
    return ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0, number


def _emit_futex(builder: Any, call: list[Any], operation: int, value: Any, timeout: Any) -> None:
    """Emit a call of futex; ``call`` has the addresses of ``syscall`` and, last, of the counter."""
    system_call, number, address = call
    function_type = ir.FunctionType(_INT64, [_INT64], var_arg=True)
    function = builder.inttoptr(system_call, function_type.as_pointer())
    builder.call(function, [number, address, ir.Constant(_INT64, operation), value, timeout])


@instruction
def sleep_while(typingctx: Any, system_call: Any, number: Any, address: Any, value: Any, timeout: Any) -> Any:
    """Sleep until ``wake`` is called for a counter, unless its lower 32 bits differ from those of ``value``.

    Args:
        system_call, number: see ``futex_call``.
        address: the counter's address: an int64 on a little-endian machine.
        value: the last known value of the counter.
        timeout: address of two int64, the seconds and nanoseconds after which the thread wakes up anyway.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_futex(builder, list(arguments[:3]), _WAIT, arguments[3], arguments[4])
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 5), codegen


@instruction
def wake(typingctx: Any, system_call: Any, number: Any, address: Any) -> Any:
    """Wake all threads that sleep at a counter."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_futex(builder, list(arguments), _WAKE, ir.Constant(_INT64, _ALL), ir.Constant(_INT64, 0))
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 3), codegen
