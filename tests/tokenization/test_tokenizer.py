"""Text to ids and back, in pieces as in the whole; chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.errors import ChatTemplateError, MissingTokenizerError
from quire.tokenization.tokenizer import (
    INLINE_ENCODE_CHARS,
    IncrementalDecoder,
    ModelFiles,
    Tokenizer,
    load_model_files,
)


@given(token_ids=st.lists(st.integers(0, 319), max_size=40), skip=st.booleans())
def test_deltas_sum_up_to_the_whole(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> None:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    text = "".join(decoder.step(token_id) for token_id in token_ids) + decoder.flush()
    assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
async def test_deltas_of_text_hold_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    token_ids = await tokenizer.encode(text, add_special_tokens=False)
    decoder = IncrementalDecoder(tokenizer)
    deltas = [decoder.step(token_id) for token_id in token_ids]
    assert "".join(deltas) + decoder.flush() == text
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


def test_byte_fallback_and_leading_spaces() -> None:
    vocab = {"<unk>": 0, "▁a": 1, "b": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    replace = tokenizers.decoders.Replace("▁", " ")
    strip = tokenizers.decoders.Strip(" ", 1, 0)
    byte_fallback, fuse = tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    inner.decoder = tokenizers.decoders.Sequence([replace, byte_fallback, fuse, strip])
    tokenizer = Tokenizer(inner)
    token_ids = [1, 1, *(3 + byte for byte in "é€".encode()), 2, 1, 3 + 0xE2, 3 + 0x82, 2]
    decoder = IncrementalDecoder(tokenizer)
    deltas = [decoder.step(token_id) for token_id in token_ids]
    assert "".join(deltas) + decoder.flush() == tokenizer.decode(token_ids) == "a aé€b a��b"
    assert deltas[:4] == ["a", " a", "", "é"]


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


def test_a_folder_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
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


def test_what_templates_use_works() -> None:
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


def test_a_template_file_wins_and_a_named_list_has_a_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    files = ModelFiles(tmp_path, {"chat_template": named})
    loaded = ChatTemplate.load(files)
    assert loaded is not None
    assert loaded.render([]) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    loaded = ChatTemplate.load(files)
    assert loaded is not None
    assert loaded.render([]) == "file"
    assert ChatTemplate.load(ModelFiles(tmp_path / "none", {})) is None
