"""The forms of notes and questions that the demo model is measured on."""

from __future__ import annotations

import pytest

from quire.models.training.conversations import NOTED
from quire.models.training.evaluate import form_cases, plain_cases
from quire.models.training.forms import FORMS, held_out_form


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("num_facts", [2, 20])
def test_the_answer_follows_from_the_messages(name: str, num_facts: int) -> None:
    for messages, expected in held_out_form(FORMS[name], 20, num_facts):
        said = " ".join(message["content"] for message in messages)
        assert messages[-1]["role"] == "user"
        if expected.endswith(" is not in the notes."):
            asked = expected.removesuffix("not in the notes.")
            assert asked not in said
            assert asked.removesuffix(" is ") in messages[-1]["content"]
        elif expected != NOTED:
            assert expected in said
            assert expected.split(" is ")[0].removeprefix("the ") in messages[-1]["content"]


@pytest.mark.parametrize("name", FORMS)
def test_examples_repeat_themselves_and_change_with_the_seed(name: str) -> None:
    assert held_out_form(FORMS[name], 3, 5) == held_out_form(FORMS[name], 3, 5)
    assert held_out_form(FORMS[name], 3, 5) != held_out_form(FORMS[name], 3, 5, seed=1)


def test_every_line_of_the_table_has_its_examples() -> None:
    plain = plain_cases(3, [5, 20], [1, 8], seed=0)
    assert [case.facts for case in plain] == [5, 20, 5, 20]
    assert all(len(case.examples) == 3 for case in plain)
    forms = form_cases(2, [5], seed=0)
    assert [case.form for case in forms] == list(FORMS)
    assert forms[0].form == plain[0].form
