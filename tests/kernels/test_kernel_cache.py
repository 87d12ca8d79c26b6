"""Kernels from the disk are the right ones, and compute what they computed when they were compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.kernels.cpu.kernel_cache import _KernelFiles
from tests.testing.commands import run_command

PROGRAM = """
import torch
from quire.kernels.cpu.products.linear import linear
from quire.kernels.cpu.products.packing import pack
from quire.kernels.cpu.products.quantized_weight import quantize

torch.manual_seed(0)
weight = torch.randn(96, 64)
for weight_dtype in ("float32", "int8", "int4", "w4a8"):
    packed = pack(weight) if weight_dtype == "float32" else quantize(weight, weight_dtype)
    expected_weight = packed.unpack()
    tolerance = 0.5 if weight_dtype == "w4a8" else 1e-4
    for num_rows in range(1, 15):
        inputs = torch.randn(num_rows, 64)
        torch.testing.assert_close(
            linear(inputs, packed, None), inputs @ expected_weight.T, rtol=tolerance, atol=tolerance
        )
"""


def run(arguments: list[str | Path], cache: Path) -> None:
    """Run Python with a folder of compiled kernels."""
    run_command(sys.executable, *arguments, variables={"NUMBA_CACHE_DIR": str(cache)}, timeout=900)


def test_linear_layers_from_the_cache_are_right(tmp_path: Path) -> None:
    for _ in range(2):
        run(["-c", PROGRAM], tmp_path)
        assert len(list(tmp_path.rglob("unit_product*.nbc"))) == 4, "not each type of weights has its kernel"
        assert len(list(tmp_path.rglob("linear*.nbc"))) == 1, "the kernel that calls them was not stored"


KERNEL = """
from numba import types
from quire.kernels.cpu.kernel_cache import compile_function

def square(number):
    return number * number

compiled = compile_function(types.int64(types.int64), square)
assert compiled.ctypes(7) == 49
print(compiled.cache_hits)
"""


BROKEN_KERNEL = """
import fcntl
from pathlib import Path
from numba import types
from numba.core.errors import NumbaError
from quire.kernels.cpu.kernel_cache import compile_function, stored_njit

def bad(number):
    return number.missing

try:
    COMPILE_IT
except NumbaError as error:
    kept = error
[path] = Path(__file__).parent.rglob("*.compiling")
with path.open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
assert kept
"""


TILES_OF = """
import sys
from llvmlite import binding
binding.get_host_cpu_features = lambda: {"avx512f": sys.argv[1] == "avx512f"}
from quire.kernels.cpu.intrinsics import SQUARE, TILE_COLUMNS
print(TILE_COLUMNS, SQUARE)
"""


def test_machines_with_one_folder_and_one_set_of_features_have_the_same_tiles() -> None:
    """The index of stored kernels has the features that are set, and not those of the machine."""
    variables = {"NUMBA_CPU_NAME": "generic"}
    for feature in ("avx2", "avx512f"):
        done = run_command(sys.executable, "-c", TILES_OF, feature, variables=variables)
        assert done.stdout == "16 8\n"


def test_only_one_of_several_processes_compiles_a_kernel(tmp_path: Path) -> None:
    program = tmp_path / "kernel.py"
    program.write_text(KERNEL)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(program)]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert sorted(outputs) == ["0\n", "1\n"]


@pytest.mark.parametrize(
    "compile_it", ["compile_function(types.int64(types.int64), bad)", "stored_njit(bad)(1)"]
)
def test_a_kernel_that_cannot_be_compiled_keeps_no_lock(tmp_path: Path, compile_it: str) -> None:
    program = tmp_path / "kernel.py"
    program.write_text(BROKEN_KERNEL.replace("COMPILE_IT", compile_it))
    run([program], tmp_path)


def files(folder: Path, stamp: str = "sources") -> Any:
    return _KernelFiles(str(folder), "kernel", stamp)  # type: ignore[no-untyped-call]


def store(folder: Path, key: int) -> None:
    files(folder).save(key, f"kernel {key}")


def test_kernels_that_are_stored_at_the_same_time_are_kept_apart(tmp_path: Path) -> None:
    # Each call opens the lock's file anew, so threads exclude each other as processes do.
    keys = range(64)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store, [tmp_path] * len(keys), keys))
    assert [files(tmp_path).load(key) for key in keys] == [f"kernel {key}" for key in keys]


def test_kernels_of_other_sources_are_not_used_and_removed(tmp_path: Path) -> None:
    store(tmp_path, 1)
    changed = files(tmp_path, "changed sources")
    assert changed.load(1) is None
    changed.save(2, "another kernel")
    assert changed.load(2) == "another kernel"
    assert len(list(tmp_path.glob("*.nbc"))) == 1


def test_a_kernel_whose_file_is_missing_is_compiled_again(tmp_path: Path) -> None:
    store(tmp_path, 1)
    for path in tmp_path.glob("*.nbc"):
        path.unlink()
    assert files(tmp_path).load(1) is None


def test_a_kernel_is_compiled_on_a_file_system_without_locks(tmp_path: Path) -> None:
    program = tmp_path / "kernel.py"
    failing = (
        "import fcntl\n\ndef fail(*arguments):\n    raise OSError(37, 'No locks available')\n\n"
        "fcntl.flock = fail\n"
    )
    program.write_text(failing + KERNEL)
    run([program], tmp_path)


def test_a_kernel_cache_on_a_full_disk_keeps_no_unfinished_file(tmp_path: Path) -> None:
    """The kernel runs nevertheless, and the next process compiles it again."""
    program = tmp_path / "kernel.py"
    program.write_text(f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n{KERNEL}")
    run(["-B", program], tmp_path / "cache")
    files = [path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert set(files) <= {".compiling", ".lock"}, files


def test_kernels_are_compiled_where_no_folder_can_be_written(tmp_path: Path) -> None:
    program = tmp_path / "kernel.py"
    stored = "from quire.kernels.cpu.kernel_cache import stored_njit\nassert stored_njit(square)(7) == 49\n"
    program.write_text(f"{KERNEL}\n{stored}")
    environment = {**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1
