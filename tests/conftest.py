"""A tiny tokenizer, the settings of the property tests, and signal handlers as Python sets them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import settings
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from quire.tokenization.tokenizer import Tokenizer

# A busy machine makes an example slow, which is no defect.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

VOCAB_SIZE = 320
TEMPLATE = """{{ bos_token }}{% for message in messages %}
<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, and undo what a command that runs in this process sets."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that holds a byte-level BPE tokenizer: <s> is 0, </s> is 1."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, stop here and say the end"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)
