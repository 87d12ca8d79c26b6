"""A tiny model that calls a known tool once and then says a known sentence, whatever the prompt is.

Agents leave the choice of a tool to the model, so no grammar makes it call one. This model calls it because
of its weights: the next token depends only on the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken

from quire.benchmarks.harness.random_llamas import byte_tokenizer

TEMPLATE = """{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{%- endfor -%}
{%- endfor -%}
{{- '<|call|>' if tools and not messages | selectattr('role', 'equalto', 'tool') | list else '<|say|>' -}}"""


def make_scripted_model(
    folder: Path,
    calls: Mapping[str, Mapping[str, Any]],
    sentence: str,
    *,
    tokenizer: transformers.PreTrainedTokenizerFast | None = None,
) -> Path:
    """Save the model in Hugging Face format and return its folder.

    Args:
        calls: arguments by the name of the tool. The model calls the first of them that the request has. The
            request needs a second tool whose name begins otherwise: where the grammar leaves no choice, the
            model's own token is not offered.
        sentence: what the model says once a tool has answered, or without tools.
        tokenizer: splits the prompts; by default into bytes.
    """
    tokenizer = tokenizer or byte_tokenizer()
    opening = tokenizer.tokenize('\n{"name": "')[-1]
    bodies = [f'{name}", "arguments": {json.dumps(arguments)}}}' for name, arguments in calls.items()]
    tokens = ["<|call|>", "<|say|>", "<tool_call>", "</tool_call>", sentence, *bodies]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    tokenizer.chat_template = TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=131072,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer, embeddings = model.model.layers[0], model.model.embed_tokens.weight.data.normal_()
    logits = model.lm_head.weight.data.zero_()
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        weight.data.zero_()

    def follow(chain: Iterable[str], strength: float = 1.0) -> None:
        for token, following in pairwise(tokenizer.convert_tokens_to_ids(list(chain))):
            logits[following] += strength * embeddings[token]

    follow(["<|say|>", sentence, "<eos>"])
    follow(["<|call|>", "<tool_call>"])
    follow(["</tool_call>", "<eos>"])
    for number, body in enumerate(bodies):
        follow([opening, body], 1 - 0.02 * number)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
