"""Makes the demo model's tokenizer: byte-level BPE in which each word of the language is one token."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.models.notes import ATTRIBUTES, ITEMS, QUESTIONS, VALUES, Note, answer_unknown
from quire.models.training.conversations import FILLERS, NOTED, SMALL_TALK

BOS = "<|bos|>"
END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (BOS, END, PAD, *(f"<|{role}|>" for role in ROLES))

CONTEXT = 4096
"""Number of positions that the model is configured for."""

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- if tools -%}"
    "{{- '<|system|>call a tool by <tool_call>{name, arguments}</tool_call>: ' -}}"
    "{{- tools | tojson ~ '<|end|>' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('unknown role: ' ~ message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' ~ ('user' if message['role'] == 'tool' else message['role']) ~ '|>' -}}"
    "{{- message['content'] | default('', true) | trim -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '\\n<tool_call>\\n' ~ call['function'] | tojson ~ '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""The chat template. A turn costs two tokens in addition to its text, and nothing is between turns. The model
was not trained to call tools: it calls one only if its answer must be a call."""


def corpus() -> list[str]:
    """Return texts that contain each word of the language the same number of times."""
    sentences = [
        *(str(Note("code", item, 100)) for item in ITEMS),
        *(str(Note(attribute, "anchor", 100)) for attribute in ATTRIBUTES),
        *(wording.format(attribute="code", item="anchor") for wording in QUESTIONS),
        *FILLERS,
        *SMALL_TALK,
        *SMALL_TALK.values(),
        NOTED,
        answer_unknown("code", "anchor"),
    ]
    words = {word for sentence in sentences for word in re.findall(r"\w+", sentence)}
    variants = {form for word in words if word.isalpha() for form in (word, f" {word}")}
    # A sentence may begin with these words, within a text or at its start.
    variants |= {form for word in ("The", "What", "Tell", "Please") for form in (word, f" {word}")}
    # An item never begins a message, so its form without a space is left out to keep the vocabulary small.
    variants -= {*ITEMS, *ATTRIBUTES}
    return [*sorted(variants), *(f" {value}" for value in VALUES)]


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer whose merges make each word of the corpus one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer in Hugging Face format."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": END, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        **special,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (("tokenizer_config", config), ("special_tokens_map", special)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
