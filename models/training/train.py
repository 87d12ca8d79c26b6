"""Train the demo model on a CPU, from few notes to many.

python -m quire.models.training.train --out models/demo
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaForCausalLM

from quire.models.notes import HELD_OUT_SEEDS
from quire.models.source import demo_model_path
from quire.models.training.batches import Batch, Batches
from quire.models.training.curriculum import STAGES, Progress
from quire.models.training.initial_model import make_model


def make_optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for the embedding and the norms."""
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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a training run.

    Attributes:
        out: folder with the tokenizer, to which the model is exported.
        checkpoints: folder for checkpoints.
        resume: checkpoint to continue from.
        export: whether to write the model to ``out``.
        steps: number of steps of the whole run.
        minutes: time limit of the whole run.
        save_every: minutes between checkpoints.
        threads: number of torch's threads.
        seed: seed of weights and conversations.
        batch: tokens per step.
        rate: highest learning rate.
        warmup: steps until the learning rate reaches ``rate``.
        decay: share of the run over which the learning rate falls to zero.
        plain: share of conversations in the simplest form.
        unknown: share of questions about unknown items, in the other conversations.
    """

    out: Path = field(default_factory=demo_model_path)
    checkpoints: Path = Path("checkpoints")
    resume: Path | None = None
    export: bool = True
    steps: int = 3550
    minutes: float = 60.0
    save_every: float = 5.0
    threads: int = 2
    seed: int = 1
    batch: int = 4096
    rate: float = 4e-3
    warmup: int = 50
    decay: float = 0.6
    plain: float = 0.4
    unknown: float = 0.08

    def share_done(self, progress: Progress) -> float:
        """Return the share of the run that is done, by steps or by time, whichever is larger."""
        return max(progress.step / self.steps, progress.seconds / (60.0 * self.minutes))

    def rate_at(self, progress: Progress) -> float:
        """Return the learning rate of the next step: a warm-up, a plateau, then a linear fall to zero."""
        warm = min(1.0, (progress.step + 1) / self.warmup)
        falling = min(1.0, (1.0 - self.share_done(progress)) / self.decay)
        return self.rate * warm * falling


class Run:
    """A training run: model, optimizers and progress."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self._settings = settings
        tokenizer = Tokenizer.from_file(str(settings.out / "tokenizer.json"))
        self._batches = Batches(tokenizer, plain=settings.plain, unknown=settings.unknown)
        self.model = make_model(tokenizer)
        self._optimizers = make_optimizers(self.model, settings.rate)
        self.progress = Progress()
        if settings.resume:
            self._resume(settings.resume)

    @property
    def finished(self) -> bool:
        """Whether the run has made its steps or used up its time."""
        return self._settings.share_done(self.progress) >= 1.0

    def steps(self) -> Iterator[Progress]:
        """Train until finished, and yield the progress after each step."""
        progress = self.progress
        started = perf_counter() - progress.seconds
        saved_at = progress.seconds
        while not self.finished:
            self._step()
            progress.seconds = perf_counter() - started
            yield progress
            if self.finished or progress.seconds - saved_at > 60.0 * self._settings.save_every:
                saved_at = progress.seconds
                self.save()

    def save(self) -> None:
        """Write a checkpoint to resume from, and the exported model."""
        folder = self._settings.checkpoints
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "progress": asdict(self.progress),
        }
        torch.save(state, folder / "last.tmp")
        os.replace(folder / "last.tmp", folder / "last.pt")
        if self._settings.export:
            export_model(self.model, self._settings.out)

    def _step(self) -> None:
        """Make one step on a fresh batch.

        Seed and step number determine it, so a resumed run has the same.
        """
        settings, progress = self._settings, self.progress
        rate = settings.rate_at(progress)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        rng = Random(f"{settings.seed} {progress.step}")
        stage = progress.choose(rng)
        batch = self._batches.draw(Random(rng.randrange(HELD_OUT_SEEDS)), STAGES[stage], settings.batch)
        loss, value_loss, right = loss_and_accuracy(self.model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        progress.tokens += batch.inputs.numel()
        progress.record(stage, value_loss, right)

    def _resume(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])


def export_model(model: LlamaForCausalLM, out: Path) -> None:
    """Write a Hugging Face checkpoint in bfloat16 to the folder of the tokenizer, each file atomically."""
    config = model.config
    rounded = deepcopy(model).to(torch.bfloat16)
    rounded.config.dtype = torch.bfloat16
    rounded.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=False,
    )
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as folder:
        rounded.save_pretrained(folder)
        for path in Path(folder).iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def parse() -> Settings:
    """Read the command line, which has an option for each setting."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{Settings.__doc__}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in asdict(Settings()).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(flag, type=Path if default is None else type(default), default=default)
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    """Train, and print the progress regularly."""
    settings = parse()
    torch.set_num_threads(settings.threads)
    run = Run(settings)
    print(f"{sum(value.numel() for value in run.model.parameters()):,} parameters", flush=True)
    printed = 0.0
    for progress in run.steps():
        if run.finished or progress.seconds - printed >= 10:
            printed = progress.seconds
            print(progress, flush=True)


if __name__ == "__main__":
    main()
