"""The architectures that most people run are served or refused as docs/models.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.benchmarks import model_sizes
from quire.benchmarks.model_survey import make_tiny_model, served
from quire.benchmarks.models_page import Result, Status, write_page

MOST_USED = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "gemma2"),
    *("gemma3_text", "gemma4_text", "phi3", "gpt_oss", "deepseek_v3", "glm4", "glm4_moe", "granitemoehybrid"),
    *("olmo2", "cohere2", "lfm2", "stablelm", "mllama"),
)
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MOST_USED)
def test_the_page_lists_the_results_of_the_survey(architecture: str) -> None:
    result = served(architecture)
    assert result.status in (Status.SERVED, Status.REFUSED), result.reason
    parts = PAGE.read_text("utf-8").split("\n### ")
    [part] = [each for each in parts if each.lower().startswith(result.status)]
    assert f"`{architecture}`" in part
    assert result.reason.split(" ")[0] in part


def test_a_model_without_a_kind_of_layer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_sizes.OVERRIDES, "gemma2", {"layer_types": ["sliding_attention"] * 2})
    result = served("gemma2")
    assert result.status is Status.FAILED
    assert "lacks layers of type ['full_attention']" in result.reason


def test_lfm2_has_a_convolution() -> None:
    assert set(make_tiny_model("lfm2").config.layer_types) == {"conv", "full_attention"}


def test_the_page_lists_architectures_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "models.md"
    path.write_text(
        "# Models\n\n## Which architectures run\n\nold\n\n## Which architectures ranks divide\n\nrest\n"
    )
    results = {
        "b": Result(Status.REFUSED, "it is odd"),
        "a": Result(Status.REFUSED, "it is odd"),
        "c": Result(Status.SERVED),
    }
    write_page(path, results, "5.0")
    page = path.read_text()
    assert page.startswith("# Models\n\n## Which architectures run\n\n`python -m")
    assert "### Served, with the same tokens (1)\n\n`c`\n\n### Refused (2)\n\n* it is odd: `a`, `b`\n" in page
    assert page.endswith("\n\n## Which architectures ranks divide\n\nrest\n")
    assert "old" not in page
