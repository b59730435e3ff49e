"""Findings that can be acted on: what was read, the reference, the meaning, the evidence, and what to do next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import vitfocus as vf
from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.attention.findings import Situation, default_thresholds, explain, findings, reference
from vitfocus.attention.plots import plot
from vitfocus.attention.readings import READINGS

ROOT = Path(__file__).parents[2]
BOUND = 5.283  # of 197 tokens


def row(layer: int, **values: float) -> dict[str, Any]:
    usual = {"entropy": 3.8, "entropy_p85": 4.5, "entropy_bound": BOUND, "overfocus": 0.2, "stability": 0.9}
    usual |= {"head_similarity": 0.5, "diversity_official": 0.5}
    return {"layer": layer, "name": f"blocks.{layer}", "attention_kind": "global", **usual, **values}


def rows(**last: float) -> list[dict[str, Any]]:
    return [*(row(layer) for layer in range(11)), row(11, **last)]


OVERFOCUSED = rows(overfocus=0.57, stability=0.42, diversity_official=0.97)
UNIFORM = rows(entropy=5.27, entropy_p85=5.28, overfocus=0.06, stability=0.99, head_similarity=0.99)


def one(found: list[Any], kind: str) -> Any:
    (chosen,) = [finding for finding in found if finding.kind == kind]
    return chosen


def test_a_finding_says_everything_that_is_needed_to_act() -> None:
    found = explain(OVERFOCUSED, Situation(against="gaussian_noise/3", depth=12))
    finding = one(found, "overfocus")
    assert finding.layers == (11,) and "5 % of the tokens receive 57 %" in finding.read and "0.42" in finding.read
    deit = reference()["models"]["DeiT-Ti"]["overfocus"][11]
    assert f"DeiT-Ti {100 * deit:.0f} %" in finding.reference and "uniform attention has 5 %" in finding.reference
    assert all((finding.meaning, finding.evidence, finding.command))
    assert (
        str(finding).endswith(f"Next: {finding.command}")
        and finding.read in findings(OVERFOCUSED, "gaussian_noise/3")[0]
    )
    assert [other.kind for other in found] == ["overfocus"], "rows alike and instability are part of the same finding"


@pytest.mark.parametrize(
    "rows", [OVERFOCUSED, UNIFORM, rows(entropy_p85=5.2), rows(stability=0.3, diversity_official=0.9)]
)
def test_nothing_is_prescribed_that_the_model_carries_or_the_study_advises_against(rows: list[dict[str, Any]]) -> None:
    for specs in ((), ("cb(layers=upper)",), ("cbs",), ("tap", "adl"), ("cb", "tap", "adl")):
        for finding in explain(rows, Situation(specs, trained=True, against="gaussian_noise/3", depth=12)):
            advised = re.findall(r"`([^`]*)`", finding.command)
            assert not any(re.search(r"--treat|\btap\b|\badl\b", command) for command in advised)
            if {"cb", "cbs"} & {spec.partition("(")[0] for spec in specs}:
                assert "cb(" not in finding.command and "with and without" not in finding.command
            if finding.kind in ("uniform", "spread") and specs and specs[0].startswith("cb"):
                assert f"treated with {specs[0]}" in finding.evidence
            if finding.kind == "overfocus" and "tap" in specs:
                assert "treated with tap and adl" in finding.evidence


def test_no_layer_is_overfocused_and_nearly_uniform() -> None:
    mixed = rows(overfocus=0.4, entropy=5.1, entropy_p85=5.2)
    found = explain(mixed, Situation(depth=12))
    assert [finding.kind for finding in found if 11 in finding.layers] == ["overfocus"]
    assert "uniform." not in " ".join(str(finding) for finding in found)


def test_uniform_maps_are_not_praised() -> None:
    (finding,) = explain(UNIFORM, Situation(against="gaussian_noise/3", depth=12))
    assert finding.kind == "uniform" and finding.layers == (11,)
    assert "follow from this alone and are no sign of robustness" in finding.meaning


def test_untrained_weights_are_named_first_and_not_treated() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
    diagnosis = vf.diagnose(model, "shapes:2", against="gaussian_noise/3")
    assert not diagnosis.trained and diagnosis.explained[0].kind == "untrained"
    assert "Context Broadcasting" not in " ".join(diagnosis.findings)
    torch.nn.init.normal_(model.norm.weight)
    vf.treat_(model, "adl")
    again = vf.diagnose(model, "shapes:2")
    assert again.trained and again.treatments == "adl" and again.depth == 2
    read = Diagnosis.from_dict(again.to_dict())
    assert read.findings == again.findings
    assert read.to_dict()["explained"][0]["kind"] == again.explained[0].kind


def test_the_numbers_of_the_evidence_are_those_of_the_docs() -> None:
    page = (ROOT / "docs" / "should-i-use-it.md").read_text(encoding="utf-8")
    for finding in explain(OVERFOCUSED, Situation(depth=12)) + explain(UNIFORM, Situation(depth=12)):
        for number in re.findall(r"\d+\.\d+", finding.evidence):
            assert f"−{number}" in page or number in page
    assert "do not add ADL for a short fine-tuning" in page


def test_references_come_from_whole_models_and_thresholds_are_drawn() -> None:
    for model in reference()["models"].values():
        values = [value for key, value in model.items() if key != "model"]
        assert all(len(found) == 12 and all(-0.1 <= v <= 1 for v in found) for found in values)
    assert default_thresholds().keys() >= {f.name for r in READINGS.values() for f in r.thresholds}
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    diagnosis = Diagnosis(OVERFOCUSED, "model", 4, (224, 224), "gaussian_noise/3", depth=12)
    for kind in ("overfocus", "heads", "diversity", "entropy"):
        labels = plot({"model": diagnosis}, kind).axes[0].get_legend_handles_labels()[1]
        assert any(label.startswith("threshold") for label in labels), kind
        assert "DeiT-Ti and ViT-Ti, for comparison" in labels
