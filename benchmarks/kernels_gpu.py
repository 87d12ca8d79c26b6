"""Compares the GPU kernels with the limits of the device and with attention over contiguous tensors.

    python -m quire.benchmarks.kernels_gpu --heads 32 --kv-heads 8 --head-dim 128 --block-size 16

Decode reads each key and value once and computes little, so its ceiling is the bandwidth of a device copy,
which is measured too. The ceiling of prefill is the flash kernel of scaled dot product attention, with the
same shape, over contiguous keys and values.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.benchmarks.harness.program import CannotRunError, Report, program
from quire.benchmarks.harness.rounds import show_progress
from quire.benchmarks.harness.tables import table
from quire.engine.model.decode_graphs import CudaCapture
from quire.kernels.metadata import AttentionMetadata

DEVICE = torch.device("cuda")
GIGA = 1e9
TERA = 1e12
BATCHES = (1, 8, 64, 256)
CONTEXTS = (512, 4096, 32768)
PROMPTS = ((1, 2048), (8, 2048), (1, 16384))
NUM_COPIES = 5
"""Number of copies of all keys and values in memory: 16-bit blocks, 8-bit blocks, and contiguous ones."""

Attention = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16


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

    def narrow_blocks(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same blocks in 8 bits, and their scales."""
        from quire.kernels.triton.blocks import write_kv

        num_blocks, _, _, block_size, _ = self.kv_layer.shape
        narrow = torch.empty(self.kv_layer.shape, dtype=dtype, device=DEVICE)
        scales = torch.empty(narrow.shape[:3], dtype=torch.float32, device=DEVICE)
        key, value = self.kv_layer.transpose(0, 1).transpose(2, 3).flatten(1, 2)
        write_kv(key, value, narrow, torch.arange(num_blocks * block_size, device=DEVICE), scales)
        return narrow, scales


class Contender(NamedTuple):
    """One implementation of a step, and the bytes of keys and values that it reads."""

    name: str
    run: Attention
    kv_bytes: int


class Row(NamedTuple):
    """The time of one implementation. ``share`` is its share of a copy's bandwidth, and None for prefill."""

    kind: str
    batch: int
    tokens: int
    cached: int
    name: str
    microseconds: float
    share: float | None = None
    teraflops: float | None = None


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


def contenders(model: Model, step: Step) -> Iterator[Contender]:
    """Yield our kernel on blocks of 16 and of 8 bits, and torch's flash kernel on contiguous tensors."""
    from quire.kernels.triton.attention import paged_attention

    num_tokens = step.num_seqs * step.seq_len
    ours = partial(
        paged_attention,
        step.query,
        scale=model.scale,
        max_new_tokens=step.new_tokens,
        block_tables=step.metadata.block_tables,
        query_starts=step.metadata.query_starts,
        seq_lens=step.metadata.seq_lens,
    )
    yield Contender("quire", partial(ours, step.kv_layer), model.kv_bytes(num_tokens))
    for name, dtype in (("quire e4m3", torch.float8_e4m3fn), ("quire int8", torch.int8)):
        narrow, scales = step.narrow_blocks(dtype)
        yield Contender(name, partial(ours, narrow, kv_scales=scales), model.kv_bytes(num_tokens, dtype))
    if step.new_tokens in (1, step.seq_len):  # torch's causal mask starts at the first key
        yield Contender("contiguous SDPA", contiguous(model, step), model.kv_bytes(num_tokens))


def contiguous(model: Model, step: Step) -> Attention:
    """Return torch's flash kernel on contiguous keys and values, which shows the cost of paging."""
    query, keys, values = step.contiguous()
    is_causal = step.new_tokens > 1

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, is_causal=is_causal, scale=model.scale, enable_gqa=True
            )

    return run


def seconds(run: Callable[[], object], milliseconds: int = 200) -> float:
    """Return the median time on the device of runs that take so long together.

    The L2 cache is cleared before each run.
    Pass the replay of a CUDA graph, since launching a kernel from Python takes longer than short kernels run.
    """
    from triton.testing import do_bench

    return float(do_bench(run, warmup=milliseconds // 4, rep=milliseconds, return_mode="median")) / 1e3


def gpu_name() -> str:
    """Return the name of the GPU.

    Raises:
        CannotRunError: there is none.
    """
    if not torch.cuda.is_available():
        raise CannotRunError(
            "This benchmark needs a CUDA device, and torch sees none: run it on a machine with a GPU."
        )
    return torch.cuda.get_device_name()


def copy_bandwidth() -> float:
    """Return bytes read and written per second by a copy within the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def check(step: Step, first: torch.Tensor, other: torch.Tensor, name: str) -> None:
    """Raise an error unless two implementations agree, since the speed of a wrong kernel means nothing."""
    if other.dim() == 4:
        other = other.transpose(1, 2).flatten(0, 1)
    error = (first.float() - other.float()).norm() / first.float().norm()
    limit = 0.08 if "e4m3" in name or "int8" in name else 0.02
    if not error < limit:
        raise AssertionError(f"{name} differs from quire by {error:.3f} in {step.num_seqs} x {step.seq_len}")


def measured(model: Model, num_seqs: int, new_tokens: int, seq_len: int) -> Iterator[tuple[Contender, float]]:
    """Yield each implementation of a step, with its seconds; none if the blocks do not fit into memory."""
    if NUM_COPIES * model.kv_bytes(num_seqs * seq_len) > torch.cuda.mem_get_info()[0]:
        show_progress(f"{num_seqs} x {seq_len} is left out: it does not fit into memory")
        return
    step = make_step(model, num_seqs, new_tokens, seq_len)
    first: torch.Tensor | None = None
    for each in contenders(model, step):
        output = each.run()
        first = output if first is None else first
        check(step, first, output, each.name)
        time = seconds(CudaCapture()(each.run))
        show_progress(f"{num_seqs} x {seq_len}, {new_tokens} new: {each.name} {time * 1e6:.1f} us")
        yield each, time
    del step
    gc.collect()
    torch.cuda.empty_cache()


def decode_rows(model: Model, bandwidth: float) -> Iterator[Row]:
    """Yield the share of the copy bandwidth that decode reaches."""
    for context, num_seqs in product(CONTEXTS, BATCHES):
        for each, time in measured(model, num_seqs, 1, context):
            share = each.kv_bytes / time / bandwidth
            yield Row("decode", num_seqs, context, 0, each.name, time * 1e6, share=share)


def prefill_rows(model: Model) -> Iterator[Row]:
    """Yield the arithmetic throughput of prefill, of whole prompts and of chunks behind a cached prefix."""
    shapes = [(*prompt, 0) for prompt in PROMPTS] + [(8, 512, 3584), (16, 64, 4032)]
    for num_seqs, new_tokens, cached in shapes:
        pairs = num_seqs * (new_tokens * cached + new_tokens * (new_tokens + 1) / 2)
        work = 4 * pairs * model.num_heads * model.head_dim
        for each, time in measured(model, num_seqs, new_tokens, cached + new_tokens):
            rate = work / time / TERA
            yield Row("prefill", num_seqs, new_tokens, cached, each.name, time * 1e6, teraflops=rate)


def copy_rows(model: Model, bandwidth: float) -> Iterator[Row]:
    """Yield the share of the copy bandwidth that copies of whole blocks reach; ``batch`` counts layers."""
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
            yield Row("copy", num_layers, len(ids) * model.block_size, 0, name, time * 1e6, share=share)


@program
def main(options: Options) -> Report:
    """Measure decode, prefill and copies of blocks."""
    device = gpu_name()
    torch.manual_seed(0)
    model = Model(options.heads, options.kv_heads, options.head_dim, options.block_size, torch.bfloat16)
    bandwidth = copy_bandwidth()
    rows = [*decode_rows(model, bandwidth), *prefill_rows(model), *copy_rows(model, bandwidth)]
    columns = {
        "": "{kind}",
        "batch": "{batch}",
        "cached": "{cached}",
        "tokens": "{tokens}",
        "implementation": "{name}",
        "µs": "{microseconds:.1f}",
        "of a copy": "{share:.1%}",
        "TFLOP/s": "{teraflops:.1f}",
    }
    ceiling = f"ceiling of decode: a device copy moves {bandwidth / GIGA:.0f} GB/s"
    results = {"device": device, "copy_bytes_per_second": bandwidth, "rows": rows}
    return Report([table(f"{device}, {model}", rows, columns), ceiling], results)


if __name__ == "__main__":
    main()
