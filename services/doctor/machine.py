"""Checks what a worker needs of its machine: processors, packages, kernels, shared and other memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal, NamedTuple

from quire.engine.runner.control_groups import ControlGroups
from quire.services.worker.config import WorkerConfig


class Finding(NamedTuple):
    """What was found out about a subject.

    Attributes:
        level: "warning" if the command serves, but slower or less safely; "problem" if it cannot serve.
        remedy: one line, empty if nothing is to be done.
    """

    level: Literal["ok", "warning", "problem"]
    subject: str
    text: str
    remedy: str = ""


PACKAGES = ("torch", "transformers", "numba")
INSTALL = "in quire's clone, run .venv/bin/pip install -e '.[worker]'"


def check_machine(config: WorkerConfig, num_workers: int) -> Iterator[Finding]:
    """Find out whether a number of workers can serve here.

    Args:
        num_workers: those that share this machine.
    """
    try:
        versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    except PackageNotFoundError as error:
        yield Finding("problem", "packages", f"{error.name} is not installed", INSTALL)
        return
    yield Finding("ok", "packages", versions)
    yield from _check_kernels(config)
    yield from _check_processors(config, num_workers)
    yield _check_shared_memory(config)
    yield from _check_memory(config, num_workers)
    yield from _check_folders(config)


def _check_folders(config: WorkerConfig) -> Iterator[Finding]:
    """Find out about folders without which the worker does not start; what is right is not mentioned."""
    for named in config.lora:
        file = Path(named.partition("=")[2], "adapter_config.json")
        if not file.is_file():
            yield Finding(
                "problem", "adapter", f"there is no {file}", "name the folder of an adapter by --lora"
            )
    if config.draft_model is not None and _is_missing(config.draft_model):
        text = f"there is no {config.draft_model}"
        yield Finding("problem", "draft model", text, "name a model, ngram or off by --speculation")
    if config.disk_cache is not None:
        folder = Path(config.disk_cache.path)
        present = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        try:
            os.rmdir(mkdtemp(prefix=".quire-doctor-", dir=present))
        except OSError as error:
            yield Finding("problem", "disk cache", f"{folder}: {error.strerror}", "name a folder to write to")


def _is_missing(model: str) -> bool:
    """Return whether a model's name is a path, and no id of the hub, and there is nothing."""
    path = Path(model)
    return (path.is_absolute() or model.startswith(".")) and not path.exists()


def _check_kernels(config: WorkerConfig) -> Iterator[Finding]:
    import torch

    from quire.engine.model.arithmetic import choose_sums

    if not torch.cuda.is_available():
        yield Finding("ok", "gpu", "none that torch can use, so the processor computes")
        width = torch.backends.cpu.get_cpu_capability()
        fast, sums = (choose_sums(each, torch.bfloat16).name for each in (config.arithmetic, "portable"))
        text = f"Numba, {width}; arithmetic {sums}" + (f", {fast} for bfloat16" if fast != sums else "")
        if width in ("AVX2", "AVX512"):
            yield Finding("ok", "kernels", text)
        else:
            yield Finding(
                "warning", "kernels", text, "use a processor with AVX2 or AVX-512: this one is slow"
            )
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding("ok", "gpu", f"{name}, {free >> 20} of {total >> 20} MiB free")
    try:
        yield Finding("ok", "kernels", f"Triton {version('triton')}")
    except PackageNotFoundError:
        yield Finding("problem", "kernels", "triton is not installed", "install torch's build for CUDA")


def _check_processors(config: WorkerConfig, num_workers: int) -> Iterator[Finding]:
    from quire.engine.runner.processors import num_cores

    cores, needed = num_cores(), num_workers * config.tensor_parallel_size * (config.threads or 1)
    text = f"{cores} cores for {num_workers} worker{'s' * (num_workers > 1)}"
    if needed <= cores:
        yield Finding("ok", "processors", text)
    else:
        remedy = "start fewer workers, or lower --threads or --tensor-parallel-size"
        yield Finding("warning", "processors", f"{text} with {needed} threads in all", remedy)


def _check_shared_memory(config: WorkerConfig) -> Finding:
    if config.transport != "auto":
        return Finding("ok", "shared memory", f"not used with --transport {config.transport}")
    try:
        os.close(os.memfd_create("quire-doctor", os.MFD_ALLOW_SEALING))
    except (OSError, AttributeError) as error:
        remedy = "allow memfd_create(2); until then blocks go from worker to worker in messages"
        return Finding("warning", "shared memory", f"none: {error}", remedy)
    return Finding("ok", "shared memory", "memfd_create(2) works; /dev/shm does not limit it")


def _check_memory(config: WorkerConfig, num_workers: int) -> Iterator[Finding]:
    import torch

    from quire.engine.pool_memory import CPU_KV_BYTES
    from quire.engine.runner.processors import read_cores

    folder = Path(config.model_path)
    files = [folder] if folder.is_file() else list(folder.glob("*.safetensors"))
    if _is_missing(config.model_path):
        yield Finding("problem", "model", f"there is no {folder}", "name the folder of a model")
    elif config.model is not None and not folder.exists():
        yield Finding(
            "ok", "model", f"{config.model} comes from the hub or its cache; its size is not known here"
        )
    elif not files:
        yield Finding("problem", "model", f"{folder} has no *.safetensors", "name the folder of a model")
    else:
        weights = sum(each.stat().st_size for each in files)
        yield Finding("ok", "model", f"{folder}: {weights >> 20} MiB of weights")
    weights = sum(each.stat().st_size for each in files)
    blocks = 0 if config.num_blocks else config.kv_memory_bytes or CPU_KV_BYTES
    if torch.cuda.is_available():
        weights = blocks = 0  # both are in the GPU's memory, of which the pool takes a share
    # The workers of a NUMA node share their weights, except the ranks of a divided model.
    num_nodes = len({core.node for core in read_cores(os.sched_getaffinity(0))})
    num_copies = num_workers if config.tensor_parallel_size > 1 else min(num_workers, num_nodes)
    own = blocks + config.swap_space_bytes + config.host_cache_bytes
    needed = num_copies * weights + num_workers * own
    total, free = ControlGroups().memory_bytes(), _available_bytes()
    text = f"{num_copies} x weights and {num_workers} x blocks need {needed >> 20} MiB"
    if config.num_blocks:
        text += f" and {config.num_blocks} blocks each, whose size the model decides"
    remedy = "lower --kv-memory, --swap-memory or --host-cache, start fewer workers, or add memory"
    if needed > total:
        yield Finding("problem", "memory", f"{text}; {total >> 20} MiB are here", remedy)
    elif needed > min(total, free):
        yield Finding("warning", "memory", f"{text}; {free >> 20} MiB are free now", remedy)
    else:
        yield Finding("ok", "memory", f"{text}; {min(total, free) >> 20} MiB are free")


def _available_bytes() -> int:
    """Return the memory that the machine can give to new processes without swapping."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].removesuffix("kB")) << 10
