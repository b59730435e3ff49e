"""A treatment is one file and one export: all that shows, reads, saves or counts treatments finds it by itself."""

from __future__ import annotations

import copy
import importlib
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.tiny import build

import vitfocus as vf
from vitfocus import treatments
from vitfocus.cli import main
from vitfocus.report.model_card import make_card
from vitfocus.report.models import block_diagram
from vitfocus.treatments.base import TREATMENTS, Treatment, all_treatments, keywords
from vitfocus.treatments.cost import count_cost
from vitfocus.treatments.spec import parse_treatments
from vitfocus.treatments.surgery import placements

ROOT = Path(__file__).parents[2]


def written_file() -> str:
    """The example that CONTRIBUTING.md gives under "Adding a treatment", word for word."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Adding a treatment")[2]
    return textwrap.dedent(section.partition("```python\n")[2].partition("   ```")[0])


@pytest.fixture
def token_shift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example as a module of the room, exported from it; forgotten again after the test."""
    (tmp_path / "token_shift.py").write_text(written_file(), encoding="utf-8")
    monkeypatch.setattr(treatments, "__path__", [*treatments.__path__, str(tmp_path)])
    module = importlib.import_module("vitfocus.treatments.token_shift")
    monkeypatch.setattr(treatments, "TokenShift", module.TokenShift, raising=False)  # the export
    yield module
    del TREATMENTS["shift"], sys.modules["vitfocus.treatments.token_shift"]
    vars(vf).pop("TokenShift", None)
    vars(treatments).pop("token_shift", None)


def test_a_new_treatment_is_one_file_and_one_export(
    token_shift: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = vf.TokenShift(layers=[1])
    assert str(record) == "shift(layers=[1])" and parse_treatments(str(record)) == [record]
    assert str(vf.TokenShift(sign="minus")) == "unshift" and parse_treatments("unshift(layers=upper)") == [
        vf.TokenShift(sign="minus", layers="upper")
    ]
    with pytest.raises(vf.VitfocusError, match="did you mean 'shift'"):
        parse_treatments("shfit")

    model, images = build("vit")
    plain_keys, plain_cost = list(model.state_dict()), count_cost(model, 64)
    with torch.no_grad():
        plain = model(images)
        with pytest.warns(vf.VitfocusWarning, match="shift changes what these trained weights compute"):
            vf.treat_(model, vf.TokenShift())
        treated = model(images)
        assert not torch.equal(treated, plain) and torch.equal(copy.deepcopy(model)(images), treated)
        cost, tokens = count_cost(model, 64), 16 + 1
        width = next(iter(vf.anatomy(model))).width
        assert cost.parameters - plain_cost.parameters == len(vf.anatomy(model)) * width
        assert cost.flops - plain_cost.flops == len(vf.anatomy(model)) * tokens * width

        twin = vf.load(vf.save(model, tmp_path / "saved"))
        assert [str(one) for one in vf.applied(twin)] == ["shift"] and torch.equal(twin(images), treated)

        assert {place.place for place in placements(model)} == {"mlp.end"}
        card = make_card(model, timed=False)
        drawn = block_diagram("model", card.blocks)
        assert "badge c3" in drawn and ">Sh<" in drawn

        with vf.untreated(model):
            assert torch.equal(model(images), plain)
        vf.untreat_(model)
        assert list(model.state_dict()) == plain_keys and torch.equal(model(images), plain)

    assert main(["models", "vision_transformer", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["treatments"]["shift"] is True for row in rows if row["library"] == "timm")
    assert main(["models", "mixer"]) == 0
    assert "shift" in capsys.readouterr().out.splitlines()[0].split()
    assert main(["completion", "bash", "--json"]) == 0
    options = json.loads(capsys.readouterr().out)["commands"]["diagnose"]["options"]
    assert {"shift", "unshift"} <= set(options["--treat"])


def test_every_treatment_says_what_it_is() -> None:
    newer = ["gate", "qknorm", "registers", "sigma", "ttr"]
    assert [kind.name for kind in all_treatments()] == ["cb", "tap", "adl", "se", "uniform", "extra", *newer]
    assert set(keywords()) == {*TREATMENTS, "cbs"}
    for kind in all_treatments():
        assert (
            getattr(vf, kind.__name__) is kind
            and getattr(treatments, kind.__name__) is kind
            and kind.__name__ in dir(vf)
        )
        assert kind.label and kind.about and not kind.about.endswith(".") and 0 <= kind.colour <= 6
        for spec in kind.columns.values():
            assert isinstance(parse_treatments(spec)[0], kind)


def test_a_keyword_belongs_to_one_treatment() -> None:
    with pytest.raises(vf.VitfocusError, match="There is a treatment 'cb' already, ContextBroadcasting"):
        type("Other", (Treatment,), {"name": "cb"})
