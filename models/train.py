"""Train the demo model on a CPU, from few notes to many.

python -m quire.models.train --minutes 60 --threads 2 --out models/demo --checkpoints /tmp/demo-train
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from quire.models.batches import Batch, Batches, Stage
from quire.models.notes import HELD_OUT_SEEDS
from quire.models.train_tokenizer import BOS, CONTEXT, END, PAD

STAGES = (
    Stage(4, 32, recital=True),
    Stage(16, 64, recital=True),
    Stage(3, 6),
    Stage(6, 9),
    Stage(12, 12),
    Stage(20, 20),
    Stage(32, 24),
    Stage(50, 30),
    Stage(75, 36),
    Stage(100, 40),
    Stage(130, 44),
    Stage(180, 60),
    Stage(240, 85),
)
"""The curriculum. The next stage opens when the hardest open one is nearly solved."""

ADVANCE_AT = 0.95
"""Running accuracy of the values at the hardest open stage that opens the next one."""


@dataclass
class Progress:
    """Where a run stands, apart from weights and optimizer states."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stage: int = 0
    accuracy: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))
    loss: list[float] = field(default_factory=lambda: [math.log(900.0)] * len(STAGES))

    def record(self, stage: int, loss: float, accuracy: float, keep: float = 0.9) -> None:
        """Count one step at a stage, and open the next stage if it is time."""
        self.step += 1
        self.accuracy[stage] = keep * self.accuracy[stage] + (1 - keep) * accuracy
        self.loss[stage] = keep * self.loss[stage] + (1 - keep) * loss
        if stage == self.stage and self.accuracy[stage] >= ADVANCE_AT and stage + 1 < len(STAGES):
            self.stage += 1

    def choose(self, rng: Random) -> int:
        """Choose the stage of the next batch: half the time the hardest open one, until all are solved."""
        hard = 0.5 if self.accuracy[self.stage] < ADVANCE_AT else 0.1
        return self.stage if rng.random() < hard else rng.randint(0, self.stage)


def make_model(tokenizer: Tokenizer, arguments: argparse.Namespace) -> LlamaForCausalLM:
    """Make an untrained model."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=arguments.width,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": arguments.theta},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=arguments.init,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    model = LlamaForCausalLM(config)
    # Wide enough that a copied token stands out among the logits from the start.
    embedding = model.model.embed_tokens.weight
    torch.nn.init.normal_(embedding, std=arguments.embedding_init)
    for layer in model.model.layers:
        start_as_lookup(layer.self_attn, arguments.head_dim)
    if arguments.look_back:
        start_with_look_back(model)
    return model


@torch.no_grad()
def start_with_look_back(model: LlamaForCausalLM) -> None:
    """Let the first layer's heads begin by looking one and two tokens back, whatever the tokens are.

    A note is found by its item but its value stands two tokens later, so the value must first learn which item it
    belongs to. All embeddings get a common part; the queries and keys of the first layer see nothing else, in the
    fastest rotary pairs, turned so that they agree at the wanted distance.
    """
    config = model.config
    width, half = config.hidden_size, config.head_dim // 2
    embedding = model.model.embed_tokens.weight
    common = torch.nn.functional.normalize(torch.randn(width), dim=0)
    embedding -= torch.outer(embedding @ common, common)
    embedding += common * embedding.norm(dim=1).mean()
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    fast = 3
    attention = model.model.layers[0].self_attn
    keys = attention.k_proj.weight.unflatten(0, (-1, config.head_dim))
    queries = attention.q_proj.weight.unflatten(0, (-1, config.head_dim))
    keys *= 0.1
    queries *= 0.1
    for key in keys:
        key[:fast] += common * 0.8
    for index, query in enumerate(queries):
        # A query at position p meets a key at p - back when both are turned to the same angle.
        angles = -frequencies[:fast] * (1 + index % 2)
        query[:fast] += torch.outer(angles.cos(), common) * 0.8
        query[half : half + fast] += torch.outer(angles.sin(), common) * 0.8


@torch.no_grad()
def start_as_lookup(attention: LlamaAttention, head_dim: int) -> None:
    """Let attention begin by finding tokens like the present one and copying what it finds.

    Queries start equal to keys, and the output projection as the transpose of the values. From random weights
    both have to be found by chance before either is of use, which costs most of the training.
    """
    keys = attention.k_proj.weight.unflatten(0, (-1, head_dim))
    values = attention.v_proj.weight.unflatten(0, (-1, head_dim))
    for head in (*keys, *values):
        torch.nn.init.orthogonal_(head)
    groups = attention.num_key_value_groups
    attention.q_proj.weight.copy_(keys.repeat_interleave(groups, 0).flatten(0, 1))
    attention.o_proj.weight.copy_(values.repeat_interleave(groups, 0).flatten(0, 1).T / (4 * groups))


def make_optimizers(model: LlamaForCausalLM, arguments: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    inner = [value for name, value in model.named_parameters() if value.dim() == 2 and "embed" not in name]
    outer = [value for name, value in model.named_parameters() if value.dim() < 2 or "embed" in name]
    betas = (0.9, 0.95)
    if not arguments.muon:
        return [torch.optim.AdamW([*inner, *outer], lr=arguments.lr, betas=betas, weight_decay=0.01)]
    return [
        torch.optim.Muon(
            inner, lr=arguments.muon_lr, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(outer, lr=arguments.lr, betas=betas, weight_decay=0.0),
    ]


def loss_and_accuracy(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, float, float]:
    """Run the model over a batch.

    Returns:
        The weighted mean loss, the mean loss of the values in nats, and the share of values predicted right.
    """
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[batch.positions])
    losses = functional.cross_entropy(logits.float(), batch.targets, reduction="none")
    with torch.no_grad():
        right = (logits.argmax(-1) == batch.targets)[batch.is_value].float().mean().item()
        value_loss = losses[batch.is_value].mean().item()
    return (losses * batch.weights).sum() / batch.weights.sum(), value_loss, right


def learning_rate(progress: Progress, arguments: argparse.Namespace) -> float:
    """Factor on the peak rate: a warm-up, a plateau, and a linear fall to zero over the last share of the run."""
    warm = min(1.0, (progress.step + 1) / arguments.warmup)
    left = 1.0 - max(progress.step / arguments.steps, progress.seconds / (60.0 * arguments.minutes))
    return float(warm * min(1.0, max(0.0, left / arguments.decay)))


def finished(progress: Progress, arguments: argparse.Namespace) -> bool:
    """Whether the run has made its steps or used up its time."""
    return bool(progress.step >= arguments.steps or progress.seconds >= 60.0 * arguments.minutes)


def export(model: LlamaForCausalLM, out: Path) -> None:
    """Write the model in bfloat16 beside its tokenizer, each file replaced at once."""
    fresh = out.parent / f".{out.name}-{os.getpid()}"
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.tie_weights()
    copy.to(torch.bfloat16)
    copy.config.dtype = torch.bfloat16
    copy.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    )
    copy.save_pretrained(fresh)
    out.mkdir(parents=True, exist_ok=True)
    for path in fresh.iterdir():
        path.chmod(0o644)
        os.replace(path, out / path.name)
    shutil.rmtree(fresh)


def train(arguments: argparse.Namespace) -> Iterator[Progress]:
    """Train until the time is over, and yield the progress after each step."""
    torch.manual_seed(arguments.seed)
    rng = Random(arguments.seed)
    tokenizer = Tokenizer.from_file(str(arguments.out / "tokenizer.json"))
    batches = Batches(tokenizer, plain=arguments.plain, unknown=arguments.unknown)
    model = make_model(tokenizer, arguments)
    optimizers = make_optimizers(model, arguments)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    progress = Progress()
    if arguments.resume:
        state: dict[str, Any] = torch.load(arguments.resume, weights_only=True)
        model.load_state_dict(state["model"])
        progress = Progress(**state["progress"])
        if not arguments.fresh_optimizer:
            for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        progress.seconds = 0.0
        rng = Random(arguments.seed + progress.step)
    print(f"{sum(value.numel() for value in model.parameters()):,} parameters", flush=True)

    saved_at = progress.seconds
    started = time.perf_counter() - progress.seconds
    while not finished(progress, arguments):
        factor = learning_rate(progress, arguments)
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        stage = progress.choose(rng)
        batch = batches.draw(Random(rng.randrange(HELD_OUT_SEEDS)), STAGES[stage], arguments.batch)
        loss, value_loss, right = loss_and_accuracy(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        progress.tokens += batch.inputs.numel()
        progress.record(stage, value_loss, right)
        progress.seconds = time.perf_counter() - started
        yield progress
        if (
            progress.seconds - saved_at > 60 * arguments.save_every
            or progress.seconds > 60 * arguments.minutes
        ):
            saved_at = progress.seconds
            save(arguments.checkpoints, model, optimizers, progress)
            if arguments.export:
                export(model, arguments.out)


def save(
    folder: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], progress: Progress
) -> None:
    """Write a checkpoint to resume from."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    torch.save(state, folder / "last.tmp")
    os.replace(folder / "last.tmp", folder / "last.pt")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    demo = Path(__file__).parent / "demo"
    parser.add_argument("--out", type=Path, default=demo, help="folder with the tokenizer, to export to")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("checkpoints"), help="folder for checkpoints"
    )
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--fresh-optimizer", action="store_true", help="resume the weights alone")
    parser.add_argument("--export", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=90.0, help="limit, whatever the steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every", type=float, default=5.0, help="minutes between checkpoints")
    parser.add_argument("--batch", type=int, default=4096, help="tokens a step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--theta", type=float, default=1e6)
    parser.add_argument("--init", type=float, default=0.02)
    parser.add_argument("--embedding-init", type=float, default=0.06)
    parser.add_argument("--look-back", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--muon", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=50, help="steps")
    parser.add_argument(
        "--decay", type=float, default=0.3, help="share of the time over which the rate falls"
    )
    parser.add_argument(
        "--plain", type=float, default=0.4, help="share of conversations in the simplest form"
    )
    parser.add_argument("--unknown", type=float, default=0.08, help="share of questions about unknown items")
    return parser.parse_args()


def main() -> None:
    """Train and print a line now and then."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    printed = 0.0
    for progress in train(arguments):
        if progress.seconds - printed >= 10:
            printed = progress.seconds
            accuracies = " ".join(
                f"{'r' * stage.recital}{stage.facts}:{100 * accuracy:.1f}%"
                for stage, accuracy in zip(STAGES[: progress.stage + 1], progress.accuracy, strict=False)
            )
            print(
                f"{progress.seconds / 60:6.1f} min  step {progress.step:6}  {progress.tokens / 1e6:7.2f} M tokens"
                f"  {progress.tokens / progress.seconds / 1000:5.1f} k/s  loss {progress.loss[progress.stage]:.4f}"
                f"  {accuracies}",
                flush=True,
            )


if __name__ == "__main__":
    main()
