"""The command lines of the processes of a chaos run, and the variants of their settings."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from quire.models.source import demo_model_path
from quire.rpc.tls import TlsFiles
from tests.testing.tiny_models import make_random_model

Variant = Literal["plain", "int8", "tiers", "speculation", "states", "tls", "messages", "nixl"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

GRACE_SECONDS = 10
"""Time after SIGTERM in which running requests may end where they run."""
RESTART_SECONDS = 90
"""Longest time from the start of a process until the others use it."""
HOST_CACHE, DISK_CACHE = "2MiB", "16MiB"
"""Sizes of the tiers below the pool; the host's is small, so that blocks reach the disk."""


@dataclass
class Ports:
    """Ports of one process; ``proxy`` is where others connect to it, and ``redis`` where it finds Redis."""

    grpc: int
    metrics: int
    admin: int
    proxy: int
    redis: int


def router_command(ports: Ports, certificate: TlsFiles | None) -> list[str]:
    """Return the arguments of ``quire`` for a router."""
    # Short prompts cross processes too; and requests wait for workers as long as a restart may take.
    placing = ["--local-prefill-tokens", "0", "--worker-wait", str(RESTART_SECONDS)]
    return ["router", *_common(ports, certificate), "--admin-port", str(ports.admin), *placing]


def worker_command(
    name: str, ports: Ports, variant: Variant, num_blocks: int, folder: Path, certificate: TlsFiles | None
) -> list[str]:
    """Return the arguments of ``quire`` for a worker whose name begins with its role.

    Args:
        folder: where the worker may have a folder of its own for blocks.
    """
    role = name.partition("-")[0]
    command = [role, *_common(ports, certificate), "--advertise", f"127.0.0.1:{ports.proxy}"]
    command += ["--dtype", "float32", "--threads", "1", "--num-blocks", str(num_blocks)]
    if variant in ("messages", "nixl"):
        command += ["--transport", variant]
    if variant == "int8":
        command += ["--kv-cache-dtype", "int8"]
    if variant == "tiers":
        command += ["--host-cache", HOST_CACHE, "--disk-cache", f"{folder / name}:{DISK_CACHE}"]
    if variant == "states":
        command.append(str(states_model(folder / "model")))
    if variant == "speculation" and role == "decode":
        command += ["--speculation", "ngram"]
    return command


def states_model(folder: Path) -> Path:
    """Make a model with states, attention, experts and the demo's tokens in a folder, if it is not there."""
    if not folder.exists():
        demo = demo_model_path()
        sizes = json.loads((demo / "config.json").read_text())
        names = ("vocab_size", "max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id")
        make_random_model("qwen3_next", folder, **{name: sizes[name] for name in names})
        for path in demo.glob("*token*"):
            shutil.copy(path, folder)
    return folder


def _common(ports: Ports, certificate: TlsFiles | None) -> list[str]:
    options = ["--port", str(ports.grpc), "--metrics-port", str(ports.metrics)]
    options += ["--log-level", "info", "--grace-period", str(GRACE_SECONDS)]
    if certificate is not None:
        options += ["--cluster-cert", str(certificate.certificate), "--cluster-key", str(certificate.key)]
        options += ["--cluster-ca", str(certificate.authority)]
    return options
