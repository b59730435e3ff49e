"""`diagnose` on real model families against maps obtained without the probe, and its manners towards the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from helpers.naive_readings import cosine, naive_row
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vitfocus as vf
from vitfocus.anatomy import anatomy
from vitfocus.attention import plots
from vitfocus.attention.diagnosis import Diagnosis, diagnose
from vitfocus.attention.layer_readings import Geometry
from vitfocus.cli import main
from vitfocus.cli.diagnose import image_files
from vitfocus.core.errors import VitfocusError
from vitfocus.data.image_files import read_image
from vitfocus.data.shapes.dataset import shapes_batch


def tiny_vit(**options) -> nn.Module:
    torch.manual_seed(0)
    return sharpen(
        timm.create_model("vit_tiny_patch16_224", **{"depth": 2, "img_size": 64, "num_classes": 3} | options)
    )


def sharpen(model: nn.Module) -> nn.Module:
    """Fresh weights attend uniformly; larger ones make maps worth reading."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and any(
                part in name for part in ("qkv", "q_proj", "k_proj", "query", "key", "in_proj", ".q.", ".kv.")
            ):
                parameter.normal_(std=0.25 if parameter.shape[-1] < 100 else 0.12)
    return model.eval()


def images_of(height: int, width: int, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def timm_maps(model: nn.Module, images: torch.Tensor) -> list[np.ndarray]:
    """Maps as timm itself makes them when fused attention is off: what its attention dropout receives."""
    maps, handles, fused = [], [], []
    for module in model.modules():
        if isinstance(getattr(module, "attn_drop", None), nn.Module) and hasattr(module, "fused_attn"):
            fused.append((module, module.fused_attn))
            module.fused_attn = False
            handles.append(module.attn_drop.register_forward_pre_hook(lambda _, args: maps.append(args[0].numpy())))
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    for module, was in fused:
        module.fused_attn = was
    return maps


def hugging_face_maps(model: nn.Module, images: torch.Tensor) -> list[np.ndarray]:
    from transformers import ViTModel

    eager = ViTModel._from_config(model.config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        return [maps.numpy() for maps in eager(images, output_attentions=True).attentions]


def torchvision_maps(model: nn.Module, images: torch.Tensor) -> list[np.ndarray]:
    maps, handles = [], []
    for layer in model.encoder.layers:
        attention = layer.self_attention
        handles.append(
            attention.register_forward_pre_hook(
                lambda module, args: maps.append(
                    nn.MultiheadAttention.forward(module, *args[:3], need_weights=True, average_attn_weights=False)[
                        1
                    ].numpy()
                )
            )
        )
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return maps


def hugging_face_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=48, patch_size=8
    )
    return sharpen(transformers.ViTModel(config))


def torchvision_vit() -> nn.Module:
    torch.manual_seed(0)
    return sharpen(torchvision.models.VisionTransformer(48, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64))


def swin() -> nn.Module:
    torch.manual_seed(0)
    options = {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}
    return sharpen(timm.create_model("swin_tiny_patch4_window7_224", **options))


def pvt() -> nn.Module:
    torch.manual_seed(0)
    return sharpen(timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1)))


Maps = Callable[[nn.Module, torch.Tensor], list[np.ndarray]]
FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], Maps, list[tuple]]] = {
    # model, image size, maps without the probe, (query grid, key grid, prefix tokens) of each layer
    "timm ViT": (lambda: tiny_vit(img_size=(448, 320)), (448, 320), timm_maps, [((28, 20), (28, 20), 1)] * 2),
    "timm Swin": (swin, (56, 56), timm_maps, [((7, 7), (7, 7), 0)] * 4),
    "timm PVTv2": (
        pvt,
        (64, 96),
        timm_maps,
        [((16, 24), (2, 3), 0), ((8, 12), (2, 3), 0), ((4, 6), (2, 3), 0), ((2, 3), (2, 3), 0)],
    ),
    "Hugging Face ViT": (hugging_face_vit, (48, 48), hugging_face_maps, [((6, 6), (6, 6), 1)] * 2),
    "torchvision ViT": (torchvision_vit, (48, 48), torchvision_maps, [((6, 6), (6, 6), 1)] * 2),
}


NAMES, NORMS = ("layer", "name", "attention_kind"), ("high_norm", "norm_ratio")


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_an_independent_computation(family: str) -> None:
    build, size, explicit, grids = FAMILIES[family]
    model, images = build(), images_of(*size, count=1 if size[0] > 100 else 2)
    other = images + 0.3 * images_of(*size, count=len(images)).flip(-1)
    diagnosis = diagnose(model, images, against=other)
    maps, corrupted = explicit(model, images), explicit(model, other)
    assert len(diagnosis.rows) == len(maps) == len(grids)
    for row, layer, noisy, (queries, keys, prefix) in zip(diagnosis.rows, maps, corrupted, grids, strict=True):
        geometry = Geometry(layer.shape[2], layer.shape[3], prefix, bool(prefix), queries, keys)
        assert geometry.grids is not None
        expected = naive_row(layer, geometry)
        expected["stability"] = np.mean(
            [cosine(a, b) for image, twin in zip(layer, noisy, strict=True) for a, b in zip(image, twin, strict=True)]
        )
        numbers = {key: value for key, value in row.items() if key not in (*NAMES, *NORMS)}
        assert numbers == pytest.approx(expected, rel=1e-3)
        assert expected["entropy"] < 0.99 * expected["entropy_bound"]  # else the test would compare nothing


def test_deit_tiny_on_photographs(shared: Path) -> None:
    """The published weights: overfocus grows with depth, and noise shakes the last layer most."""
    model = timm.create_model("deit_tiny_patch16_224").eval()
    model.load_state_dict(load_file(shared / "data/deit_tiny_patch16_224.safetensors"))
    files = image_files(shared / "data/imagenet1k-sample", limit=2)
    images = torch.stack([read_image(file, (224, 224), crop=0.9) for file in files])
    diagnosis = diagnose(model, images, against="gaussian_noise/3")
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    maps = timm_maps(model, (images / 255 - mean) / std)
    geometry = Geometry(197, 197, 1, True, (14, 14), (14, 14))
    for layer in (0, 5, 11):
        expected = naive_row(maps[layer], geometry)
        row = diagnosis.rows[layer]
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-3)
    assert diagnosis.rows[11]["overfocus"] > 0.4 > 0.25 > diagnosis.rows[2]["overfocus"]
    assert min(diagnosis.rows, key=lambda row: row["stability"])["layer"] == 11
    assert any("Layer 11: 5 % of the tokens receive" in sentence for sentence in diagnosis.findings)


def rows_without_names(diagnosis: Diagnosis) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if isinstance(value, float)} for row in diagnosis.rows]


def same_rows(first: Diagnosis, second: Diagnosis, rel: float = 1e-5) -> bool:
    pairs = zip(rows_without_names(first), rows_without_names(second), strict=True)
    return all(a == pytest.approx(b, rel=rel) for a, b in pairs)


def test_every_form_of_images_gives_the_same_rows() -> None:
    model = tiny_vit()
    pixels, labels = shapes_batch(range(5), size=64)
    body = anatomy(model)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (body.mean, body.std))
    floats = (pixels / 255 - mean) / std
    expected = diagnose(model, floats)
    assert expected.images == 5 and expected.size == (64, 64)
    forms = [
        pixels,
        list(floats),
        [floats, labels],
        floats.split(2),
        (image for image in floats),
        DataLoader(TensorDataset(pixels, labels), batch_size=2),
        TensorDataset(floats),
        [{"pixel_values": floats, "labels": labels}],
        {"pixel_values": pixels},
    ]
    for form in forms:
        assert same_rows(diagnose(model, form), expected)
    assert same_rows(diagnose(model, pixels, batch_size=2), expected)


def test_a_corruption_by_name_equals_the_corrupted_batch() -> None:
    model = tiny_vit()
    pixels, _ = shapes_batch(range(5), size=64)
    from vitfocus.corruptions import corrupt

    noisy = corrupt(pixels, "gaussian_noise", 3, seed=7)
    body = anatomy(model)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (body.mean, body.std))
    expected = diagnose(model, pixels, against=noisy)
    by_name = diagnose(model, pixels, against="gaussian_noise/3", seed=7, batch_size=2)
    from_floats = diagnose(model, (pixels / 255 - mean) / std, against="gaussian_noise/3", seed=7)
    assert same_rows(by_name, expected) and same_rows(from_floats, expected)
    assert expected.rows[0]["stability"] < 0.999
    values = by_name.stability_values[1]
    assert len(values) == 5 and len(values[0]) == 3  # images, heads
    assert np.mean(values) == pytest.approx(by_name.rows[1]["stability"])


def test_the_model_is_left_as_it_was() -> None:
    model, images = tiny_vit(), images_of(64, 64)
    with torch.no_grad():
        before = model(images)
    model.train()
    model.blocks[0].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    diagnose(model, images)
    assert model.training and model.blocks[1].training and not model.blocks[0].training
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model.eval()(images), before)


def test_the_model_is_left_as_it_was_after_an_exception() -> None:
    model = tiny_vit().train()

    def broken():
        yield images_of(64, 64)
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        diagnose(model, broken())
    with pytest.raises(VitfocusError, match="built for 64x64 images and does not take 96x64"):
        diagnose(model, images_of(96, 64))
    assert model.training and not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_outputs_are_bit_identical_while_being_read() -> None:
    from vitfocus.attention.batches import ImageBatch
    from vitfocus.attention.capture import reading

    for family in ("timm Swin", "Hugging Face ViT", "torchvision ViT"):
        build, size, _, _ = FAMILIES[family]
        model, images = build(), images_of(*size)
        body = anatomy(model)
        with torch.no_grad():
            plain = model(images)
        with reading(model, body, body.blocks, lambda block, seen, size: None) as session:
            read = session.run(ImageBatch(images))
        first, second = (getattr(out, "last_hidden_state", out) for out in (plain, read))
        assert torch.equal(first, second), family


def test_a_compiled_model_can_be_read() -> None:
    model, images = tiny_vit(depth=1), images_of(64, 64)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(images)
    assert same_rows(diagnose(compiled, images), diagnose(model, images))


def test_a_quantised_model_can_be_read() -> None:
    """The weight of a quantised layer is a method."""
    model, images = tiny_vit(), images_of(64, 64)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    for row, plain in zip(diagnose(quantised, images).rows, diagnose(model, images).rows, strict=True):
        assert row["entropy"] == pytest.approx(plain["entropy"], rel=0.01)


def test_a_model_inside_another_is_read_at_the_size_its_stem_sees() -> None:
    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = tiny_vit(dynamic_img_size=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder.forward_features(nn.functional.interpolate(x, scale_factor=0.5))

    diagnosis = diagnose(Segmenter(), images_of(128, 192))
    assert diagnosis.size == (64, 96) and diagnosis.rows[0]["name"] == "encoder.blocks.0"
    assert "distance" in diagnosis.rows[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float64, 1e-4)])
def test_other_precisions_are_kept_and_read(dtype: torch.dtype, tolerance: float) -> None:
    model, images = tiny_vit(), images_of(64, 64)
    expected = diagnose(model, images)
    other = diagnose(model.to(dtype), images)
    assert next(model.parameters()).dtype == dtype
    assert same_rows(other, expected, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "kinds", "sentence"),
    [
        ("mixer_s32_224", {"none"}, "no attention (an MLP or pooling"),
        ("xcit_nano_12_p16_224", {"channel", "class"}, "attention between channels"),
        ("cait_xxs24_224", {"global", "class"}, "class attention: only the class token attends"),
    ],
)
def test_what_has_no_token_attention_is_reported_as_such(name: str, kinds: set[str], sentence: str) -> None:
    options = {} if name.startswith("mixer") else {"depth": 2}
    diagnosis = diagnose(timm.create_model(name, **options), images_of(224, 224, count=1))
    assert {row["attention_kind"] for row in diagnosis.rows} == kinds
    for row in diagnosis.rows:
        if row["attention_kind"] in ("none", "channel"):
            assert set(row) == {*NAMES, *NORMS}
        elif row["attention_kind"] == "class":
            assert row["entropy"] == pytest.approx(row["entropy_cls"])
            assert "distance" not in row and "diversity_official" not in row
    assert any(sentence in finding for finding in diagnosis.findings)


def test_layers_are_picked_by_index_or_name_and_misses_are_helped() -> None:
    model, images = tiny_vit(), images_of(64, 64, count=1)
    assert [row["layer"] for row in diagnose(model, images, layers=[-1, 0]).rows] == [1, 0]
    assert [row["name"] for row in diagnose(model, images, layers="blocks.1").rows] == ["blocks.1"]
    assert [row["layer"] for row in diagnose(model, images, layers=torch.tensor([1])).rows] == [1]
    with pytest.raises(VitfocusError, match=r"a number, a name or a list of them, not tensor\(\[\]\)"):
        diagnose(model, images, layers=torch.zeros(0))
    with pytest.raises(VitfocusError, match=r"did you mean 'blocks\.[01]'"):
        diagnose(model, images, layers=["block.1"])
    with pytest.raises(VitfocusError, match="There is no layer 7: the model has 2"):
        diagnose(model, images, layers=7)


@pytest.mark.parametrize(
    ("images", "against", "message"),
    [
        ("photos/", None, "There is no file or folder photos"),
        (torch.zeros(2, 3), None, r"float32 tensor of shape \(2, 3\)"),
        (torch.zeros(2, 64, 64, 3), None, "channels come second"),
        ([{"pixels": torch.zeros(1, 3, 64, 64)}], None, "holds no images"),
        ([], None, "no images to diagnose"),
        (torch.zeros(2, 3, 64, 64), torch.zeros(1, 3, 64, 64), "batch for batch"),
        (
            [torch.zeros(1, 3, 64, 64)] * 2,
            [torch.zeros(1, 3, 64, 64)] * 3,
            "more images than `images`, which ended after 2",
        ),
        (torch.zeros(2, 3, 64, 64), "gausian_noise/3", "did you mean 'gaussian_noise'"),
    ],
)
def test_wrong_images_are_answered_with_a_sentence(images, against, message: str) -> None:
    with pytest.raises(VitfocusError, match=message):
        diagnose(tiny_vit(depth=1), images, against)


def test_the_scaling_profile_of_context_broadcasting() -> None:
    model = tiny_vit()
    assert "scaling_mean" not in diagnose(model, images_of(64, 64)).rows[0]
    vf.treat_(model, vf.ContextBroadcasting(variant="scaled"))
    fresh = diagnose(model, images_of(64, 64))
    assert fresh.rows[0]["scaling_mean"] == 0 and "scaling_ratio" not in fresh.rows[0]
    scales = [module.context_scale for module in model.modules() if getattr(module, "context_scale", None) is not None]
    torch.nn.init.normal_(scales[1], generator=torch.Generator().manual_seed(0))
    row = diagnose(model, images_of(64, 64)).rows[1]
    weights = scales[1].detach().double().numpy()
    ratio = np.quantile(np.abs(weights), 0.1) / np.quantile(np.abs(weights), 0.9)
    assert (row["scaling_ratio"], row["scaling_mean"]) == pytest.approx((ratio, weights.mean()))
    diagnosis = diagnose(model, images_of(64, 64))
    assert "scaling" in diagnosis.plots() and plots.png(diagnosis.plot("scaling")).startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return diagnose(tiny_vit(), shapes_batch(range(3), size=64)[0], against="gaussian_noise/3")


def test_it_travels_as_json_and_is_saved_whole_or_not_at_all(diagnosis: Diagnosis, tmp_path: Path, monkeypatch) -> None:
    files = diagnosis.save(tmp_path / "new")
    assert {file.name for file in files} == {file.name for file in (tmp_path / "new").iterdir()}
    assert {f"{kind}.png" for kind in diagnosis.plots()} < {file.name for file in files}
    assert Diagnosis.load(tmp_path / "new") == diagnosis == Diagnosis.from_dict(json.loads(diagnosis.to_json()))
    before = (tmp_path / "new/diagnosis.json").read_bytes()

    def forbidden(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    with (
        monkeypatch.context() as patch,
        pytest.raises(VitfocusError, match=r"not writable \(Permission denied\): .*there"),
    ):
        patch.setattr(Path, "mkdir", forbidden)
        diagnosis.save(tmp_path / "there")

    def full(self: Path, target: Path) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        diagnosis.save(tmp_path / "new")
    assert (tmp_path / "new/diagnosis.json").read_bytes() == before
    assert len(list((tmp_path / "new").iterdir())) == len(files)
    with pytest.raises(VitfocusError, match=r"holds no diagnosis\.json"):
        Diagnosis.load(tmp_path)


def test_two_diagnoses_compare_in_one_call(diagnosis: Diagnosis) -> None:
    model = tiny_vit()
    vf.treat_(model, vf.ContextBroadcasting())
    other = diagnose(model, shapes_batch(range(3), size=64)[0], against="gaussian_noise/3")
    comparison = diagnosis.compare(other, ["plain", "treated"])
    assert comparison.rows[1]["entropy"] == other.rows[1]["entropy"] - diagnosis.rows[1]["entropy"]
    assert "plain → treated" in str(comparison) and json.dumps(comparison.to_dict())
    for kind in diagnosis.plots():
        assert plots.png(comparison.plot(kind)).startswith(b"\x89PNG")
    assert len(set(diagnosis.compare(other).labels)) == 2
    with pytest.raises(VitfocusError, match="read in 2 layers and"):
        diagnosis.compare(diagnose(model, images_of(64, 64), layers=0))


def test_tables_are_plain_when_piped(diagnosis: Diagnosis) -> None:
    text = str(diagnosis.table())
    assert "\x1b" not in text and "stability" in text and len(text.splitlines()) == 6
    from rich.console import Console

    console = Console(force_terminal=True, record=True, width=200)
    console.print(diagnosis.table())
    assert "overfocus" in console.export_text()


def test_missing_extras_are_named(diagnosis: Diagnosis, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(VitfocusError, match=r"pip install vitfocus\[plot\]"):
        diagnosis.plot("entropy")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(VitfocusError, match="pip install pandas"):
        diagnosis.to_pandas()


def test_a_figure_without_numbers_says_why(diagnosis: Diagnosis) -> None:
    with pytest.raises(VitfocusError, match="did you mean 'entropy'"):
        diagnosis.plot("entropie")
    with pytest.raises(VitfocusError, match="no scaled Context Broadcasting"):
        diagnosis.plot("scaling")
    with pytest.raises(VitfocusError, match="against="):
        diagnose(tiny_vit(), images_of(64, 64)).plot("stability")


def test_the_command_reads_a_folder(tmp_path: Path, capsys) -> None:
    (tmp_path / "deep").mkdir()
    for index, image in enumerate(shapes_batch(range(3), size=(80, 100))[0]):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "deep" / f"{index}.png")
    arguments = (
        "pit_ti_224",
        "--images",
        str(tmp_path),
        "--limit",
        "2",
        "--treat",
        "cb",
        "--out",
        str(tmp_path / "out"),
    )
    assert main(["diagnose", *arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["images"] == 2 and len(printed["rows"]) == 12 and printed["model"] == "pit_ti_224+cb"
    assert (tmp_path / "out/entropy.png").is_file()


def test_the_command_falls_back_to_shapes_and_says_so(capsys) -> None:
    assert main(["diagnose", "pit_ti_224", "--limit", "1"]) == 0
    out, err = capsys.readouterr()
    assert "built-in data set Shapes" in err and "random weights" in err and "entropy" in out


def test_the_command_names_what_is_wrong(tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/torn.jpg").write_bytes(b"\xff\xd8 not a jpeg")
    for arguments, message in (
        (("--images", str(tmp_path / "nowhere")), "There is no file or folder"),
        (("--images", str(tmp_path / "empty")), "contain no image"),
        (("--images", str(tmp_path / "bad")), "torn.jpg cannot be read as an image"),
        (("--against", "fogg/2"), "did you mean 'fog'"),
        (("--limit", "0"), "--limit: expected a whole number of at least 1"),
    ):
        assert main(["diagnose", "pit_ti_224", *arguments]) == 2
        assert message in capsys.readouterr().err
