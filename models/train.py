"""Train the demo model on a CPU, from few notes to many.

python -m quire.models.train --out models/demo --checkpoints /tmp/demo-checkpoints
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

from quire.models.batches import Batch, Batches
from quire.models.curriculum import STAGES, Progress
from quire.models.export import export
from quire.models.initial_model import make_model
from quire.models.notes import HELD_OUT_SEEDS


def make_optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    inner = [value for value in model.model.layers.parameters() if value.dim() == 2]
    outer = [model.model.embed_tokens.weight, *(value for value in model.parameters() if value.dim() == 1)]
    return [
        torch.optim.Muon(inner, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
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
    value_loss = losses[batch.is_value].mean().item()
    right = (logits.argmax(-1) == batch.targets)[batch.is_value].float().mean().item()
    return (losses * batch.weights).sum() / batch.weights.sum(), value_loss, right


class Run:
    """A training run: model, optimizers and progress.

    Args:
        arguments: the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(arguments.seed)
        self._arguments = arguments
        tokenizer = Tokenizer.from_file(str(arguments.out / "tokenizer.json"))
        self._batches = Batches(tokenizer, plain=arguments.plain, unknown=arguments.unknown)
        self.model = make_model(tokenizer)
        self._optimizers = make_optimizers(self.model, arguments.rate)
        self.progress = Progress()
        if arguments.resume:
            self._resume(arguments.resume)

    @property
    def finished(self) -> bool:
        """Whether the run has made its steps or used up its time."""
        return self._share_done() >= 1.0

    def steps(self) -> Iterator[Progress]:
        """Train until finished, and yield the progress after each step."""
        arguments, progress = self._arguments, self.progress
        rng = Random(arguments.seed + progress.step)
        started = perf_counter() - progress.seconds
        saved_at = progress.seconds
        while not self.finished:
            self._step(rng)
            progress.seconds = perf_counter() - started
            yield progress
            if self.finished or progress.seconds - saved_at > 60 * arguments.save_every:
                saved_at = progress.seconds
                self.save()

    def save(self) -> None:
        """Write a checkpoint to resume from, and the exported model."""
        folder: Path = self._arguments.checkpoints
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "progress": asdict(self.progress),
        }
        torch.save(state, folder / "last.tmp")
        os.replace(folder / "last.tmp", folder / "last.pt")
        if self._arguments.export:
            export(self.model, self._arguments.out)

    def _step(self, rng: Random) -> None:
        """Make one step on a fresh batch."""
        rate = self._rate()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        stage = self.progress.choose(rng)
        batch = self._batches.draw(
            Random(rng.randrange(HELD_OUT_SEEDS)), STAGES[stage], self._arguments.batch
        )
        loss, value_loss, right = loss_and_accuracy(self.model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress.tokens += batch.inputs.numel()
        self.progress.record(stage, value_loss, right)

    def _share_done(self) -> float:
        """Share of the run that is over, by steps or by time, whichever is more."""
        arguments, progress = self._arguments, self.progress
        return float(max(progress.step / arguments.steps, progress.seconds / (60.0 * arguments.minutes)))

    def _rate(self) -> float:
        """Learning rate: a warm-up, a plateau, and a linear fall to zero over the last share of the run."""
        arguments = self._arguments
        warm = min(1.0, (self.progress.step + 1) / arguments.warmup)
        falling = min(1.0, (1.0 - self._share_done()) / arguments.decay)
        return float(arguments.rate * warm * falling)

    def _resume(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])


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
    parser.add_argument(
        "--export", action=argparse.BooleanOptionalAction, default=True, help="write to --out"
    )
    parser.add_argument("--steps", type=int, default=4000, help="of the whole run")
    parser.add_argument("--minutes", type=float, default=60.0, help="limit of the whole run")
    parser.add_argument("--save-every", type=float, default=5.0, help="minutes between checkpoints")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--seed", type=int, default=1, help="of weights and conversations")
    parser.add_argument("--batch", type=int, default=4096, help="tokens a step")
    parser.add_argument("--rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=50, help="steps to reach it")
    parser.add_argument("--decay", type=float, default=0.3, help="share of the run over which it falls")
    parser.add_argument(
        "--plain", type=float, default=0.4, help="share of conversations in the simplest form"
    )
    parser.add_argument("--unknown", type=float, default=0.08, help="share of questions about unknown items")
    return parser.parse_args()


def main() -> None:
    """Train, and print a line now and then."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    run = Run(arguments)
    print(f"{sum(value.numel() for value in run.model.parameters()):,} parameters", flush=True)
    printed = 0.0
    for progress in run.steps():
        if run.finished or progress.seconds - printed >= 10:
            printed = progress.seconds
            print(progress, flush=True)


if __name__ == "__main__":
    main()
