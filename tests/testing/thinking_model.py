"""A chat template in the format of Qwen 3: reasoning in ``<think>``, calls as JSON in ``<tool_call>``.

The demo model with it reasons and calls tools as soon as a grammar makes it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

END_TOKEN, END_ID = "<|pad|>", 2
"""Token of the demo model that is ``</think>`` in a stack. A bias makes the model end its reasoning."""

TEMPLATE = """{%- if tools -%}{{ tools | tojson }}<tool_call>
{"name": ..., "arguments": ...}
</tool_call>{%- endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.reasoning_content or '' }}{{ message.content }}
{%- for call in message.tool_calls or [] -%}{{ call.id }}{{ call.function.arguments | tojson }}{%- endfor -%}
{%- endfor -%}
<|assistant|>
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- elif thinks or enable_thinking -%}{{ '<think>\\n' }}{%- endif -%}"""


def copy_with_thinking(model: Path, folder: Path, *, end_token: str | None = None) -> Path:
    """Copy a model, let it have this template, and return its folder.

    Args:
        end_token: a token of the model that is ``</think>`` instead.
    """
    shutil.copytree(model, folder)
    if end_token is not None:
        tokens = folder / "tokenizer.json"
        tokens.write_text(tokens.read_text().replace(json.dumps(end_token), '"</think>"'))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder
