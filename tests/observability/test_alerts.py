"""The alert rules: about metrics that exist, each with a runbook, tested by Prometheus' own tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testing.promql import references

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations.md"
OBSERVABILITY = ROOT / "observability"
UNIT_TESTS = Path(__file__).with_name("alerts_test.yml")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool on PATH; it comes with Prometheus (apt install prometheus)"
)


def promtool(*arguments: str) -> str:
    """Run promtool; fail with what it says."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_rules_speak_of_series_and_labels_that_exist(
    alert_rules: list[dict[str, Any]], known_series: dict[str, set[str]]
) -> None:
    for rule in alert_rules:
        found = references(rule["expr"])
        for selector in found.selectors:
            assert selector.labels <= known_series[selector.name], selector.text
        used = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
        assert set(used) <= set().union(*(known_series[s.name] for s in found.selectors)), rule["alert"]


def test_every_rule_has_a_severity_and_a_runbook(alert_rules: list[dict[str, Any]]) -> None:
    headings = re.findall(r"^### (Quire\w+)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {rule["labels"]["severity"] for rule in alert_rules} == {"page", "ticket"}
    assert sorted(headings) == sorted(rule["alert"] for rule in alert_rules)
    actions = re.findall(r"^\| \[(Quire\w+)\]\(#(\w+)\) \| .+ \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert sorted(actions) == sorted((rule["alert"], rule["alert"].lower()) for rule in alert_rules)
    for rule in alert_rules:
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"


def test_every_rule_is_tested_firing_and_silent(alert_rules: list[dict[str, Any]]) -> None:
    tests = yaml.safe_load(UNIT_TESTS.read_text("utf-8"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for is_firing in (True, False):
        tested = {case["alertname"] for case in cases if bool(case.get("exp_alerts")) == is_firing}
        assert tested == {rule["alert"] for rule in alert_rules}


@needs_promtool
def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    assert "1 rule files found" in promtool("check", "config", str(OBSERVABILITY / "prometheus.yml"))
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(OBSERVABILITY / "alerts.yml"))


@needs_promtool
def test_rules_fire_when_they_should() -> None:
    promtool("test", "rules", str(UNIT_TESTS))
