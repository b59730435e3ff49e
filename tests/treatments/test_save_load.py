"""Saving and loading: what is saved comes back, what is broken is named, and nothing is lost on the way."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from helpers.tiny import build
from safetensors.torch import load_file, save_file
from torch import nn

import vitfocus as vf
from vitfocus.anatomy import input_spec
from vitfocus.treatments.save_load import open_model

SPEC = "cbs(layers=upper)+tap(branches=3)+adl(weight=0.5)"


def randomise(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.mark.parametrize(
    "family", ["vit", "vit_rect", "swin", "swin_v2", "pvt_v2", "eva02", "fan", "rvt", "pvt", "localvit", "pit"]
)
def test_timm_round_trip(family: str, tmp_path: Path) -> None:
    model, images = build(family)
    vf.treat_(model, SPEC)
    for name, parameter in model.named_parameters():
        if "context_scale" in name:
            nn.init.normal_(parameter)
    vf.save(model, tmp_path / "a")
    loaded = vf.load(tmp_path / "a")
    assert vf.applied(loaded) == vf.applied(model) and not loaded.training
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_config_says_everything(tmp_path: Path) -> None:
    model = vf.create_model(f"vit_tiny_patch16_224+{SPEC}", num_classes=7, depth=2, drop_path_rate=0.1)
    config = json.loads((vf.save(model, tmp_path / "a") / "config.json").read_text())
    assert config["base"] == "vit_tiny_patch16_224" and config["library"] == "timm"
    assert config["arguments"] == {"num_classes": 7, "depth": 2, "drop_path_rate": 0.1}
    assert config["treatments"] == SPEC.split("+") and config["vitfocus"] == vf.__version__
    assert config["preprocessing"]["size"] == [224, 224] and config["preprocessing"]["mean"] == [0.5, 0.5, 0.5]


def test_heads_that_shapes_do_not_show_are_kept(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_heads=6, num_classes=2).eval()
    assert vf.load(vf.save(model, tmp_path / "a")).blocks[0].attn.num_heads == 6


def test_a_new_classifier_is_kept(tmp_path: Path) -> None:
    model = vf.create_model("vit_tiny_patch16_224+cb", depth=1, num_classes=10)
    model.reset_classifier(3)
    assert vf.load(vf.save(model, tmp_path / "a")).head.out_features == 3


def test_changes_after_building_are_kept(tmp_path: Path) -> None:
    model = vf.create_model("vit_tiny_patch16_224+cb", depth=1, num_classes=3).eval()
    model.set_input_size(96)
    images = torch.randn(1, 3, 96, 96)
    assert torch.equal(vf.load(vf.save(model, tmp_path / "a"))(images), model(images))
    model.reset_classifier(3, "avg")  # no argument builds this: pooling changed, norm kept
    with pytest.raises(vf.VitfocusError, match="pass base="):
        vf.save(model, tmp_path / "b")


def test_what_cannot_be_told_is_asked_for(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, pre_norm=True)
    with pytest.raises(vf.VitfocusError, match="pass base="):
        vf.save(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    vf.save(model, tmp_path / "a", base="vit_tiny_patch16_224", arguments={"depth": 1, "pre_norm": True})
    assert torch.equal(vf.load(tmp_path / "a").head.weight, model.head.weight)


@pytest.mark.parametrize(
    ("base", "arguments", "said"),
    [
        ("nope", {}, "timm has no model 'nope'"),
        ("torchvision:nope", {}, "torchvision has no model 'nope'"),
        ("vit_tiny_patch16_224", {"depth": 2}, r"builds another model: blocks\.1.* differs"),
        ("vit_tiny_patch16_224", {"depht": 1}, "cannot be built with"),
        ("vit_tiny_patch16_224", {"depth": 1, "norm_layer": nn.LayerNorm}, "which config.json cannot hold"),
        ("hf-hub:someone/vit", {}, "a file may only name a model that is built into timm"),
        ("transformers:nope", {}, "is a model of transformers, and this one is vit_tiny_patch16_224"),
        (None, {"depth": 1}, "arguments are those of base"),
    ],
)
def test_a_base_that_builds_another_model_is_not_saved(
    base: str | None, arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = vf.create_model("vit_tiny_patch16_224+cbs", depth=1)
    with pytest.raises(vf.VitfocusError, match=said):
        vf.save(model, tmp_path / "a", base=base, arguments=arguments)
    assert not (tmp_path / "a" / "config.json").exists() and len(vf.applied(model)) == 1


@pytest.mark.parametrize(
    ("name", "key", "value", "low"),
    [
        ("vit_tiny_patch16_224", "depth", 0, 1),
        ("fan_tiny_12_p16_224", "depth", -1, 1),
        ("torchvision:vit_b_16", "num_layers", 0, 1),
        ("vit_tiny_patch16_224", "in_chans", 0, 1),
        ("vit_tiny_patch16_224", "num_classes", -1, 0),
        ("vit_tiny_patch16_224", "depth", 10**9, 1),
        ("transformers:ViTForImageClassification", "hidden_size", 10**12, 1),
        ("swin_tiny_patch4_window7_224", "depths", (2, 0, 2, 2), 1),
    ],
)
def test_a_model_has_blocks_channels_and_no_negative_classes(name: str, key: str, value: Any, low: int) -> None:
    with pytest.raises(vf.VitfocusError, match=f"needs {key} from {low} to [0-9,]+, not"):
        vf.create_model(name, **{key: value})


def test_a_state_dict_that_holds_itself_ends(tmp_path: Path) -> None:
    endless: dict[str, Any] = {}
    endless["model"] = {"state_dict": endless}
    torch.save(endless, tmp_path / "a.pt")
    with pytest.raises(vf.VitfocusError, match="does not fit the model: it lacks"):
        vf.load_weights(vf.create_model("vit_tiny_patch16_224", depth=1), tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["local-dir:{}", "LOCAL-DIR:{}", "HF-HUB:someone/vit", "timm/vit_tiny_patch16_224"])
def test_timm_opens_no_folder_by_itself(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
    with pytest.raises(vf.VitfocusError, match="timm has no model"):
        vf.create_model(name.format(tmp_path))


def test_an_empty_treatment_is_not_an_absent_one() -> None:
    with pytest.raises(vf.VitfocusError, match="treat='' names no treatment"):
        open_model("vit_tiny_patch16_224", treat="", depth=1)


def test_a_folder_of_whole_numbers_is_not_loaded(tmp_path: Path) -> None:
    vf.save(vf.create_model("vit_tiny_patch16_224", depth=1), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    before = hashlib.sha256(weights.read_bytes()).hexdigest()
    save_file({name: tensor.long() for name, tensor in load_file(weights).items()}, weights)
    after = hashlib.sha256(weights.read_bytes()).hexdigest()
    config.write_text(config.read_text().replace(before, after))
    with pytest.raises(vf.VitfocusError, match="is int64 there, and the model takes floating-point weights"):
        vf.load(tmp_path)


_TWO_STAGES = {"depths": (1, 1), "num_heads": (2, 4), "embed_dim": 24, "window_size": 4}
_VIT = {"depth": 1, "embed_dim": 24, "num_heads": 2, "img_size": 32}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("swin_tiny_patch4_window7_224", _TWO_STAGES | {"img_size": (56, 84)}),
        ("swinv2_cr_tiny_224", _TWO_STAGES | {"img_size": 64}),
        ("pvt_v2_b0", {"depths": (1, 1, 1, 1), "embed_dims": (16, 24, 32, 40), "num_heads": (1, 2, 2, 4)}),
        ("vit_tiny_patch16_224", _VIT | {"mlp_ratio": 2, "qk_norm": True, "init_values": 0.1, "num_classes": 0}),
    ],
)
def test_what_few_people_change_is_told_from_the_model(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = timm.create_model(name, **options).eval()
    images = torch.randn(2, 3, *vf.anatomy(model).build_size)
    loaded = vf.load(vf.save(vf.treat_(model, "cb"), tmp_path / "a"))
    assert torch.equal(loaded(images), model(images))


def test_a_loaded_model_wants_the_pixels_it_wanted_when_saved(tmp_path: Path) -> None:
    other, plain = (timm.create_model(f"vit_base_patch16_224{tag}", **_VIT) for tag in (".mae", ""))
    assert input_spec(other).mean != input_spec(plain).mean
    loaded = vf.load(vf.save(other, tmp_path / "a"))
    again = vf.load(vf.save(vf.treat_(loaded, "cbs"), tmp_path / "b"))
    assert input_spec(loaded) == input_spec(again) == input_spec(other)
    for key in ("crop_pct", "interpolation"):
        assert again.pretrained_cfg[key] == other.pretrained_cfg[key]


def test_torchvision_and_transformers(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 64, 64)
    model = randomise(torchvision.models.vit_b_32(image_size=64, num_classes=3))
    vf.treat_(model, "cb")
    assert torch.equal(vf.load(vf.save(model, tmp_path / "tv"))(images), model(images))
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=(64, 64),
        num_labels=3,
    )
    other = randomise(transformers.ViTForImageClassification(config))
    vf.treat_(other, "cbs+tap")
    assert torch.equal(vf.load(vf.save(other, tmp_path / "hf"))(images).logits, other(images).logits)
    vf.untreat_(other).save_pretrained(tmp_path / "plain")
    opened = open_model(str(tmp_path / "plain"), treat="cbs")
    torch.testing.assert_close(opened(images).logits, other(images).logits)
    vf.save(opened, tmp_path / "moved")
    shutil.rmtree(tmp_path / "plain")
    torch.testing.assert_close(vf.load(tmp_path / "moved")(images).logits, other(images).logits)


def test_pairs_in_a_config_do_not_make_another_model(tmp_path: Path) -> None:
    """Hiera keeps a list of its config's tuples, which are lists in a file."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.HieraConfig(embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], num_labels=3)
    model = vf.treat_(transformers.HieraForImageClassification(config), "cb").eval()
    vf.save(model, tmp_path)
    assert vf.applied(vf.load(tmp_path)) == vf.applied(model)


def test_a_saved_model_is_not_built_otherwise_than_it_was_saved(tmp_path: Path) -> None:
    vf.save(vf.create_model("vit_tiny_patch16_224", depth=1, img_size=32), tmp_path)
    with pytest.raises(vf.VitfocusError, match="built as it was saved, so num_classes cannot be changed"):
        open_model(str(tmp_path), num_classes=3)


def test_only_treatments(tmp_path: Path) -> None:
    model, images = build("vit")
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    vf.treat_(model, "cbs+tap")
    randomise(model.blocks[0].context_mlp)
    vf.save(model, tmp_path / "a", only="treatments")
    saved = load_file(tmp_path / "a" / "treatments.safetensors")
    assert saved and not set(saved) & set(plain)
    base, _ = build("vit", seed=1)
    base.load_state_dict(plain)
    assert torch.equal(vf.load(tmp_path / "a", onto=base)(images), model(images))
    with pytest.raises(vf.VitfocusError, match="onto its base model"):
        vf.load(tmp_path / "a")
    with pytest.raises(vf.VitfocusError, match="no treatment"):
        vf.save(vf.untreat_(model), tmp_path / "b", only="treatments")


def test_uniform_heads_are_saved_as_treatments(tmp_path: Path) -> None:
    model, images = build("vit")
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    vf.treat_(model, "uniform(mode=append)+cbs")
    vf.save(model, tmp_path / "a", only="treatments")
    base, _ = build("vit", seed=1)
    base.load_state_dict(plain)
    assert torch.equal(vf.load(tmp_path / "a", onto=base)(images), model(images))


def test_broken_folders_are_named(tmp_path: Path) -> None:
    model, images = build("vit")
    vf.save(vf.treat_(model, "cbs"), tmp_path / "good")
    onto, _ = build("vit", seed=1)
    before = onto(images)

    def broken(change: Any) -> Path:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        change(tmp_path / "bad")
        return tmp_path / "bad"

    def edit(**changes: Any) -> Any:
        def change(folder: Path) -> None:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, **changes}))

        return change

    def flip(folder: Path) -> None:
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "model.safetensors").write_bytes(data)

    cases = [
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
            "truncated or was changed",
        ),
        (flip, "truncated or was changed"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights file"),
        (lambda f: (f / "config.json").unlink(), "no .*config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "config.json").write_text("{}"), "was not written by vitfocus"),
        (edit(format=99), "format 99"),
        (edit(treatments=["tpa"]), "did you mean 'tap'"),
        (edit(treatments=None), "was changed since"),
        (edit(treatments=[1]), "was changed since"),
        (edit(treatments=1.5), "was changed since"),
        (edit(arguments=None), "was changed since"),
        (edit(only="some"), "was changed since"),
        (edit(base=3), "was changed since"),
        (edit(treatments=["cbs", "tap"]), "lacks"),
        (edit(treatments=[]), "unexpected"),
    ]
    for change, said in cases:
        with pytest.raises(vf.VitfocusError, match=said):
            vf.load(broken(change), onto=onto)
        assert not vf.applied(onto) and torch.equal(onto(images), before)
    with pytest.raises(vf.VitfocusError, match="did you mean 'vit_tiny_patch16_224'"):
        vf.load(broken(edit(base="vit_tiny_patch16_242")))
    with pytest.raises(vf.VitfocusError, match="untreat it first"):
        vf.load(tmp_path / "good", onto=vf.treat_(onto, "tap"))


def test_a_failed_save_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = build("vit")
    vf.save(model, tmp_path / "a")
    expected = model(images)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("vitfocus.treatments.save_load.save_file", full)
    with pytest.raises(OSError, match="No space"):
        vf.save(build("vit", seed=1)[0], tmp_path / "a")
    assert torch.equal(vf.load(tmp_path / "a")(images), expected)
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_hub_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushing uploads a folder that loads; fetching loads the folder that the hub hands back."""
    import huggingface_hub

    def upload(self: Any, *, repo_id: str, folder_path: str, **options: Any) -> str:
        shutil.copytree(folder_path, tmp_path / repo_id)
        return f"https://example.invalid/{repo_id}"

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda self, name, exist_ok: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: str(tmp_path / name))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file: str(tmp_path / name / file))
    model, images = build("vit")
    assert vf.push(vf.treat_(model, "cb"), "someone/model").endswith("someone/model")
    assert torch.equal(vf.load("hf-hub:someone/model")(images), model(images))
    assert torch.equal(open_model("hf-hub:someone/model")(images), model(images))


def test_a_model_comes_back_in_its_precision(tmp_path: Path) -> None:
    model, images = build("vit")
    vf.treat_(model, "cbs").eval().bfloat16()
    model.get_submodule("norm").float()
    vf.save(model, tmp_path)
    found = vf.load(tmp_path)
    assert [one.dtype for one in found.parameters()] == [one.dtype for one in model.parameters()]
    model.get_submodule("norm").bfloat16(), found.get_submodule("norm").bfloat16()
    assert torch.equal(found(images.bfloat16()), model(images.bfloat16()))
    scores = vf.evaluate(found, "clean", [(torch.zeros(2, 3, *images.shape[-2:], dtype=torch.uint8), torch.zeros(2))])
    assert scores["top1"] in (0.0, 100.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("swin_tiny_patch4_window7_224", {"window_size": 4, "embed_dim": 12, "depths": (2, 1), "num_heads": (2, 2)}),
        ("beit_base_patch16_224", {"embed_dim": 24, "depth": 1, "num_heads": 2}),
        ("eva02_tiny_patch14_224", {"embed_dim": 24, "depth": 1, "num_heads": 2, "patch_size": 16}),
    ],
)
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_buffers_that_are_not_saved_come_back_in_their_precision(
    name: str, options: dict[str, Any], precision: torch.dtype, tmp_path: Path
) -> None:
    model = vf.treat_(timm.create_model(name, img_size=64, num_classes=3, **options), "cbs+adl").eval().to(precision)
    images = torch.randn(2, 3, 64, 64, dtype=precision)
    found = vf.load(vf.save(model, tmp_path))
    assert {key: one.dtype for key, one in found.named_buffers()} == {
        key: one.dtype for key, one in model.named_buffers()
    }
    assert torch.equal(found(images), model(images))
    config = json.loads((tmp_path / "config.json").read_text())
    config["buffers"] = dict.fromkeys(config["buffers"], "bfloat61")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(vf.VitfocusError, match="did you mean 'bfloat16'"):
        vf.load(tmp_path)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "names no model"),
        ("+cb", "names no model"),
        ("vit_tiny_patch16_242", "did you mean 'vit_tiny_patch16_224'"),
        ("torchvision:vit_b_61", "did you mean 'vit_b_16'"),
        ("vit_tiny_patch16_224+tpa", "did you mean 'tap'"),
        ("vit_tiny_patch16_224+cb(site=mpl)", "did you mean 'mlp'"),
    ],
)
def test_misspelt_names_suggest_the_nearest(spec: str, said: str) -> None:
    with pytest.raises(vf.VitfocusError, match=said):
        vf.create_model(spec)


def test_create_model_equals_treating_by_hand() -> None:
    torch.manual_seed(0)
    made = vf.create_model("vit_tiny_patch16_224+cb(layers=upper)+adl", depth=2, num_classes=3).eval()
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=3).eval()
    vf.treat_(plain, vf.ContextBroadcasting(layers="upper"), vf.AttentionDiversification())
    images = torch.randn(1, 3, 224, 224)
    assert torch.equal(made(images), plain(images)) and vf.applied(made) == vf.applied(plain)
    with pytest.raises(vf.VitfocusError, match="cannot be built with"):
        vf.create_model("vit_tiny_patch16_224", depht=2)
    with pytest.raises(vf.VitfocusError, match=r"cannot be built with \{'qkv_bias': 1, 'in_chans': 'x'\}: "):
        vf.create_model("vit_tiny_patch16_224", qkv_bias=1, in_chans="x")
    for heads in (0, -3):  # -3 divides the width
        with pytest.raises(vf.VitfocusError, match=f"needs num_heads from 1 to 10,000, not {heads}"):
            vf.create_model("vit_tiny_patch16_224", num_heads=heads)


def test_files_that_are_no_models_are_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architecture": 3}')
    with pytest.raises(vf.VitfocusError, match="timm cannot build the model in"):
        open_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(vf.VitfocusError, match=r"notes\.txt cannot be read as weights: KeyError, 101\."):
        vf.load_weights(build("vit")[0], tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("vit_tiny_patch16_224", {"depth": 1, "img_size": 64, "class_token": False, "global_pool": "avg"}, 64),
        ("vit_tiny_patch16_224", {"depth": 1, "img_size": 64, "reg_tokens": 3}, 64),
        ("vit_tiny_patch16_224", {"depth": 1, "dynamic_img_size": True, "dynamic_img_pad": True}, 70),
        ("swin_tiny_patch4_window7_224", {"depths": (2, 2), "img_size": 64, "window_size": 4}, 64),
        ("swinv2_cr_tiny_224", {"img_size": 64, "window_size": 4}, 64),
        ("naflexvit_base_patch16_gap", {"depth": 1, "embed_dim": 48, "num_heads": 3}, 64),
        # DaVit's and MaxViT's blocks hold two attentions, and those of CoAtNet's first stages none.
        ("davit_tiny", {"depths": (1, 1, 2, 1)}, 64),
        ("maxvit_rmlp_pico_rw_256", {"depths": (1, 1, 2, 1), "img_size": 64}, 64),
        ("coatnet_pico_rw_224", {"depths": (1, 1, 2, 1)}, 224),
    ],
)
def test_what_timm_was_asked_for_is_told_from_the_model(
    name: str, options: dict[str, Any], size: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = vf.treat_(timm.create_model(name, num_classes=3, **options).eval(), "cb")
    images = torch.randn(1, 3, size, size)
    vf.save(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(vf.load(tmp_path)(images), model(images))


def test_patches_that_do_not_cover_the_image_are_warned_of() -> None:
    with pytest.warns(vf.VitfocusWarning, match="does not see the last 4 rows and 0 columns of pixels"):
        vf.create_model("vit_tiny_patch16_224", depth=1, img_size=(36, 32))
    with pytest.warns(vf.VitfocusWarning, match="Patches of 16×16 pixels do not divide an image of 40×40"):
        small = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
        vf.create_model("transformers:ViTForImageClassification", image_size=40, patch_size=16, **small)
    with warnings.catch_warnings():
        warnings.simplefilter("error", vf.VitfocusWarning)
        vf.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
        vf.create_model("vit_tiny_patch16_224", depth=1, img_size=36, dynamic_img_pad=True)
