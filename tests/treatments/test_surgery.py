"""Surgery: whatever goes in comes out again, and everything a model is used for still works in between."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from helpers.tiny import TIMM, build
from torch import nn

import vitfocus as vf
from vitfocus.treatments.surgery import columns

SPECS = [
    *("cb", "cbs(layers=upper)", "cbs(site=attention)", "cb(site=both)", "cb(position=mid)", "cb(variant=gate)"),
    *("cb(site=attention,position=front)", "tap", "tap(mode=conv3)", "adl", "se", "extra", "extra(kind=mlp)"),
    *("uniform", "uniform(mode=append)", "cb+tap+adl+se", "registers", "ttr(neurons=[[0,1],[1,0]])", "gate"),
    *("gate(per=channel)", "qknorm", "sigma", "sigma(site=attention)", "tap+gate+cb+sigma+registers+qknorm+adl"),
]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", TIMM)
def test_round_trip_in_every_family(family: str) -> None:
    model, images = build(family)
    images = images[:1]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reached = 0
    with torch.no_grad():
        plain = model(images)
        for spec in SPECS:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    vf.treat_(model, spec)
            except vf.VitfocusError:
                assert same(model.state_dict(), before) and not vf.applied(model)
                continue
            reached += 1
            assert "uniform" in spec or set(before) <= set(model.state_dict())
            treated = model(images)
            assert treated.isfinite().all()
            with vf.untreated(model):
                assert same(model.state_dict(), before) and torch.equal(model(images), plain)
            assert torch.equal(model(images), treated)
            assert vf.untreat_(model) is model and not vf.applied(model)
            assert same(model.state_dict(), before) and torch.equal(model(images), plain)
            assert torch.equal(treated, plain) == spec.startswith(("adl", "cbs")), spec
    assert reached >= 4


def test_untreated_comes_back_after_an_exception() -> None:
    model, images = build("vit")
    vf.treat_(model, "cb+tap")
    with torch.no_grad():
        treated = model(images)
        with pytest.raises(RuntimeError, match="boom"), vf.untreated(model):
            raise RuntimeError("boom")
        assert torch.equal(model(images), treated) and len(vf.applied(model)) == 2


@pytest.mark.parametrize("spec", columns().values())
def test_the_same_one_twice_is_refused(spec: str) -> None:
    model, _ = build("vit")
    vf.treat_(model, spec)
    keys = list(model.state_dict())
    with pytest.raises(vf.VitfocusError):
        vf.treat_(model, spec)
    assert list(model.state_dict()) == keys and len(vf.applied(model)) == 1


def test_two_sites_are_two_treatments() -> None:
    model, images = build("vit")
    vf.treat_(model, "cb(site=attention)", "cb")
    both, _ = build("vit")
    vf.treat_(both, "cb(site=both)")
    assert torch.equal(model(images), both(images))


def test_all_or_nothing() -> None:
    model, _ = build("mixer")
    keys = list(model.state_dict())
    with pytest.raises(vf.VitfocusError):
        vf.treat_(model, "cbs", "tap")
    assert list(model.state_dict()) == keys and not vf.applied(model)


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_spec_is_not_the_absence_of_one(text: str) -> None:
    with pytest.raises(vf.VitfocusError, match="names no treatment"):
        vf.treat_(build("vit")[0], text)


def test_order_is_kept_and_structure_goes_first() -> None:
    model, images = build("vit")
    vf.treat_(model, "adl+uniform+cb")
    assert [str(treatment) for treatment in vf.applied(model)] == ["adl", "uniform", "cb"]
    model.train()(images)
    assert vf.auxiliary_loss(model).requires_grad
    with pytest.raises(vf.VitfocusError, match="before any other"):
        vf.treat_(vf.treat_(vf.untreat_(model), "cb"), "uniform")


@pytest.mark.parametrize("family", ["vit", "swin_v2", "pvt_v2"])
def test_copies_are_independent(family: str) -> None:
    model, images = build(family)
    vf.treat_(model, "cbs+tap+adl(threshold=1.0)").train()
    model(images)
    vf.auxiliary_loss(model)
    twin = copy.deepcopy(model).eval()
    assert vf.applied(twin) == vf.applied(model)
    with torch.no_grad():
        expected = model.eval()(images)
        assert torch.equal(twin(images), expected)
        for name, parameter in twin.named_parameters():
            if "context_scale" in name:
                parameter.add_(1.0)
        assert not torch.equal(twin(images), expected) and torch.equal(model(images), expected)
        vf.untreat_(twin)
        assert torch.equal(model(images), expected) and len(vf.applied(model)) == 3
    twin = vf.treat_(twin, "adl(threshold=1.0)").train()
    twin(images)
    assert vf.auxiliary_loss(twin) > 0
    assert vf.auxiliary_loss(model).item() == 0  # its last forward was in eval mode; the twin's is not its own


def test_pickle_and_state_dict_round_trips() -> None:
    model, images = build("swin_v2")
    vf.treat_(model, "cbs+tap+adl").train()
    model(images)
    model.eval()
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(images), model(images)) and vf.applied(twin) == vf.applied(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other, _ = build("swin_v2", seed=1)
    vf.treat_(other, "cbs+tap+adl").load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(images), model(images))


def test_plain_checkpoint_still_loads() -> None:
    model, _ = build("vit")
    plain = copy.deepcopy(model.state_dict())
    result = vf.treat_(model, "cbs+tap").load_state_dict(plain, strict=False)
    assert not result.unexpected_keys
    assert all("context_mlp" in name or "dilation_predictor" in name for name in result.missing_keys)


@pytest.mark.parametrize("size", [(64, 64), (32, 96), (128, 48), (16, 16)])
@pytest.mark.parametrize("spec", ["cb+tap+adl", "tap(mode=kernel)+se"])
def test_other_sizes_and_rectangles(size: tuple[int, int], spec: str) -> None:
    for family, more in (("vit", {"dynamic_img_size": True}), ("pvt_v2", {}), ("fan", {})):
        if family != "vit" and min(size) < 32:
            continue
        model, _ = build(family, **more)
        vf.treat_(model, spec).train()
        if size == (16, 16):
            model.eval()
        assert model(torch.randn(1 if size == (16, 16) else 2, 3, *size)).isfinite().all()


def test_batch_of_one_and_channels_last() -> None:
    for family in ("vit", "swin", "maxvit"):
        model, images = build(family)
        vf.treat_(model, "cbs+tap+adl")
        with torch.no_grad():
            whole = model(images)
            torch.testing.assert_close(model(images[:1]), whole[:1], atol=1e-5, rtol=1e-4)
            again = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
        torch.testing.assert_close(again, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_low_precision(dtype: torch.dtype) -> None:
    model, images = build("vit")
    vf.treat_(model, "cb+tap+adl(variant=paper,threshold=1.0)").train()
    with torch.autocast("cpu", dtype=dtype):
        loss = model(images).float().square().mean() + vf.auxiliary_loss(model)
    assert loss.dtype == torch.float32 and loss.isfinite()
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    if dtype == torch.bfloat16:
        half = vf.untreat_(model).to(dtype).eval()
        assert vf.treat_(half, "cbs+tap")(images.to(dtype)).dtype == dtype


def test_added_modules_follow_mode_and_device() -> None:
    model, _ = build("vit")
    vf.treat_(model.train().to("meta"), "uniform+tap+cbs")
    added = [module for name, module in model.named_modules() if "dilation" in name or "context" in name]
    assert added and all(module.training for module in added)
    assert all(p.device.type == "meta" for p in model.parameters())


def test_wrapped_models_are_treated_inside() -> None:
    class Segmenter(nn.Module):
        def __init__(self, backbone: nn.Module) -> None:
            super().__init__()
            self.backbone = backbone
            self.head = nn.Linear(5, 2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.backbone(images))

    backbone, images = build("vit")
    model = Segmenter(backbone).eval()
    plain = model(images)
    vf.treat_(model, "cb")
    assert vf.anatomy(model)[0].name == "backbone.blocks.0"
    assert not torch.equal(model(images), plain)
    assert torch.equal(vf.untreat_(model)(images), plain)


@pytest.mark.parametrize("call", [vf.anatomy, vf.applied, vf.untreat_, lambda model: vf.treat_(model, "cb")])
def test_what_is_no_model_is_refused(call: Any) -> None:
    for given, described in (("deit_tiny_patch16_224", "'deit_tiny_patch16_224'"), ({}, "{}")):
        with pytest.raises(vf.VitfocusError, match=f"model is {described}; expected a torch"):
            call(given)


def test_unknown_models_are_refused_by_name() -> None:
    class VisionTransfromer(nn.Module):
        pass

    with pytest.raises(
        vf.VitfocusError, match=r"^VisionTransfromer is of no family.*takes no image.*vitfocus\.register"
    ):
        vf.anatomy(VisionTransfromer())
    with pytest.raises(vf.VitfocusError, match=r"cb cannot be applied: Sequential is of no.*no softmax attention"):
        vf.treat_(nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.ReLU()), "cb")
    with pytest.raises(vf.VitfocusError, match="treatments is 3; expected"):
        vf.treat_(build("vit")[0], 3)  # type: ignore[arg-type]
    two = nn.ModuleList([build("vit")[0], build("vit")[0]])
    with pytest.raises(vf.VitfocusError, match="contains 2 vision transformers"):
        vf.anatomy(two)


def test_treating_while_untreated_is_refused() -> None:
    model, images = build("vit")
    vf.treat_(model, "cb")
    treated = model(images)
    with vf.untreated(model):
        for change in (lambda: vf.treat_(model, "tap"), lambda: vf.untreat_(model)):
            with pytest.raises(vf.VitfocusError, match="outside"):
                change()
    assert torch.equal(model(images), treated) and len(vf.applied(model)) == 1


@pytest.mark.parametrize("spec", ["cbs+tap", "uniform"])
def test_what_happens_while_untreated_reaches_the_treatments(spec: str) -> None:
    model, images = build("vit", attn_drop_rate=0.5)
    vf.treat_(model.train(), spec)
    with vf.untreated(model):
        model.eval().double()
        assert not any(module.training for module in model.modules())
    assert not any(module.training for module in model.modules())
    assert model(images.double()).dtype == torch.float64
    vf.untreat_(model.train())
    assert all(module.training for module in model.modules())


def test_a_forward_while_untreated_leaves_no_stale_loss() -> None:
    model, images = build("vit")
    vf.treat_(model, "adl(threshold=1.0)").train()
    model(images)
    with vf.untreated(model):
        model(images)
    assert vf.auxiliary_loss(model).item() == 0


def test_patches_that_are_not_square() -> None:
    model, images = build("vit", patch_size=(8, 16))
    assert vf.anatomy(model)[0].grid() == (8, 4)
    assert vf.treat_(model, "tap")(images).isfinite().all()


def test_image_ports_hold_no_class_token() -> None:
    """LocalViT's feed-forward sees the patch tokens as an image: there is no class token to gate with."""
    model, images = build("localvit")
    for spec in ("cb(variant=gate)", "cb(variant=hybrid)"):
        with pytest.raises(vf.VitfocusError, match="class token"):
            vf.treat_(model, spec)
    with torch.no_grad():
        whole = vf.treat_(model, "cb")(images)
        assert torch.equal(vf.treat_(vf.untreat_(model), "cb(tokens=image)")(images), whole)
