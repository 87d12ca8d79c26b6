"""The language of the demo model: notes with one three-digit value each, questions and answers about them.

A note reads ``the code of the lantern is 417.`` Its item occurs in no other note of the same set, so the item
identifies the value. Each item, attribute and value is one token, and an answer repeats its note word for
word. A model that reads the notes correctly answers correctly, and a damaged key or value shows as a wrong
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

_WORDS = """
anchor apple arrow badge ball banana barn barrel basin basket bath bead beam bean bell bench berry bike
bird blade board boat bolt bone book boot bottle bowl box branch bread brick bridge broom brush bucket bus
button cabin cable cage cake camel camera camp candle cane canoe cap card carpet carrot cart castle cat
cave chain chair chalk chart cherry chest church circle clock cloth cloud clover coat coffee coin comb
cone copper coral cork corn cotton couch crab crane crown cup curtain daisy deck desk dice dish dog doll
door dove dragon drawer dress drum duck eagle easel egg engine fan farm feather fence fern ferry field
flag flame flask flute fork fox frame frog garden garlic gate gear ghost glass globe glove goat goose
grape guitar hammer harbor harp hat hawk heart hedge helmet hill honey hook horn horse hotel house island
ivory jacket jam jar jewel jug kettle key king kite kitten knife ladder lake lamp lantern leaf lemon
letter lily lime lion lizard lock map marble mask melon mill mirror mitten moon motor mouse mug nail
needle nest net nut oak oar olive onion orange orchid oven owl paddle page palace palm pan panda paper
parrot peach pear pearl pebble pen pencil pepper phone piano pickle picture pie pillow pilot pine pipe
planet plate plum pond potato prism pump puzzle quilt rabbit radio raft ribbon rice ring river road robin
robot rocket roof rope rose ruby rug saddle sail salt scarf shed sheep shell ship
"""

ATTRIBUTES = ("code", "number", "price", "room", "score", "age", "weight", "height")
"""Attributes of an item that a note may give."""

ITEMS = tuple(_WORDS.split())
"""Items that a note may be about."""

VALUES = range(100, 1000)
"""Values that a note may give: numbers of three digits."""

HELD_OUT_SEEDS = 1 << 32
"""First seed for evaluation; training takes its notes from smaller seeds."""

QUESTIONS = (
    "what is the {attribute} of the {item}?",
    "What is the {attribute} of the {item}?",
    "what is the {attribute} of the {item}",
    "the {attribute} of the {item}?",
    "tell me the {attribute} of the {item}.",
    "please tell me the {attribute} of the {item}.",
)
"""The wordings of a question that the model is taught; the first is the simplest."""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Note:
    """One fact, which says that the attribute of the item is the value."""

    attribute: str
    item: str
    value: int

    def __str__(self) -> str:
        return f"the {self.attribute} of the {self.item} is {self.value}."


class Example(NamedTuple):
    """A conversation that ends with a question, and the only right answer to it."""

    messages: list[dict[str, str]]
    expected: str


def sample_notes(rng: Random, num_facts: int) -> list[Note]:
    """Return random notes about ``num_facts`` different items, in random order."""
    return [Note(rng.choice(ATTRIBUTES), item, rng.choice(VALUES)) for item in rng.sample(ITEMS, num_facts)]


def text(notes: Sequence[Note], separator: str = " ") -> str:
    """Return the notes as one text, with 8 tokens for each note."""
    return separator.join(map(str, notes))


def question(note: Note, wording: str = QUESTIONS[0]) -> str:
    """Return the question for the value of the note."""
    return wording.format(attribute=note.attribute, item=note.item)


def answer(note: Note) -> str:
    """Return the answer to the question about the note, which is the note itself."""
    return str(note)


def answer_unknown(attribute: str, item: str) -> str:
    """Return the answer to a question about an item that has no note."""
    return f"the {attribute} of the {item} is not in the notes."


def prompt(notes: Sequence[Note], note: Note) -> str:
    """Return one user message with the notes and the question about one of them."""
    return f"{text(notes)} {question(note)}"


def held_out(num: int, num_facts: int, seed: int = 0, num_turns: int = 1) -> list[Example]:
    """Make examples that training never sees.

    Args:
        num: number of examples.
        num_facts: number of notes in each example, at most ``len(ITEMS)``.
        seed: a different seed gives different examples.
        num_turns: number of questions about each set of notes. The last question is left open, and the
            conversation contains the right answers to the others.
    """
    examples = []
    for index in range(num):
        rng = Random(HELD_OUT_SEEDS + (seed << 20) + index)
        notes = sample_notes(rng, num_facts)
        *asked, last = [rng.choice(notes) for _ in range(num_turns)]
        first, *others = [question(note) for note in (*asked, last)]
        users = [f"{text(notes)} {first}", *others]
        turns = [Message("user", users[0])]
        for note, user in zip(asked, users[1:], strict=True):
            turns += [Message("assistant", answer(note)), Message("user", user)]
        examples.append(Example([turn._asdict() for turn in turns], answer(last)))
    return examples
