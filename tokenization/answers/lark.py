"""Collects the rules of a grammar in Lark's notation, as llguidance reads it.

llguidance adds to Lark: ``%json``, a value that a JSON schema accepts; ``[suffix="…"]``, which ends with the
first such text; ``[lazy]``, which ends as early as it can; and ``<[id]>``, a token of the model. See
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

TEXT = r"/(.|\n)*/"
_JSON_OPTIONS = {"whitespace_pattern": " ?"}
"""Keeps a model from spending its tokens on blanks, as in the formats that clients send."""


class Lark:
    """The rules of one grammar.

    Args:
        tokens: texts that are one token each. The same characters in several tokens are not meant by them.
        token_ids: their ids. The other ones end an answer, which llguidance allows wherever the grammar ends.
    """

    def __init__(self, tokens: Collection[str], token_ids: Mapping[str, int]) -> None:
        self._ids = token_ids
        self._token = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")
        self._rules: dict[str, str] = {"text": TEXT, "blanks": r"/[ \n]{0,2}/"}

    def add(self, name: str, symbols: str) -> str:
        """Define a rule, and return its name."""
        self._rules[name] = symbols
        return name.partition("[")[0]

    def add_part(self, symbols: str) -> str:
        """Define a rule without a name of its own, and return its name."""
        return self.add(f"part_{len(self._rules)}", symbols)

    def grammar(self, start: str) -> str:
        """Return the whole grammar, whose answers have the form ``start``."""
        rules = "\n".join(f"{name}: {symbols}" for name, symbols in self._rules.items())
        return f"start: {start}\n{rules}\n"

    def literal(self, text: str) -> str:
        """Return the symbols of exactly this text."""
        symbols, at = [], 0
        for found in self._token.finditer(text):
            symbols += [quoted(text[at : found.start()]), self._token_symbol(found[0])]
            at = found.end()
        return " ".join(filter(None, (*symbols, quoted(text[at:]))))

    def mark(self, text: str) -> tuple[str, str]:
        """Divide a delimiter into its first word or token, by which it is recognised, and the rest."""
        found = self._token.match(text)
        end = found.end() if found else len(text) - len(text[len(text.split(maxsplit=1)[0]) :]) if text else 0
        return text[:end], text[end:]

    def is_announced(self, mark: str) -> bool:
        """Return whether ``mark`` shows that a call begins: it is a token of the model, or a plain text."""
        return mark in self._ids or bool(mark and not mark.startswith("<|"))

    def up_to(self, mark: str, name: str) -> str:
        """Return the symbols of any text up to the next ``mark``, with it.

        Args:
            name: name for a rule.
        """
        if self._token.fullmatch(mark):
            return f"text {self._token_symbol(mark)}"
        return self.add(f"{name}[lazy]", f"{TEXT} {quoted(mark)}")

    def until(self, delimiter: str, name: str) -> str:
        """Return the symbols of a text that ends with ``delimiter``; blanks before that belong to the text.

        Args:
            name: name for a rule.
        """
        mark, rest = self.mark(delimiter.lstrip())
        if self._token.fullmatch(mark):
            return f"text {self._token_symbol(mark)} {self.literal(rest)}".rstrip()
        return f"{self.add(f'{name}[suffix={quoted(mark)}]', TEXT)} {self.literal(rest)}".rstrip()

    def _token_symbol(self, text: str) -> str:
        return f"<[{self._ids[text]}]>" if text in self._ids else ""


def json_value(schema: Mapping[str, Any], *, is_lenient: bool) -> str:
    """Return the symbol of a JSON value that a schema accepts.

    Args:
        is_lenient: keywords that llguidance does not know are passed over instead of refused.
    """
    asked = schema.get("x-guidance")
    options = {**_JSON_OPTIONS, **(asked if isinstance(asked, dict) else {})}
    if is_lenient:
        options["lenient"] = True
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def regex(text: str) -> str:
    """Return the symbol of a regular expression."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], text, flags=re.DOTALL)
    return f"/{escaped}/"


def quoted(text: str) -> str:
    """Return the symbol of a text, which may have no tokens in it; empty if the text is empty."""
    # The escapes are those of JSON, which leaves DEL as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
