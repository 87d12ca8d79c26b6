"""Compares the GPU kernels with the limits of the device, contiguous attention and other paged kernels.

    python -m quire.benchmarks.kernels_gpu [--heads 32] [--kv-heads 8] [--head-dim 128] [--block-size 16]

Decode reads each key and value once and computes little: its ceiling is the bandwidth of a device copy,
measured here. Prefill's ceiling is scaled dot product attention of the same shape over contiguous keys and
values, in the flash kernel. FlashInfer and FlexAttention are shown where they can be imported.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.engine.model.decode_graphs import CudaCapture, Replay
from quire.kernels.metadata import AttentionMetadata

DEVICE = torch.device("cuda")
GIGA = 1e9
TERA = 1e12
BATCHES = (1, 8, 64, 256)
CONTEXTS = (512, 4096, 32768)
PROMPTS = ((1, 2048), (8, 2048), (1, 16384))
NUM_COPIES = 5
"""Copies of all keys and values in memory: 16-bit blocks, 8-bit blocks, and contiguous for the others."""

Output = torch.Tensor
Attention = Callable[[], Output]


class Model(NamedTuple):
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def kv_bytes(self, num_tokens: int, dtype: torch.dtype | None = None) -> int:
        return 2 * num_tokens * self.num_kv_heads * self.head_dim * (dtype or self.dtype).itemsize


class Step(NamedTuple):
    """Sequences of equal lengths, their blocks shuffled over memory."""

    query: torch.Tensor
    kv_layer: torch.Tensor
    metadata: AttentionMetadata
    new_tokens: int
    seq_len: int

    @property
    def num_seqs(self) -> int:
        return self.metadata.seq_lens.shape[0]

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, keys and values ``[num_seqs, heads, tokens, head_dim]``, gathered from the blocks."""
        gathered = self.kv_layer[self.metadata.block_tables.flatten().long()]
        # [blocks of all sequences, 2, heads, block_size, head_dim] -> [2, sequences, heads, tokens, head_dim]
        _, _, num_kv_heads, _, head_dim = gathered.shape
        split = gathered.view(self.num_seqs, -1, *gathered.shape[1:]).permute(2, 0, 3, 1, 4, 5)
        keys, values = split.reshape(2, self.num_seqs, num_kv_heads, -1, head_dim)[..., : self.seq_len, :]
        query = self.query.view(self.num_seqs, self.new_tokens, *self.query.shape[1:]).transpose(1, 2)
        return query, keys.contiguous(), values.contiguous()


class Contender(NamedTuple):
    """One implementation of one step, and what it reads of keys and values."""

    name: str
    run: Attention
    kv_bytes: int


class Measurable(NamedTuple):
    """A contender's step as a CUDA graph, and what it computed."""

    name: str
    replay: Replay
    kv_bytes: int
    output: Output


def make_step(model: Model, num_seqs: int, new_tokens: int, seq_len: int) -> Step:
    """Return a step over shuffled blocks."""
    per_seq = -(-seq_len // model.block_size)
    num_blocks = num_seqs * per_seq
    kv_layer = torch.randn(
        (num_blocks, 2, model.num_kv_heads, model.block_size, model.head_dim),
        device=DEVICE,
        dtype=model.dtype,
    )
    tables = torch.randperm(num_blocks, device=DEVICE).to(torch.int32).view(num_seqs, per_seq)
    starts = torch.arange(0, (num_seqs + 1) * new_tokens, new_tokens, device=DEVICE, dtype=torch.int32)
    lengths = torch.full((num_seqs,), seq_len, device=DEVICE, dtype=torch.int32)
    position = torch.arange(seq_len - new_tokens, seq_len, device=DEVICE)
    blocks = tables[:, position // model.block_size].long()
    slots = (blocks * model.block_size + position % model.block_size).flatten()
    query = torch.randn(
        (num_seqs * new_tokens, model.num_heads, model.head_dim), device=DEVICE, dtype=model.dtype
    )
    return Step(query, kv_layer, AttentionMetadata(tables, starts, lengths, slots), new_tokens, seq_len)


def ours(model: Model, step: Step) -> Iterator[Contender]:
    """Yield our kernel on blocks of 16 bits, and on blocks of 8."""
    from quire.kernels.triton.attention import paged_attention
    from quire.kernels.triton.blocks import write_kv

    query, kv_layer, metadata, new_tokens, seq_len = step
    num_tokens = step.num_seqs * seq_len

    def attend(kv_layer: torch.Tensor, kv_scales: torch.Tensor | None) -> Attention:
        return lambda: paged_attention(
            query,
            kv_layer,
            *metadata[:3],
            scale=model.scale,
            kv_scales=kv_scales,
            max_new_tokens=new_tokens,
        )

    yield Contender("quire", attend(kv_layer, None), model.kv_bytes(num_tokens))
    slots = torch.arange(kv_layer.shape[0] * model.block_size, device=query.device)
    key, value = kv_layer.transpose(0, 1).transpose(2, 3).flatten(1, 2)
    for name, dtype in (("quire e4m3", torch.float8_e4m3fn), ("quire int8", torch.int8)):
        narrow = torch.empty(kv_layer.shape, dtype=dtype, device=query.device)
        scales = torch.empty(kv_layer.shape[:3], dtype=torch.float32, device=query.device)
        write_kv(key, value, narrow, slots, scales)
        yield Contender(name, attend(narrow, scales), model.kv_bytes(num_tokens, dtype))


def contiguous(model: Model, step: Step) -> Iterator[Contender]:
    """Yield torch's flash kernel on contiguous keys and values, which shows the cost of paging."""
    query, keys, values = step.contiguous()
    is_prefill = step.new_tokens == step.seq_len

    def run() -> Output:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, is_causal=is_prefill, scale=model.scale, enable_gqa=True
            )

    yield Contender("contiguous SDPA", run, model.kv_bytes(step.num_seqs * step.seq_len))


def flex(model: Model, step: Step) -> Iterator[Contender]:
    """Yield FlexAttention, compiled, on contiguous keys and values."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, keys, values = step.contiguous()
    cached = step.seq_len - step.new_tokens
    mask = None
    if step.new_tokens > 1:

        def is_seen(_: Any, __: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return q + cached >= k

        mask = create_block_mask(is_seen, None, None, step.new_tokens, step.seq_len, device=DEVICE)
    # Each shape is compiled by itself, and after eight of them torch would no longer compile.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> Output:
        output: Output = compiled(query, keys, values, block_mask=mask, scale=model.scale, enable_gqa=True)
        return output

    yield Contender("FlexAttention", run, model.kv_bytes(step.num_seqs * step.seq_len))


def flashinfer(model: Model, step: Step) -> Iterator[Contender]:
    """Yield FlashInfer's paged kernels on the same blocks."""
    library = importlib.import_module("flashinfer")

    query, kv_layer, metadata, new_tokens, seq_len = step
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    per_seq = metadata.block_tables.shape[1]
    indptr = torch.arange(0, (step.num_seqs + 1) * per_seq, per_seq, dtype=torch.int32, device=DEVICE)
    indices = metadata.block_tables.flatten()
    last = torch.full_like(metadata.seq_lens, (seq_len - 1) % model.block_size + 1)
    heads = (model.num_heads, model.num_kv_heads, model.head_dim, model.block_size)
    if new_tokens == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *heads, q_data_type=model.dtype, kv_data_type=model.dtype)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(
            metadata.query_starts, indptr, indices, last, *heads, causal=True, q_data_type=model.dtype
        )
    yield Contender(
        "FlashInfer", lambda: wrapper.run(query, kv_layer), model.kv_bytes(step.num_seqs * seq_len)
    )


SOURCES = (ours, contiguous, flashinfer, flex)


def contenders(model: Model, step: Step) -> Iterator[Measurable]:
    """Yield all implementations that can be imported and run."""
    for source in SOURCES:
        try:
            for name, run, kv_bytes in source(model, step):
                output = run()
                yield Measurable(name, CudaCapture()(run), kv_bytes, output)
        except ImportError:
            continue
        except Exception as error:  # whatever foreign code raises
            if source is ours:
                raise
            # Kernels of others refuse some shapes; that must not end the table.
            print(f"  {source.__name__} cannot: {str(error).splitlines()[0]}", file=sys.stderr)


def seconds(run: Callable[[], object]) -> float:
    """Return the median time on the device, with the L2 cache cleared before each run.

    Give it a CUDA graph's replay: to launch a kernel from Python takes longer than the short ones run.
    """
    from triton.testing import do_bench

    return float(do_bench(run, warmup=50, rep=200, return_mode="median")) / 1e3


def copy_bandwidth() -> float:
    """Return bytes read and written per second by a copy within the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def check(step: Step, first: Output, other: Output, name: str) -> None:
    """Raise an error unless two implementations agree, since the speed of a wrong kernel means nothing."""
    if other.dim() == 4:
        other = other.transpose(1, 2).flatten(0, 1)
    error = (first.float() - other.float()).norm() / first.float().norm()
    limit = 0.08 if "e4m3" in name or "int8" in name else 0.02
    if not error < limit:
        raise AssertionError(f"{name} differs from quire by {error:.3f} in {step.num_seqs} x {step.seq_len}")


def fits(model: Model, num_seqs: int, seq_len: int) -> bool:
    """Return whether the blocks and their copies fit into memory."""
    free, _ = torch.cuda.mem_get_info()
    return NUM_COPIES * model.kv_bytes(num_seqs * seq_len) < free


def decode_rows(model: Model, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Yield the share of the copy bandwidth that decode reaches."""
    for context in CONTEXTS:
        for num_seqs in BATCHES:
            if not fits(model, num_seqs, context):
                print(f"decode  {num_seqs:4} x {context:6}  left out: does not fit into memory")
                continue
            step = make_step(model, num_seqs, 1, context)
            reference: Output | None = None
            for name, replay, kv_bytes, output in contenders(model, step):
                reference = output if reference is None else reference
                check(step, reference, output, name)
                time = seconds(replay)
                share = kv_bytes / time / bandwidth
                print(
                    f"decode  {num_seqs:4} x {context:6}  {name:16} {time * 1e6:10.1f} us "
                    f"{kv_bytes / time / GIGA:8.0f} GB/s {share:7.1%} of a copy"
                )
                shape = {"kind": "decode", "batch": num_seqs, "tokens": context, "name": name}
                yield shape | {"microseconds": round(time * 1e6, 1), "share": round(share, 4)}
            del step
            gc.collect()
            torch.cuda.empty_cache()


def prefill_rows(model: Model) -> Iterator[dict[str, Any]]:
    """Yield the arithmetic throughput of prefill, of whole prompts and of chunks behind a cached prefix."""
    shapes = [(*prompt, 0) for prompt in PROMPTS] + [(8, 512, 3584), (16, 64, 4032)]
    for num_seqs, new_tokens, cached in shapes:
        seq_len = cached + new_tokens
        if not fits(model, num_seqs, seq_len):
            print(f"prefill {num_seqs:4} x {cached}+{new_tokens}  left out: does not fit into memory")
            continue
        step = make_step(model, num_seqs, new_tokens, seq_len)
        pairs = num_seqs * (new_tokens * cached + new_tokens * (new_tokens + 1) / 2)
        work = 4 * pairs * model.num_heads * model.head_dim
        reference: Output | None = None
        for name, replay, _, output in contenders(model, step):
            if cached and name == "contiguous SDPA":
                continue  # Its causal mask starts at the first key.
            reference = output if reference is None else reference
            check(step, reference, output, name)
            time = seconds(replay)
            print(
                f"prefill {num_seqs:4} x {f'{cached}+{new_tokens}':>10}  {name:16} {time * 1e6:10.1f} us "
                f"{work / time / TERA:8.1f} TFLOP/s"
            )
            shape = {
                "kind": "prefill",
                "batch": num_seqs,
                "tokens": new_tokens,
                "cached": cached,
                "name": name,
            }
            yield shape | {"microseconds": round(time * 1e6, 1), "teraflops": round(work / time / TERA, 1)}
        del step
        gc.collect()
        torch.cuda.empty_cache()


def copy_rows(model: Model, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Yield the share of the copy bandwidth that copies of whole blocks reach."""
    from quire.kernels.triton.blocks import copy_blocks, gather_blocks, scatter_blocks

    for num_layers in (1, 32):
        shape = (8192 // num_layers, num_layers, 2, model.num_kv_heads, model.block_size, model.head_dim)
        memory = torch.randn(shape, device=DEVICE, dtype=model.dtype)
        pairs = torch.randperm(shape[0], device=DEVICE).view(-1, 2)
        ids = pairs[:, 0].contiguous()
        staging = torch.empty_like(memory[: len(ids)])
        kernels: dict[str, Callable[[], None]] = {
            "copy_blocks": partial(copy_blocks, memory, pairs),
            "gather_blocks": partial(gather_blocks, memory, ids, staging),
            "scatter_blocks": partial(scatter_blocks, staging, ids, memory),
        }
        for name, run in kernels.items():
            time = seconds(CudaCapture()(run))
            share = 2 * staging.numel() * staging.itemsize / time / bandwidth
            print(
                f"copy    {len(ids):4} blocks of {num_layers:2} layers  {name:16} {time * 1e6:10.1f} us "
                f"{share:7.1%} of a copy"
            )
            yield {"kind": "copy", "layers": num_layers, "name": name, "share": round(share, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device, and torch sees none: run it on a machine with a GPU.")
    torch.manual_seed(0)
    model = Model(
        arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.block_size, torch.bfloat16
    )
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, {model}")
    rows = [*decode_rows(model, bandwidth), *prefill_rows(model), *copy_rows(model, bandwidth)]
    flash = max(
        (row["teraflops"] for row in rows if row["name"] == "contiguous SDPA" and row["kind"] == "prefill"),
        default=math.nan,
    )
    print(
        f"ceiling: a device copy moves {bandwidth / GIGA:.0f} GB/s, "
        f"contiguous SDPA reaches {flash:.1f} TFLOP/s"
    )
    result = {
        "benchmark": "kernels_gpu",
        "device": torch.cuda.get_device_name(),
        "model": {**model._asdict(), "dtype": str(model.dtype)},
        "copy_bytes_per_second": bandwidth,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
