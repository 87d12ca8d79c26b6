"""Trains the demo model on a CPU, from few notes to many, in 40 minutes with 2 threads.

python -m quire.models.training.train --out models/demo
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from torch.nn import functional
from transformers import GenerationConfig, LlamaForCausalLM

from quire.models.notes import HELD_OUT_SEEDS
from quire.models.training.batches import Batch, Batches, Stage
from quire.models.training.initial_model import make_model
from quire.models.training.tokenizer import make_tokenizer, save_tokenizer

STAGES = (
    Stage(4, 32, is_recital=True),
    Stage(16, 64, is_recital=True),
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
"""The stages in order; the next one opens when the hardest open stage is nearly solved."""
ADVANCE_AT = 0.95
"""Running accuracy of the values at the hardest open stage at which the next stage opens."""

SEED = 1
STEPS = 3550
TOKENS_OF_A_STEP = 4096
RATE = 4e-3
"""Highest learning rate."""
WARM_UP = 50
"""Steps until the learning rate reaches ``RATE``."""
DECAY = 0.6
"""Share of the run over which the learning rate falls to zero."""


class Curriculum:
    """The progress through the stages.

    Attributes:
        hardest: index of the hardest open stage.
        accuracy: running share of values predicted right at each stage, given the right tokens before them.
    """

    def __init__(self) -> None:
        self.hardest = 0
        self.accuracy = [0.0] * len(STAGES)

    def choose(self, rng: Random) -> int:
        """Return the stage of the next batch: half the time the hardest open one, until all are solved."""
        share = 0.5 if self.accuracy[self.hardest] < ADVANCE_AT else 0.1
        return self.hardest if rng.random() < share else rng.randint(0, self.hardest)

    def record(self, stage: int, accuracy: float) -> None:
        """Record one step at a stage, and open the next stage if the accuracy suffices."""
        self.accuracy[stage] = 0.9 * self.accuracy[stage] + 0.1 * accuracy
        if stage == self.hardest and self.accuracy[stage] >= ADVANCE_AT and stage + 1 < len(STAGES):
            self.hardest += 1


def learning_rate(step: int, num_steps: int) -> float:
    """Return the learning rate of a step: a warm-up, a plateau, then a linear fall to zero."""
    return RATE * min(1.0, (step + 1) / WARM_UP) * min(1.0, (1.0 - step / num_steps) / DECAY)


def loss_and_accuracy(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, float]:
    """Return the weighted mean loss of a batch, and the share of values predicted right."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[batch.positions])
    losses = functional.cross_entropy(logits.float(), batch.targets, reduction="none")
    right = (logits.argmax(-1) == batch.targets)[batch.is_value].float().mean().item()
    return (losses * batch.weights).sum() / batch.weights.sum(), right


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for the embedding and the norms."""
    inner = [value for value in model.model.layers.parameters() if value.dim() == 2]
    outer = [model.model.embed_tokens.weight, *(value for value in model.parameters() if value.dim() == 1)]
    return [
        torch.optim.Muon(inner, lr=RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(out: Path, num_steps: int = STEPS, num_tokens: int = TOKENS_OF_A_STEP) -> LlamaForCausalLM:
    """Make the tokenizer, train a model, and write both to a folder; the weights are rounded to bfloat16.

    The stage and the batch of a step depend on nothing but its number and the accuracies before it.
    """
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    save_tokenizer(tokenizer, out)
    batches, curriculum = Batches(tokenizer), Curriculum()
    model = make_model(tokenizer)
    optimizers = make_optimizers(model)
    for step in range(num_steps):
        rng = Random(f"{SEED} {step}")
        stage = curriculum.choose(rng)
        batch = batches.draw(Random(rng.randrange(HELD_OUT_SEEDS)), STAGES[stage], num_tokens)
        loss, accuracy = loss_and_accuracy(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(step, num_steps)
            optimizer.step()
            optimizer.zero_grad()
        curriculum.record(stage, accuracy)
        if step % 10 == 0:
            accuracies = " ".join(f"{each:.1%}" for each in curriculum.accuracy[: curriculum.hardest + 1])
            print(f"step {step} of {num_steps}, values right by stage: {accuracies}", flush=True)
    export(model, out)
    return model


def export(model: LlamaForCausalLM, out: Path) -> None:
    """Write a Hugging Face checkpoint in bfloat16."""
    config = model.config
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(out)


def main() -> None:
    """Train the model."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.out)


if __name__ == "__main__":
    main()
