"""What a terminal and a notebook show of results: one line for `repr`, escaped tables for `_repr_html_`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from helpers.tiny import build

import vitfocus as vf
from vitfocus.attention.findings import Situation, explain
from vitfocus.robustness.results import Scores

HOSTILE = "<script>alert('&')</script>"


def results() -> dict[str, Any]:
    rows = [
        {
            "layer": 0,
            "name": "a",
            "attention_kind": "global",
            "entropy": 4.15,
            "entropy_bound": 4.17,
            "stability": 0.99,
        },
        {
            "layer": 1,
            "name": "b",
            "attention_kind": "global",
            "entropy": 4.14,
            "entropy_bound": 4.17,
            "stability": 0.98,
        },
    ]
    plain, other = (vf.Diagnosis(rows, name, 4, (32, 32), HOSTILE, depth=2) for name in (HOSTILE, "other"))
    outcomes = {name: {"top1": np.array([True, False])} for name in (HOSTILE, "other")}
    summary = {"top1": 50.0, "cells": {"clean": {"top1": 50.0}}}
    scores = Scores("clean", 2, dict.fromkeys(outcomes, summary), (HOSTILE,), samples={"clean": outcomes})
    return {"diagnosis": plain, "comparison": plain.compare(other), "scores": scores,
            "difference": scores.compare(HOSTILE, "other"), "table": scores.table()}  # fmt: skip


@pytest.mark.parametrize("name", ["diagnosis", "comparison", "scores", "difference", "table"])
def test_results_show_themselves(name: str) -> None:
    result = results()[name]
    html = result._repr_html_()
    assert html.count("<td") >= 2 and "&lt;script&gt;" in html and "<script" not in html
    if name != "table":
        assert re.fullmatch(r"<\w+ (of|on) .{1,140}>", repr(result))
        assert len(str(result).splitlines()) > 2  # printing shows the table


def test_a_comparison_says_that_uniform_attention_looks_good_for_that_reason_alone() -> None:
    comparison = results()["comparison"]
    assert comparison.findings[-1].endswith("nearly uniform, which alone lowers overfocus and raises stability.")


def test_every_finding_of_a_trained_model_is_complete() -> None:
    """What was read, the reference, what it may mean, the evidence and the next step; in every situation."""
    row = {"layer": 11, "attention_kind": "global", "entropy": 1.0, "entropy_bound": 5.0, "entropy_p85": 4.8}
    row |= {"overfocus": 0.2, "head_similarity": 0.9, "diversity_official": 0.9, "stability": 0.4, "high_norm": 0.02}
    rows = [{**row, "layer": 10, "overfocus": 0.5}, row, {**row, "layer": 9, "entropy": 4.9}]
    found = explain(rows, Situation((), True, "gaussian_noise/3", 12))
    kinds = {"overfocus", "uniform", "narrow", "spread", "alike_heads", "alike_rows", "unstable", "high_norm"}
    assert {one.kind for one in found} == kinds
    for one in found:
        assert one.read and one.reference and one.meaning and one.evidence and one.command, one.kind
    layers = {one.kind: one.layers for one in found}
    assert not set(layers["overfocus"]) & set(layers["uniform"])
    carrying = explain(rows, Situation(("cb", "tap", "adl", "registers"), True, "gaussian_noise/3", 12))
    for one in carrying:
        assert not re.search(r"with and without `cb|adding TAP|find_registers", f"{one.evidence} {one.command}"), one


def test_high_norm_tokens_are_counted_in_the_explorer() -> None:
    from vitfocus.report.explorer_maps import Reader

    model, images = build("vit", seed=3)
    reader = Reader("vit", model)
    look = reader.observe((images[0] * 0 + 128).byte())
    view = reader.pack(reader.blocks[1], [look])[0]
    patches = 16
    share = len(view.get("k", [])) / patches
    assert view["r"][0]["high_norm"] == f"{share:.2%}" and "high_norm" not in view["r"][1]
