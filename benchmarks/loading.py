"""Measures how fast a model loads, beside reading its files, and the memory that its workers take.

Each load is a process of its own, as a worker is. With --cold, the files are dropped from the page cache
before each load and each read; otherwise they are read once before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, NamedTuple

from quire.benchmarks.harness.program import FailedError, Report, program
from quire.benchmarks.harness.random_llamas import CACHE, random_llama
from quire.benchmarks.harness.tables import table
from quire.engine.weights.weights_file import create_weights_file

_LOAD = """
import sys, time
import torch
from quire.engine.weights import loader
from quire.engine.weights.weights_file import WeightsFile

folder, dtype, weight_dtype, threads, *file = sys.argv[1:]
torch.set_num_threads(int(threads))
weights = WeightsFile(*map(int, file))
read, reads = loader._load, []


def timed(*arguments):
    start = time.perf_counter()
    result = read(*arguments)
    reads.append(time.perf_counter() - start)
    return result


loader._load = timed
seconds = time.perf_counter(), time.process_time()
model = loader.load_model(folder, dtype, torch.device("cpu"), weight_dtype, weights_file=weights)
seconds = time.perf_counter() - seconds[0], time.process_time() - seconds[1]
print(*seconds, reads[0], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    model: Annotated[str, "size of a random Llama, or a model's folder"] = "100m"
    dtypes: Annotated[tuple[str, ...], "dtypes of the weights"] = ("float32", "bfloat16")
    weight_dtypes: Annotated[tuple[str, ...], "types of packed weights"] = ("auto", "int8", "int4", "w8a8")
    workers: Annotated[tuple[int, ...], "numbers of workers that share the weights"] = (1, 2, 4)
    threads: Annotated[int, "threads of each worker"] = 2
    cold: Annotated[bool, "drop the files from the page cache first"] = False


class _Row(NamedTuple):
    dtype: str
    weight_dtype: str
    workers: int
    seconds: float
    """Until the last worker has loaded and checked the model."""
    cpu_seconds: float
    """Of all workers."""
    read_seconds: float
    weights_seconds: float
    """Until the last worker has the packed weights, which are then checked."""
    gigabytes_per_second: float
    restart_seconds: float
    memory_mib: float
    """Of all workers together, with each shared page counted once (PSS)."""


@program
def main(options: Options) -> Report:
    """Measure each type of weights and each number of workers."""
    size = options.model
    folder = Path(size) if Path(size).is_dir() else random_llama(size, CACHE)
    rows = [
        _measure(folder, dtype, weight_dtype, workers, options)
        for dtype in options.dtypes
        for weight_dtype in options.weight_dtypes
        for workers in options.workers
    ]
    columns = {
        "dtype": "{dtype}",
        "weights": "{weight_dtype}",
        "workers": "{workers}",
        "load (s)": "{seconds:.2f}",
        "processor (s)": "{cpu_seconds:.2f}",
        "weights (s)": "{weights_seconds:.2f}",
        "cat (s)": "{read_seconds:.2f}",
        "GB/s": "{gigabytes_per_second:.2f}",
        "another worker (s)": "{restart_seconds:.2f}",
        "memory of all (MiB)": "{memory_mib:.0f}",
    }
    return Report([table(f"loading {folder.name}", rows, columns)], {"rows": rows})


def _measure(folder: Path, dtype: str, weight_dtype: str, workers: int, options: Options) -> _Row:
    files = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(each.stat().st_size for each in files)
    read_seconds = _read(files, cold=options.cold)
    _prepare(files, cold=options.cold)
    shared = create_weights_file()
    try:
        descriptors = shared.descriptor, shared.notes
        command = [sys.executable, "-c", _LOAD, str(folder), dtype, weight_dtype, str(options.threads)]
        started = [_start(command, descriptors) for _ in range(workers)]
        try:
            with ThreadPoolExecutor(workers) as pool:
                loads = list(pool.map(_wait, started))
            memory = sum(_pss(each.pid) for each in started)
            started.append(_start(command, descriptors))
            restart = _wait(started[-1])
        finally:
            for each in started:
                each.kill()
                each.communicate()
    finally:
        shared.close()
    weights_seconds = max(each.weights_seconds for each in loads)
    return _Row(
        dtype,
        weight_dtype,
        workers,
        max(each.seconds for each in loads),
        sum(each.cpu_seconds for each in loads),
        read_seconds,
        weights_seconds,
        num_bytes / 1e9 / weights_seconds,
        restart.seconds,
        memory,
    )


class _Load(NamedTuple):
    seconds: float
    cpu_seconds: float
    weights_seconds: float


def _start(command: Sequence[str], descriptors: tuple[int, int]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _wait(process: subprocess.Popen[str]) -> _Load:
    """Wait until a process has loaded its model; imports do not count."""
    assert process.stdout is not None
    words = process.stdout.readline().split()
    if not words:
        raise FailedError("a worker could not load the model; the reason is above")
    return _Load(*map(float, words))


def _prepare(files: Sequence[Path], *, cold: bool) -> None:
    for path in files:
        with path.open("rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass


def _read(files: Sequence[Path], *, cold: bool) -> float:
    """Return the seconds in which ``cat`` reads the files."""
    _prepare(files, cold=cold)
    start = perf_counter()
    with Path(os.devnull).open("wb") as nowhere:
        subprocess.run(["cat", *files], stdout=nowhere, check=True)
    return perf_counter() - start


def _pss(process_id: int) -> float:
    """Return a process's memory in MiB, with its share of the pages that it has in common with others."""
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
