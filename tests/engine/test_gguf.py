"""Models in GGUF files load as the plain models that they were written from, or are refused by name."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.gguf import dequant

from quire.engine.model.layers.packed_linear import PackedEmbedding, PackedLinear
from quire.engine.model.program.recipe import MlpRecipe
from quire.engine.weights.checkpoint import open_checkpoint
from quire.engine.weights.gguf_checkpoint import GgufCheckpoint
from quire.engine.weights.loader import LoadedModel, load_model
from quire.engine.weights.packed_codes import take_part
from quire.kernels.cpu.products.group_weight import GroupWeight
from quire.kernels.cpu.products.integer_weight import quantize_rows
from quire.llm import LLM, SamplingParams
from quire.models import gguf_folder
from quire.models.file_checks import ModelFileError
from quire.models.gguf_conversion import write_folder
from quire.models.gguf_header import TYPES, read_header
from quire.models.source import demo_model_path, find_model
from tests.testing.gguf_files import encode, write_gguf
from tests.testing.tiny_engine import make_engine, make_prompt, make_request, run_in_order, run_mixed
from tests.testing.tiny_models import make_random_model

CPU = torch.device("cpu")
GEMMA = {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3", GEMMA),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
}


@pytest.fixture
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def convert(path: Path) -> Path:
    """Return the folder of a GGUF file, written by this process."""
    folder = path.with_suffix(".folder")
    write_folder(path, folder)
    return folder


def dequantized(folder: Path, plain: Path) -> Path:
    """Save the plain model with the weights of a GGUF model's folder, in float32."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with open_checkpoint(folder) as checkpoint:
        model.load_state_dict({name: checkpoint.read(name, None) for name in checkpoint.names}, strict=False)
    model.save_pretrained(saved := folder.with_suffix(".plain"))
    return saved


def settings(folder: Path) -> dict[str, Any]:
    """Return the configuration without what does not change logits, or what GGUF does not know."""
    values: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    for key in ("_name_or_path", "architectures", "dtype", "transformers_version"):
        values.pop(key, None)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values.pop(key)
    return values


def answer(model: LoadedModel) -> Any:
    request = make_request("a", make_prompt(40), temperature=0.0, max_tokens=24)
    return run_in_order(make_engine(model), request)


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture_has_the_logits_of_the_plain_model(name: str, tmp_path: Path) -> None:
    architecture, values = MODELS[name]
    plain = make_random_model(architecture, tmp_path / "plain", **values)
    folder = convert(write_gguf(plain, tmp_path / "model.gguf"))
    assert settings(folder) == settings(plain)
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with open_checkpoint(folder) as checkpoint:
        for parameter, tensor in module.named_parameters():
            tensor.data = checkpoint.read(parameter, None)
    prompt = torch.tensor([make_prompt(40)])
    if "gemma" in architecture:
        # The file has norms plus 1, which rounds them.
        assert torch.allclose(module(prompt).logits, expected(prompt).logits, rtol=1e-3, atol=1e-3)
    else:
        assert torch.equal(module(prompt).logits, expected(prompt).logits)
    assert answer(load_model(str(plain), "auto", CPU)) == answer(load_model(str(folder), "auto", CPU))


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("phi3", {"rope.scaling.original_context_length": 512, "attention.sliding_window": 0}),
        ("gemma3", {"rope.freq_base_swa": 10000.0}),
    ],
)
def test_what_llama_cpp_states_beside_a_configuration_is_read(
    name: str, stated: dict[str, Any], tmp_path: Path
) -> None:
    architecture, values = MODELS[name]
    plain = make_random_model(architecture, tmp_path / "plain", **values)
    folder = convert(write_gguf(plain, tmp_path / "model.gguf", settings=stated))
    assert settings(folder) == settings(plain)
    theta = {"rope.freq_base_swa": 20000.0}
    if name == "gemma3":
        folder = convert(write_gguf(plain, tmp_path / "other.gguf", settings=theta))
        assert settings(folder)["rope_parameters"]["sliding_attention"]["rope_theta"] == 20000.0


def test_control_tokens_keep_letters_that_bytes_do_not_have(tmp_path: Path) -> None:
    plain = make_random_model("qwen2", tmp_path / "plain")
    own = Tokenizer.from_file(str(plain / "tokenizer.json"))
    names = ["<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>", "<|im_start|>"]
    own.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in names])
    own.save(str(plain / "tokenizer.json"))
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "bos_token_id": own.token_to_id(names[0])}))
    folder = convert(write_gguf(plain, tmp_path / "model.gguf", pre="deepseek-r1-qwen"))
    read = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = f"{names[0]}{names[1]}hi{names[2]}"
    assert read.encode(text, add_special_tokens=False).ids == own.encode(text, add_special_tokens=False).ids
    assert json.loads((folder / "tokenizer_config.json").read_text())["bos_token"] == names[0]
    assert read.get_vocab_size() <= config["vocab_size"]
    assert max(read.get_vocab().values()) < config["vocab_size"]


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_type_is_dequantized_as_transformers_does(name: str, tmp_path: Path) -> None:
    kind, path = Kind[name], tmp_path / "model.gguf"
    plain = make_random_model("llama", tmp_path / "plain", **WIDE)
    folder = convert(write_gguf(plain, path, kind))
    with open_checkpoint(folder) as checkpoint:
        up = checkpoint.read("model.layers.0.mlp.up_proj.weight", None)
        query = checkpoint.read("model.layers.0.self_attn.q_proj.weight", (0, slice(0, 32)))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert read_header(path).tensors["blk.0.ffn_up.weight"].kind == kind
    if name in ("Q5_0", "Q5_1", "F16", "BF16", "F32"):
        expected = gguf.dequantize(tensors["blk.0.ffn_up.weight"].data, kind)
        assert torch.equal(up, torch.tensor(expected, dtype=torch.float32))
    else:
        stored = torch.tensor(np.array(tensors["blk.0.ffn_up.weight"].data))
        assert torch.equal(up, dequant.dequantize(stored, kind.value).view_as(up))
    rows = torch.tensor(gguf.dequantize(tensors["blk.0.attn_q.weight"].data, kind), dtype=torch.float32)[:32]
    assert torch.equal(query, torch.cat([rows[0::2], rows[1::2]]))


@pytest.mark.parametrize("weight_dtype", ["dequantized", "int8", "w8a8"])
def test_the_engine_answers_as_with_the_dequantized_weights(
    weight_dtype: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = convert(write_gguf(llama, tmp_path / "model.gguf", mixed))
    plain = dequantized(folder, llama)
    with caplog.at_level(logging.INFO, "quire.engine.weights"):
        models = [load_model(str(each), "float32", CPU, weight_dtype) for each in (folder, plain)]
    assert answer(models[0]) == answer(models[1])
    (line,) = [record.getMessage() for record in caplog.records if "GGUF" in record.getMessage()]
    assert "GGUF of llama, 0." in line
    assert "Q8_0 (" in line
    assert "Q4_0 (" in line
    assert "0 run packed" in line


PACKED = [Kind[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")]


@pytest.mark.parametrize("kind", PACKED)
def test_the_codes_of_a_type_run_packed(kind: Kind, tmp_path: Path) -> None:
    plain = make_random_model("llama", tmp_path / "plain", **WIDE)
    folder = convert(write_gguf(plain, tmp_path / "model.gguf", kind))
    with open_checkpoint(folder) as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)
        for name in ("self_attn.q_proj", "mlp.down_proj"):
            name = f"model.layers.0.{name}.weight"
            expected = checkpoint.read(name, None)
            for part in (None, (0, slice(64, 128)), (1, slice(32, 128))):
                stand_in = checkpoint.read_packed(name, part, torch.float32)
                found = checkpoint.packed[name][0].unpack()
                assert found.shape == stand_in.shape
                if kind.name.endswith("_K"):
                    # Scales are products of 17 bits, which are rounded to 11.
                    assert torch.allclose(
                        found, take_part(expected, part), rtol=0, atol=2**-11 * float(expected.abs().max())
                    )
                else:
                    assert torch.equal(found, take_part(expected, part))


def test_a_type_whose_codes_have_no_products_is_dequantized(tmp_path: Path) -> None:
    plain = make_random_model("llama", tmp_path / "plain", **WIDE)
    folder = convert(write_gguf(plain, tmp_path / "model.gguf", Kind.Q3_K))
    name = "model.layers.0.self_attn.q_proj.weight"
    with open_checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint.read_packed(name, None, torch.float32), checkpoint.read(name, None))
        assert not checkpoint.packed


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q5_0, Kind.Q8_0])
def test_a_model_with_a_tied_embedding_multiplies_codes_and_rounded_inputs(
    kind: Kind, tmp_path: Path
) -> None:
    tied = make_random_model("llama", tmp_path / "tied", tie_word_embeddings=True, **WIDE)
    folder = convert(write_gguf(tied, tmp_path / "model.gguf", kind))
    model, plain = load_model(str(folder), "float32", CPU), dequantized(folder, tied)
    embedding, head = model.module.get_input_embeddings(), model.module.get_output_embeddings()
    assert isinstance(embedding, PackedEmbedding)
    assert isinstance(head, PackedLinear)
    assert isinstance(head.packed, GroupWeight)
    assert embedding.packed is head.packed
    assert model.recipe is not None
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for layer in expected.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(rounded_inputs)
    model.module.set_attn_implementation("eager")
    prompt = torch.tensor([make_prompt(40)])
    logits, products = model.module(prompt).logits, expected(prompt).logits
    errors = (logits - products).norm(dim=-1) / products.norm(dim=-1)
    # A value between two steps may round to the other one, and the next layers enlarge that.
    assert errors.min() < 1e-5
    assert errors.max() < 0.05


def rounded_inputs(layer: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Return the inputs of a layer as products with codes round them: to 8 bits in groups of 32."""
    integers, scales = quantize_rows(inputs[0].unflatten(-1, (-1, 32)))
    return ((integers * scales).flatten(-2),)


def test_a_file_of_several_types_runs_as_one_program(tmp_path: Path) -> None:
    plain = make_random_model("llama", tmp_path / "plain", num_attention_heads=8, **WIDE)
    model = load_model(
        str(convert(write_gguf(plain, tmp_path / "model.gguf", several_types))), "float32", CPU
    )
    assert model.recipe is not None
    (layer,) = model.recipe.layers
    assert isinstance(layer.mlp, MlpRecipe)
    assert layer.mlp.up is not None
    linears = (*model.recipe.attentions[0].projections, layer.mlp.gate, layer.mlp.up, layer.mlp.down)
    assert len({each.packed.stored for each in linears}) == 4
    assert run_mixed(model, "auto") == run_mixed(replace(model, recipe=None), "auto")


def several_types(name: str) -> Kind:
    """Return types as in a file of type Q4_K_M, and others for keys and the gate."""
    kinds = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output.": Kind.Q6_K}
    kinds |= {"attn_k": Kind.Q8_0, "ffn_gate": Kind.Q5_K}
    return next((kind for part, kind in kinds.items() if part in name), Kind.Q4_K)


def mixed(name: str) -> Kind:
    return Kind.Q4_0 if "ffn" in name else Kind.Q8_0


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")])
def test_the_dtype_is_that_of_most_weights(kind: str, dtype: str, llama: Path, tmp_path: Path) -> None:
    folder = convert(write_gguf(llama, tmp_path / "model.gguf", Kind[kind]))
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_path_to_the_file_is_a_model_for_one_process_and_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ASSETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    plain = make_random_model("llama", tmp_path / "plain", intermediate_size=256)
    path = write_gguf(plain, tmp_path / "model.gguf", mixed)
    folder = find_model(str(path))
    written = (folder / "config.json").stat().st_mtime_ns
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True, logprobs=3)
    answers, digests = [], set()
    for num_ranks in (1, 2):
        with LLM(str(path), num_blocks=64, threads=1, tensor_parallel_size=num_ranks) as llm:
            outputs = llm.generate([make_prompt(40), make_prompt(7)], params, use_tqdm=False)
            answers.append([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs])
            digests.add(llm.engine.model.digest)
    assert answers[0] == answers[1]
    assert len(digests) == 1
    assert (folder / "config.json").stat().st_mtime_ns == written
    write_gguf(make_random_model("llama", tmp_path / "other", num_hidden_layers=2), path)
    with monkeypatch.context() as patch:
        # The first conversion has its own process, and this one saves the imports.
        patch.setattr(gguf_folder, "_convert", write_folder)
        assert find_model(str(path)) != folder
    assert load_model(str(path), "auto", CPU).digest not in digests
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=rf"^{path} ends in tensor output"):
        find_model(str(path))
    assert len([each for each in folder.parent.iterdir() if each.is_dir()]) == 2


def test_the_tokenizer_and_the_template_are_those_of_the_demo_model(tmp_path: Path) -> None:
    demo = demo_model_path()
    folder = convert(write_gguf(demo, tmp_path / "model.gguf", Kind.Q8_0))
    own, expected = (Tokenizer.from_file(str(each / "tokenizer.json")) for each in (folder, demo))
    text = "<|user|>the code of the lantern is 417. Ça va?\n\n  Please<|end|> <|endoftext|>"
    assert own.encode(text).ids == expected.encode(text).ids
    assert own.decode(own.encode(text).ids, False) == text
    assert own.get_vocab_size() == 1997
    template = json.loads((demo / "tokenizer_config.json").read_text())["chat_template"]
    assert (folder / "chat_template.jinja").read_text() == template
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1]}


def llama3_factors(factor: float) -> np.ndarray[Any, Any]:
    """Return what llama.cpp's converter writes for a head of 32 elements and a base of 10,000."""
    factors = []
    for frequency in 10000.0 ** -(np.arange(0, 32, 2) / 32):
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - 1) / 3
        is_short, is_long = wavelength < 8192 / 4, wavelength > 8192
        factors.append(1.0 if is_short else factor if is_long else 1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_the_scaled_rope_of_llama_3_is_read_from_its_tensor(llama: Path, tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": llama3_factors(8.0)}
    folder = convert(write_gguf(llama, tmp_path / "model.gguf", extra=extra))
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["factor"] == 8.0
    model = load_model(str(folder), "auto", CPU)
    assert torch.allclose(
        10000.0 ** -(torch.arange(0, 32, 2) / 32) / model.module.model.rotary_emb.inv_freq,
        torch.tensor(llama3_factors(8.0)),
        rtol=1e-5,
    )


TABLE = np.ones(16, np.float32)
TABLE[3] = 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"settings": {"rope.scaling.type": "yarn"}},
            "scales positions by yarn: quire reads linear and Llama 3's",
        ),
        ({"settings": {"expert_count": 4}}, "has the setting llama.expert_count = 4"),
        ({"settings": {"rope.dimension_count": 16}}, "rope.dimension_count = 16: quire reads only 32"),
        ({"settings": {"embedding_length": None}}, "has no 'hidden_size'"),
        ({"settings": {"block_count": 4}}, r"has no tensor blk.3\."),
        ({"settings": {"block_count": 2}}, r"has a tensor blk.2\.\w+.weight, which no llama of"),
        ({"settings": {"feed_forward_length": 64}}, r"ffn_\w+.weight of shape \(\d+, \d+\) instead of"),
        ({"extra": {"rope_freqs.weight": TABLE}}, "rope_freqs.weight with other values"),
        (
            {"extra": {"blk.0.attn_q.bias": np.zeros(128, np.float32)}},
            "has a tensor blk.0.attn_q.bias, which",
        ),
        (
            {"extra": {"blk.0.other": np.zeros(3, np.int32)}},
            "tensor blk.0.other in I32: quire reads BF16, F16",
        ),
        ({"pre": "other"}, "divides text by tokenizer.ggml.pre = other"),
    ],
)
def test_unsupported_gguf_files_are_refused(
    options: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf", **options)
    with pytest.raises(ModelFileError, match=message) as caught:
        load_model(str(convert(path)), "auto", CPU)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="has the architecture rwkv7: quire reads gemma2, gemma3, llama"):
        convert(path)


@pytest.mark.parametrize("kind", ["none", "bert"])
def test_a_file_without_a_tokenizer_that_quire_reads_is_refused(kind: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="no tokenizer" if kind == "none" else "has a tokenizer bert"):
        convert(path)


@pytest.mark.parametrize("place", [0.0, 0.2, 0.8])
def test_a_truncated_file_is_refused(place: float, llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: max(10, int(place * len(content)))])
    problem = r"ends in tensor \S+: it has \d+ bytes" if place else "has a damaged header"
    with pytest.raises(ModelFileError, match=rf"^{path} {problem}"):
        read_header(path)


def test_no_damage_of_a_header_raises_another_error(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    first = min(tensor.start for tensor in read_header(path).tensors.values())
    content = path.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(content)
        for position in random.integers(0, first, 8):
            damaged[position] = random.integers(256)
        path.write_bytes(damaged)
        # An error of any other type fails this test.
        with contextlib.suppress(ModelFileError):
            read_header(path)


def test_a_part_of_a_split_file_is_refused(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    shutil.copy(path, part := tmp_path / "model-00001-of-00002.gguf")
    with pytest.raises(ModelFileError, match="part of a split file: merge all parts with llama-gguf-split"):
        find_model(str(part))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        find_model(str(tmp_path / "other.gguf"))


def test_blocks_of_the_k_types_are_not_all_alike() -> None:
    blocks = encode(np.zeros((2, 512), np.float32), Kind.Q4_K)
    assert len(np.unique(gguf.dequantize(blocks, Kind.Q4_K))) > 100
