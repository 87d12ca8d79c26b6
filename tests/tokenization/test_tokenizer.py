"""Text to ids and back, in pieces as in the whole; chat templates."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from quire.tokenization.chat_template import ChatTemplate, ChatTemplateError
from quire.tokenization.tokenizer import (
    IDS_AT_ONCE,
    INLINE_ENCODE_CHARS,
    KEPT_IDS,
    MAX_WAITING_IDS,
    IncrementalDecoder,
    MissingTokenizerError,
    ModelFiles,
    Tokenizer,
    load_model_files,
)

BYTES = {"<unk>": 0, "▁a": 1, "b": 2, "▁": 3, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
END = 260
"""The first id behind those of the vocabulary of ``byte_fallback``: a special token."""


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """Return a tokenizer as Llama 2 has: words with a mark for the space before them, and bytes."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=BYTES, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    replace = tokenizers.decoders.Replace("▁", " ")
    strip = tokenizers.decoders.Strip(" ", 1, 0)
    fallback, fuse = tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    inner.decoder = tokenizers.decoders.Sequence([replace, fallback, fuse, strip])
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner)


def deltas(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool = True) -> list[str]:
    """Return what each id added, and the end."""
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    return [*map(decoder.step, token_ids), decoder.flush()]


# Bytes above 0x7F are ids 96 to 223 of the byte-level tokenizer: half of the ids are parts of characters.
byte_level_ids = st.integers(0, 330) | st.integers(96, 223)


@given(token_ids=st.lists(byte_level_ids, max_size=80), skip=st.booleans())
def test_deltas_sum_up_to_the_whole(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> None:
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(deltas(tokenizer, token_ids, skip=skip)) == whole


def as_bytes(text: str) -> list[int]:
    return [4 + byte for byte in text.encode()]


# Ids of all kinds; any number of valid bytes; and, between words, the beginning of a character, or bytes
# that no character begins with.
pieces = (
    st.sampled_from([[0], [1], [2], [3], [END], [999]])
    | st.text(max_size=12).map(as_bytes)
    | st.lists(st.integers(4 + 0x80, 4 + 0xBF), max_size=40).map(lambda run: [2, *run, 2])
    | st.characters(min_codepoint=0x80, exclude_categories=["Cs"]).map(lambda c: [2, *as_bytes(c)[:-1], 2])
)


@given(parts=st.lists(pieces, max_size=20), skip=st.booleans())
def test_deltas_of_byte_fallback_sum_up_to_the_whole(
    byte_fallback: Tokenizer, parts: list[list[int]], skip: bool
) -> None:
    token_ids = [token_id for part in parts for token_id in part]
    whole = byte_fallback.decode(token_ids, skip_special_tokens=skip)
    assert "".join(deltas(byte_fallback, token_ids, skip=skip)) == whole


@given(
    before=st.sampled_from([1, 2, 3]),
    parts=st.lists(st.sampled_from([[1], [2], [3], [END]]) | st.text(max_size=6).map(as_bytes), max_size=9),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_an_answer_keeps_the_space_between_it_and_its_prompt(
    byte_fallback: Tokenizer, before: int, parts: list[list[int]], cuts: list[int]
) -> None:
    token_ids = [token_id for part in parts for token_id in part]
    whole, prompt = byte_fallback.decode([2, before, *token_ids]), byte_fallback.decode([2, before])
    assert prompt + "".join(fed(byte_fallback, token_ids, cuts, skip=True, before=before)) == whole


def test_an_answer_after_a_special_token_begins_a_text(byte_fallback: Tokenizer) -> None:
    for before in (None, END, 999, as_bytes("€")[0]):
        assert "".join(fed(byte_fallback, [1, 2], [1], skip=True, before=before)) == "ab"
    assert "".join(fed(byte_fallback, [1, 2], [1], skip=False, before=END)) == " ab"


@given(token_ids=st.lists(st.integers(1, 3) | st.integers(4 + 0x80, END + 2), max_size=60))
def test_invalid_bytes_cost_no_word(byte_fallback: Tokenizer, token_ids: list[int]) -> None:
    def words(text: str) -> list[str]:
        return [character for character in text if character in " ab"]

    assert words("".join(deltas(byte_fallback, token_ids))) == words(byte_fallback.decode(token_ids))


def fed(
    tokenizer: Tokenizer, token_ids: list[int], cuts: list[int], *, skip: bool, before: int | None = None
) -> list[str]:
    """Return the text that several ids at a time added, and the end."""
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip, before=before)
    places = sorted({0, len(token_ids), *(min(cut, len(token_ids)) for cut in cuts)})
    texts = []
    for start, end in pairwise(places):
        texts.append(decoder.feed(token_ids[start:end]))
        assert len(decoder._window) <= IDS_AT_ONCE + MAX_WAITING_IDS + KEPT_IDS
    return [*texts, decoder.flush()]


@given(
    token_ids=st.lists(byte_level_ids, max_size=80) | st.text(max_size=60),
    cuts=st.lists(st.integers(0, 80), max_size=8),
    skip=st.booleans(),
)
def test_several_ids_have_the_text_of_each_in_turn(
    tokenizer: Tokenizer, token_ids: list[int] | str, cuts: list[int], skip: bool
) -> None:
    if isinstance(token_ids, str):
        [token_ids] = tokenizer.encode_batch([token_ids])
    whole = "".join(deltas(tokenizer, token_ids, skip=skip))
    assert "".join(fed(tokenizer, token_ids, cuts, skip=skip)) == whole


@given(parts=st.lists(pieces, max_size=20), cuts=st.lists(st.integers(0, 80), max_size=8), skip=st.booleans())
def test_several_ids_of_byte_fallback_have_the_text_of_each_in_turn(
    byte_fallback: Tokenizer, parts: list[list[int]], cuts: list[int], skip: bool
) -> None:
    token_ids = [token_id for part in parts for token_id in part]
    whole = "".join(deltas(byte_fallback, token_ids, skip=skip))
    assert "".join(fed(byte_fallback, token_ids, cuts, skip=skip)) == whole


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_text_becomes_certain_no_later_with_several_ids(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    [token_ids] = tokenizer.encode_batch([text], add_special_tokens=False)
    in_turn, at_once, each = (IncrementalDecoder(tokenizer) for _ in range(3))
    places = sorted({0, len(token_ids), *(min(cut, len(token_ids)) for cut in cuts)})
    for start, end in pairwise(places):
        texts = list(map(in_turn.step, token_ids[start:end]))
        assert at_once.feed(token_ids[start:end]) == "".join(texts)
        whole = each.feed(token_ids[start:end])
        assert whole == "".join(texts)
        assert each.divide(token_ids[start:end], whole) == texts


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    "name", ["a part of a character", "a special token", "no token", "parts of two characters"]
)
def test_no_sequence_is_held_back_for_long(tokenizer: Tokenizer, name: str, skip: bool) -> None:
    part = tokenizer.encode_batch(["€"], add_special_tokens=False)[0]
    repeated = {
        "a part of a character": [part[1]],
        "a special token": [1],
        "no token": [100_000],
        "parts of two characters": [part[1], part[2], part[0]],
    }[name]
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    ids = (repeated * 3000)[:3000]
    text = ""
    for count, token_id in enumerate(ids, start=1):
        text += decoder.step(token_id)
        assert len(decoder._window) <= KEPT_IDS + MAX_WAITING_IDS
        if not count % 100:
            whole = tokenizer.decode(ids[:count], skip_special_tokens=skip)
            assert whole.startswith(text)
            assert len(whole) - len(text) <= MAX_WAITING_IDS
    assert text + decoder.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
async def test_deltas_of_text_hold_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    token_ids = await tokenizer.encode(text, add_special_tokens=False)
    decoder = IncrementalDecoder(tokenizer)
    deltas = [decoder.step(token_id) for token_id in token_ids]
    assert "".join(deltas) + decoder.flush() == text
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


def test_byte_fallback_and_leading_spaces(byte_fallback: Tokenizer) -> None:
    token_ids = [1, 1, *as_bytes("é€"), 2, 1, *as_bytes("€")[:2], 2]
    found = deltas(byte_fallback, token_ids)
    assert "".join(found) == byte_fallback.decode(token_ids) == "a aé€b a��b"
    assert found[:4] == ["a", " a", "", "é"]


async def test_long_texts_encode_alike(tokenizer: Tokenizer) -> None:
    word = "hello world "
    long = word * (INLINE_ENCODE_CHARS // len(word) + 1)
    ids = await tokenizer.encode(long)
    assert ids[0] == 0
    assert tokenizer.decode(ids) == long


async def test_saved_truncation_and_padding_are_off(model_folder: Path, tokenizer: Tokenizer) -> None:
    inner = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    assert await Tokenizer(inner).encode("hello world") == await tokenizer.encode("hello world")


def test_the_error_of_a_folder_without_tokenizer_has_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(MissingTokenizerError, match="save_pretrained"):
        load_model_files(str(tmp_path))


MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "<b>&'ü"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And?"},
]


def test_a_chat_is_rendered_as_written(model_folder: Path) -> None:
    template = ChatTemplate.load(load_model_files(str(model_folder)))
    assert template is not None
    assert template.render(MESSAGES) == (
        "<s><|system|>Be brief.</s>\n<|user|><b>&'ü</s>\n"
        "<|assistant|>Yes.</s>\n<|user|>And?</s>\n<|assistant|>"
    )


def render(source: str) -> str:
    return ChatTemplate(source, {}).render(MESSAGES)


def test_functions_that_templates_use() -> None:
    assert render("{{ messages[1].content | tojson }}") == json.dumps("<b>&'ü", ensure_ascii=False)
    assert (
        render("{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}x{% endfor %}") == "x"
    )
    assert render("{% generation %}{{ messages[2].content }}{% endgeneration %}") == "Yes."
    assert render("{{ strftime_now('%%') }}") == "%"
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}") == "2"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_refusals_and_escapes_are_the_callers_error(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the model's chat template refused them"):
        render(source)


def test_special_tokens_of_older_folders_are_in_a_map(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}|{{ eos_token }}", "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<b>"}, "eos_token": "<e>"}')
    newer = {**config, "added_tokens_decoder": {}}
    for options, text in ((config, "<b>|<e>"), (newer, "|</s>")):
        loaded = ChatTemplate.load(ModelFiles(tmp_path, options))
        assert loaded is not None
        assert loaded.render([]) == text


def test_a_template_file_wins_and_a_named_list_has_a_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    files = ModelFiles(tmp_path, {"chat_template": named})
    loaded = ChatTemplate.load(files)
    assert loaded is not None
    assert loaded.render([]) == "d"
    assert loaded.render([], [{"a": 1}]) == "t"
    (tmp_path / "chat_template.jinja").write_text("file")
    loaded = ChatTemplate.load(files)
    assert loaded is not None
    assert loaded.render([]) == loaded.render([], [{"a": 1}]) == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    loaded = ChatTemplate.load(files)
    assert loaded is not None
    assert (loaded.render([]), loaded.render([], [{"a": 1}])) == ("file", "with tools")
    assert ChatTemplate.load(ModelFiles(tmp_path / "none", {})) is None
