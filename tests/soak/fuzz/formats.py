"""Random answer formats: ordinary ones, and ones that are made to hurt."""

from __future__ import annotations

import json
from random import Random

LETTERS = "abcdefghij 0123456789"


def random_regex(random: Random) -> str:
    """Return a regular expression; one in four is expensive or malformed."""
    if random.random() < 0.75:
        return _regex(random, depth=3)
    size = random.choice([10, 100, 1000, 5000])
    return random.choice(
        [
            "a?" * size + "a" * size,
            "(" * size + "a" + ")" * size,
            f"(a|b){{{size}}}",
            "(a*)*" * min(size, 50) + "b",
            "(" * 3,
            "[",
            "a{5,2}",
            "(?=a)b",
            r"\p{L}{1,200}",
            ".*" * min(size, 100),
            "",
            "a" * 70_000,
        ]
    )


def _regex(random: Random, depth: int) -> str:
    if depth == 0:
        return random.choice(["[a-z]", "[0-9]", "a", "the", " ", r"\d", r"\w"])
    parts = [_regex(random, depth - 1) for _ in range(random.randint(1, 3))]
    match random.randrange(4):
        case 0:
            return "".join(parts)
        case 1:
            return f"({'|'.join(parts)})"
        case 2:
            low = random.randint(0, 3)
            return f"({''.join(parts)}){{{low},{low + random.randint(1, 4)}}}"
    return f"({''.join(parts)})" + random.choice("?*+")


def random_grammar(random: Random) -> str:
    """Return a grammar in Lark's notation; one in four is expensive or malformed."""
    if random.random() < 0.75:
        words = " | ".join(f'"{_word(random)}"' for _ in range(random.randint(1, 6)))
        return random.choice(
            [
                f"start: {words}",
                f'start: item ("," item)*\nitem: {words}',
                f'start: NUMBER | list\nlist: "[" start ("," start)* "]"\nNUMBER: /[0-9]+/\nx: {words}',
                f'start: "the " noun\nnoun: {words}',
            ]
        )
    size = random.choice([10, 100, 1000, 3500])
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(size))
    return random.choice(
        [
            f'start: r0\n{chain}\nr{size}: "a"',
            'start: a\na: a a | "a" | "aa" | "aaa" | b\nb: b a | a b | "a"',
            "start: " + "(" * size + '"a"' + ")" * size,
            "start: start",
            "start: nothing",
            'start: "a',
            "",
            "start: " + " | ".join(f'"{i}"' for i in range(size)),
            f"start: A\nA: /{'(a|b)' * min(size, 400)}/",
        ]
    )


def random_schema(random: Random) -> str:
    """Return a JSON schema; one in four is expensive or malformed."""
    if random.random() < 0.75:
        return json.dumps(_schema(random, depth=3))
    size = random.choice([10, 100, 1000])
    nested: object = {"type": "string"}
    for _ in range(min(size, 200)):
        nested = {"type": "object", "properties": {"x": nested}, "required": ["x"]}
    return random.choice(
        [
            '{"type":"array","items":' * size + "{}" + "}" * size,
            json.dumps(nested),
            json.dumps({"enum": [str(i) for i in range(size)]}),
            json.dumps({"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(size)]}),
            json.dumps({"$ref": "#"}),
            json.dumps({"type": "nothing"}),
            json.dumps({"not": {}}),
            '{"type": "string", "pattern": "("}',
            json.dumps({"type": "string", "minLength": size * 10, "maxLength": size * 20}),
            json.dumps({"type": "array", "items": {}, "minItems": size * 100}),
            "{",
            "[]",
        ]
    )


def _schema(random: Random, depth: int) -> dict[str, object]:
    kinds = ["string", "integer", "boolean", "null", "enum"] + ["object", "array", "anyOf"] * bool(depth)
    match random.choice(kinds):
        case "object":
            names = [_word(random) for _ in range(random.randint(1, 3))]
            properties = {name: _schema(random, depth - 1) for name in names}
            return {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        case "array":
            return {"type": "array", "items": _schema(random, depth - 1), "maxItems": random.randint(1, 4)}
        case "anyOf":
            return {"anyOf": [_schema(random, depth - 1) for _ in range(2)]}
        case "enum":
            return {"enum": [_word(random) for _ in range(random.randint(1, 4))]}
        case "string":
            return {"type": "string", "maxLength": random.randint(1, 20)}
        case kind:
            return {"type": kind}


def _word(random: Random) -> str:
    return "".join(random.choices(LETTERS, k=random.randint(1, 8)))
