"""What only a GPU can show: treated models there, in bf16, compiled, and agreed with the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.tiny import build

import vitfocus as vf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ALL = "cbs+tap+adl(variant=paper,threshold=1.0)+se"


@pytest.mark.parametrize("family", ["vit", "swin", "swin_v2", "pvt_v2", "fan"])
def test_treated_on_the_gpu_equals_the_cpu(family: str) -> None:
    model, images = build(family)
    with torch.no_grad():
        expected = vf.treat_(model, ALL)(images)
        moved = model.cuda()(images.cuda()).cpu()
        torch.testing.assert_close(moved, expected, atol=1e-3, rtol=1e-3)
        plain = vf.untreat_(model)(images.cuda())
        torch.manual_seed(0)
        vf.treat_(model, "uniform+cb" if family == "vit" else "cb")
        assert torch.equal(vf.untreat_(model)(images.cuda()), plain)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_steps_in_bf16(mode: str) -> None:
    model, images = build("vit")
    vf.treat_(model, ALL).train().cuda()
    images = images.cuda()
    step = torch.compile(model, fullgraph=True, mode=mode)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16):
            output = step(images)
        loss = output.float().square().mean() + vf.auxiliary_loss(step)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(torch.tensor(losses).isfinite())


def test_a_recorded_run_is_the_unrecorded_one(tmp_path: Path) -> None:
    from vitfocus.train import load_recipe, train

    def weights(name: str, *overrides: str) -> dict[str, torch.Tensor]:
        spec = "spec=vit_tiny_patch16_224+cbs+tap+adl(variant=paper,threshold=1.0,rows=9)"
        small = ["train_length=512", "val_length=64", "epochs=1", "mixup=0.8", "cutmix=1.0", "erase=0.3", "clip=1"]
        recipe = load_recipe("shapes", [spec, *small, "randaugment=rand-m9", "drop_path=0.1", *overrides])
        train(recipe, tmp_path / name)
        return vf.load(tmp_path / name / "model").state_dict()

    recorded, usual = weights("recorded"), weights("usual", "record=no")
    assert all(torch.equal(value, usual[name]) for name, value in recorded.items())
