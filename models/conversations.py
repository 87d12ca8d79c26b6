"""Conversations to train on: notes followed by many questions, in the layouts and wordings people type."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from quire.models.notes import QUESTIONS, Message, Note, answer, question, sample_notes, text

NOTED = "noted."
"""What the model says to notes without a question."""

SMALL_TALK = {
    "hello": "hello! give me some notes and ask about them.",
    "hello!": "hello! give me some notes and ask about them.",
    "Hello": "hello! give me some notes and ask about them.",
    "Hello!": "hello! give me some notes and ask about them.",
    "hi": "hello! give me some notes and ask about them.",
    "Hi": "hello! give me some notes and ask about them.",
    "thanks": "you are welcome.",
    "Thanks!": "you are welcome.",
    "thank you": "you are welcome.",
    "Thank you.": "you are welcome.",
}
"""Canned answers to what is not about notes."""

UNKNOWN = "i do not know."
"""What the model says about an item that no note mentions."""

FILLERS = (
    "good morning.",
    "Good morning!",
    "here are some notes.",
    "Here are my notes:",
    "please read these notes.",
    "remember these facts.",
    "you are a helpful assistant.",
    "You are a helpful assistant.",
    "answer the questions about the notes.",
    "the notes are in no order.",
    "this is a list of things and numbers.",
    "some of this is new, and some of it is old.",
)
"""Sentences around the notes that say nothing about them."""

SEPARATORS = (" ", " ", " ", "\n")
"""What may stand between two notes; mostly a space."""


def conversation(rng: Random, num_facts: int, num_questions: int, *, plain: float = 0.5) -> list[Message]:
    """Make a conversation about random notes.

    Args:
        rng: where the choices come from.
        num_facts: notes in the conversation.
        num_questions: questions about them; no note is asked about twice before all have been.
        plain: share of conversations in the simplest form: notes and first question in one message, one wording.
    """
    notes = sample_notes(rng, num_facts)
    asked = list(_ask_order(rng, notes, num_questions))
    if rng.random() < plain:
        return _turns([f"{text(notes)} {question(asked[0])}", *map(question, asked[1:])], asked)
    wordings = QUESTIONS if rng.random() < 0.5 else QUESTIONS[:1]
    questions = [question(note, rng.choice(wordings)) for note in asked]
    body = _decorate(rng, text(notes, rng.choice(SEPARATORS)))
    layout = rng.randrange(4)
    if layout == 0:
        return [Message("system", body), *_turns(questions, asked)]
    if layout == 1:
        return [Message("user", body), Message("assistant", NOTED), *_turns(questions, asked)]
    if layout == 2:
        return _in_two_parts(rng, notes, num_questions)
    return _turns([f"{body} {questions[0]}", *questions[1:]], asked)


def recital(rng: Random, num_facts: int, num_statements: int) -> list[tuple[str, bool]]:
    """Make a text without turns that states a few notes again and again, shortly: ``lantern is 417.``

    It teaches to look an item up with a fifth of the tokens that questions take.

    Returns:
        The statements in order, and of each whether it repeats an earlier one.
    """
    notes = sample_notes(rng, num_facts)
    seen: set[str] = set()
    statements = []
    for _ in range(num_statements):
        note = rng.choice(notes)
        statements.append((f" {note.item} is {note.value}.", note.item in seen))
        seen.add(note.item)
    return statements


def small_talk(rng: Random) -> list[Message]:
    """Make an exchange that is not about notes."""
    said = rng.choice(list(SMALL_TALK))
    return [Message("user", said), Message("assistant", SMALL_TALK[said])]


def _ask_order(rng: Random, notes: list[Note], count: int) -> Iterator[Note]:
    """Draw notes to ask about, round by round, each round in its own order."""
    while count > 0:
        chosen = rng.sample(notes, min(count, len(notes)))
        yield from chosen
        count -= len(chosen)


def _turns(users: list[str], asked: list[Note]) -> list[Message]:
    """Pair what the user says with the answers."""
    pairs = zip(users, asked, strict=True)
    return [
        turn for user, note in pairs for turn in (Message("user", user), Message("assistant", answer(note)))
    ]


def _decorate(rng: Random, body: str) -> str:
    """Put fillers before or after the notes, or start them with a capital letter, as people do."""
    if rng.random() < 0.3:
        body = body[0].upper() + body[1:]
    if rng.random() < 0.5:
        body = f"{rng.choice(FILLERS)}{rng.choice(SEPARATORS)}{body}"
    if rng.random() < 0.2:
        body = f"{body} {rng.choice(FILLERS)}"
    return body


def _in_two_parts(rng: Random, notes: list[Note], num_questions: int) -> list[Message]:
    """Give a part of the notes, ask about it, give the rest, and ask about all."""
    cut = rng.randint(1, max(1, len(notes) - 1))
    asked_first = list(_ask_order(rng, notes[:cut], max(1, num_questions // 3)))
    asked_then = list(_ask_order(rng, notes, num_questions - len(asked_first)))
    first = list(map(question, asked_first))
    then = list(map(question, asked_then))
    first[0] = f"{text(notes[:cut])} {first[0]}"
    if not then or not notes[cut:]:
        return _turns([*first, *then], [*asked_first, *asked_then])
    rest = text(notes[cut:])
    if rng.random() < 0.5:
        then[0] = f"{rest} {then[0]}"
        return _turns([*first, *then], [*asked_first, *asked_then])
    noted = [Message("user", rest), Message("assistant", NOTED)]
    return [*_turns(first, asked_first), *noted, *_turns(then, asked_then)]
