"""DeiT-Ti looked at with real photographs: readings by depth, stability, generated ImageNet-C, occlusion and FGSM."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from finetune import base_model
from measure import SEED, STABILITY_SEVERITY, diagonal, half, stability
from setting import Setting
from torch import Tensor

import vitfocus as vf
from vitfocus.cli.diagnose import image_files
from vitfocus.core.environment import default_device, device_name, versions
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.data.image_files import read_image

#: The published families of corruptions.
FAMILIES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}


def run_diagnosis(setting: Setting) -> str:
    """Measure, and write diagnosis.json."""
    model = base_model(setting).to(default_device()).eval()
    photos = photographs(setting)
    images = read_all(photos, vf.anatomy(model).build_size, setting.limit)
    corruptions = setting.scale.corruptions
    diagnosis = vf.diagnose(model, images, batch_size=100)
    keys = [key for key in diagnosis.rows[0] if isinstance(diagnosis.rows[0][key], float)]
    under = stability(model, images, corruptions, "imagenet", setting.frost, batch=125)
    families = {name: [one for one in members if one in under] for name, members in FAMILIES.items()}
    corrupted = evaluated(model, "imagenet-c", photos, setting, **corruption_options(setting))
    content: dict[str, Any] = {
        "model": "a model of two layers" if setting.scale.name == "smoke" else "deit_tiny_patch16_224",
        "images": len(images),
        "size": list(diagnosis.size),
        "reading": {key: [row[key] for row in diagnosis.rows] for key in keys}
        | {"diagonal": diagonal(model, images, 50)},
        "findings": diagnosis.findings,
        "stability": under,
        "stability_severity": STABILITY_SEVERITY,
        "families": {
            name: {
                "mean": fmean(under[one]["mean"] for one in members),
                "by_layer": [fmean(layer) for layer in zip(*(under[one]["by_layer"] for one in members), strict=True)],
            }
            for name, members in families.items()
            if members
        },
        "corruption": corruption_summary(corrupted),
        "clean": {key: corrupted[key] for key in ("top1", "top1_interval", "top5", "top5_interval", "ece")}
        | {"accuracy": corrupted["top1"]},
        "occlusion": cells(evaluated(model, "occlusion", photos, setting)),
        "fgsm": {
            f"{name.partition('/')[2]}/255": cell
            for name, cell in cells(evaluated(model, "fgsm", photos, setting, eps=[1, 2])).items()
        },
        "device": device_name(default_device()),
        "versions": versions("accelerate", "python"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_text(setting.results / "diagnosis.json", json.dumps(content, indent=1) + "\n")
    mce = content["corruption"].get("mce")
    return f"accuracy {corrupted['top1']:.2f} %" + (f", mCE {mce:.2f} %" if mce is not None else "")


def photographs(setting: Setting) -> Path:
    """The folder of photographs by class; at smoke scale, a few drawn scenes."""
    if setting.scale.name == "smoke":
        return drawn(setting.work / "photos")
    if setting.photos is None or not setting.photos.is_dir():
        raise VitfocusError("The diagnosis looks at ImageNet photographs in class folders: name them with --photos.")
    return setting.photos


def read_all(folder: Path, size: tuple[int, int], limit: int | None) -> Tensor:
    """The photographs as uint8 (N, 3, H, W), on the device; those of that size already are taken as they are."""
    files = image_files(folder, limit or 1_000_000)
    return torch.stack([read_image(file, size, crop=1.0) for file in files]).to(default_device())


def evaluated(model: Any, suite: str, photos: Path, setting: Setting, **options: Any) -> Any:
    """One suite on the photographs; attacks in full precision."""
    precision = "float32" if suite == "fgsm" else half()
    return vf.evaluate(
        model, suite, photos, limit=setting.limit, precision=precision, seed=SEED, progress=False, **options
    )


def corruption_options(setting: Setting) -> dict[str, Any]:
    """The scale's corruptions and severities, and the frost overlays."""
    scale = setting.scale
    return {"corruptions": list(scale.corruptions), "severities": list(scale.severities), "frost": setting.frost}


def corruption_summary(scores: Any) -> dict[str, Any]:
    """Errors and, where all fifteen were measured, mCE with its bootstrap interval over images."""
    (summary,) = scores.models.values()
    kept = ("mce", "mce_interval", "relative_mce", "relative_mce_interval", "mean_error", "mean_error_interval")
    made = scores.fingerprint["protocol"]["corruptions"]
    errors = {name: row["error"] for name, row in summary["corruptions"].items()}
    return {
        "mean_error": fmean(errors.values()),
        **{key: summary[key] for key in kept if key in summary},
        "by_corruption": errors,
        "ce": {name: row["ce"] for name, row in summary["corruptions"].items() if "ce" in row},
        "frost": made.get("frost", "not used"),
        "notes": list(scores.notes),
    }


def cells(scores: Any) -> dict[str, Any]:
    """Accuracy and its interval by condition, but the clean one."""
    (summary,) = scores.models.values()
    return {
        name: {"accuracy": cell["top1"], "interval": cell["top1_interval"]}
        for name, cell in summary["cells"].items()
        if name != "clean"
    }


def drawn(folder: Path) -> Path:
    """Twelve drawn scenes at 64 px in class folders with ImageNet's names, which a model of 1,000 classes can read."""
    from PIL import Image

    from vitfocus.data.shapes.dataset import shapes_batch
    from vitfocus.robustness.classification import wordnet_ids

    pixels, labels = shapes_batch(range(12), "val", 64)
    for number, (picture, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        place = folder / wordnet_ids()[label] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(place)
    return folder
