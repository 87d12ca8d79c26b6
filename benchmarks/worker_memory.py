"""Measures the memory of the workers of one machine, and the time until they are ready.

Run ``python -m quire.benchmarks.worker_memory [1b | 100m | path/to/model]``. It prints a line for stacks of
1, 2 and 4 workers: the memory of all workers together (PSS, in MiB), and the seconds until the workers of a
stack, and a worker that was killed, are ready.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from quire.benchmarks.harness.random_llamas import SIZES, random_llama
from quire.services.launch.launcher import RESTART_SECONDS
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig

SPLITS = {1: (0, 1), 2: (1, 1), 4: (2, 2)}
"""For each number of workers, those of prefill and of decode."""


def resident_mib(pid: int, kind: str = "Pss") -> int:
    """Return the memory of a process, with its part of what it shares.

    Args:
        kind: "Pss" for all of it, "Pss_Anon" for private memory, "Pss_Shmem" for shared memory.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) >> 10


def _peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) >> 10


def _pids(stack: RunningStack) -> list[int]:
    return [child.process.pid for child in stack.workers.values() if child.process.pid is not None]


def measure(model: Path, num_workers: int) -> dict[str, float]:
    """Start a stack, kill one of its workers, and return what both took."""
    prefill, decode = SPLITS[num_workers]
    config = LocalStackConfig(
        num_prefill=prefill,
        num_decode=decode,
        router=RouterConfig(port=0),
        worker=WorkerConfig(role="decode", model=str(model), num_blocks=256),
    )
    begin = time.perf_counter()
    with local_stack(config) as stack:
        figures: dict[str, float] = {"workers": num_workers, "seconds": time.perf_counter() - begin}
        figures |= {
            kind: sum(resident_mib(pid, kind) for pid in _pids(stack)) for kind in ("Pss", "Pss_Anon")
        }
        figures["peak of one"] = max(map(_peak_mib, _pids(stack)))
        epoch = stack.ready["decode-0"].epoch
        stack.workers["decode-0"].process.kill()
        begin = time.perf_counter()
        while stack.ready["decode-0"].epoch == epoch:
            stack.wait()
        figures["seconds of a restart"] = time.perf_counter() - begin - RESTART_SECONDS
    return figures


def main() -> None:
    """Measure a model, by default a random Llama of 1.2 G parameters in bfloat16."""
    name = sys.argv[1] if len(sys.argv) > 1 else "1b"
    model = random_llama(name, dtype=torch.bfloat16) if name in SIZES else Path(name)
    for num_workers in SPLITS:
        # The workers' first start reads files that the next ones find in the page cache.
        print({key: round(value, 1) for key, value in measure(model, num_workers).items()}, flush=True)


if __name__ == "__main__":
    main()
