"""Held-out examples of each form of notes and questions that the demo model is taught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from quire.models.notes import (
    HELD_OUT_SEEDS,
    ITEMS,
    QUESTIONS,
    Example,
    Note,
    answer,
    answer_unknown,
    prompt,
    question,
    sample_notes,
    text,
)
from quire.models.training.conversations import NOTED

Form = Callable[[Random, Sequence[Note]], Example]
"""Makes a conversation about the notes that ends with a question about one of them."""


def held_out_form(form: Form, num: int, num_facts: int, seed: int = 0) -> list[Example]:
    """Make examples of one form that training never sees; all forms get the same notes."""
    examples = []
    for index in range(num):
        rng = Random(2 * HELD_OUT_SEEDS + (seed << 20) + index)
        examples.append(form(rng, sample_notes(rng, num_facts)))
    return examples


def _user(*contents: str) -> list[dict[str, str]]:
    """Make a conversation in which the user and the model alternate, beginning with the user."""
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def _worded(wording: str) -> Form:
    """Return the form that asks in the given words."""

    def form(rng: Random, notes: Sequence[Note]) -> Example:
        note = rng.choice(notes)
        return Example(_user(f"{text(notes)} {question(note, wording)}"), answer(note))

    return form


def _lines(rng: Random, notes: Sequence[Note]) -> Example:
    """Put each note on its own line."""
    note = rng.choice(notes)
    return Example(_user("\n".join([text(notes, "\n"), question(note)])), answer(note))


def _system(rng: Random, notes: Sequence[Note]) -> Example:
    """Give the notes in the system message."""
    note = rng.choice(notes)
    return Example([{"role": "system", "content": text(notes)}, *_user(question(note))], answer(note))


def _instructed(rng: Random, notes: Sequence[Note]) -> Example:
    """Begin with a system message that says nothing about the notes."""
    note = rng.choice(notes)
    system = {"role": "system", "content": "you are a helpful assistant."}
    return Example([system, *_user(prompt(notes, note))], answer(note))


def _notes_alone(rng: Random, notes: Sequence[Note]) -> Example:
    """Give the notes without a question."""
    return Example(_user(text(notes)), NOTED)


def _asked_later(rng: Random, notes: Sequence[Note]) -> Example:
    """Ask in a second message, after the model has acknowledged the notes."""
    note = rng.choice(notes)
    return Example(_user(text(notes), NOTED, question(note)), answer(note))


def _two_parts(rng: Random, notes: Sequence[Note]) -> Example:
    """Give the second half of the notes after a question, then ask about the first half again."""
    half = len(notes) // 2
    first, note = rng.choice(notes[:half]), rng.choice(notes[:half])
    turns = _user(prompt(notes[:half], first), answer(first), f"{text(notes[half:])} {question(note)}")
    return Example(turns, answer(note))


def _no_note(rng: Random, notes: Sequence[Note]) -> Example:
    """Ask about an item without a note."""
    known = {note.item for note in notes}
    item = rng.choice([item for item in ITEMS if item not in known])
    attribute = rng.choice(notes).attribute
    asked = QUESTIONS[0].format(attribute=attribute, item=item)
    return Example(_user(f"{text(notes)} {asked}"), answer_unknown(attribute, item))


FORMS: dict[str, Form] = {
    **{wording.format(attribute="code", item="lantern"): _worded(wording) for wording in QUESTIONS},
    "notes line by line": _lines,
    "notes as the system message": _system,
    "another system message": _instructed,
    "notes alone": _notes_alone,
    "question after the notes were noted": _asked_later,
    "notes in two messages": _two_parts,
    "an item without a note": _no_note,
}
"""All forms by name."""
