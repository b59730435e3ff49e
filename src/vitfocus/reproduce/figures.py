"""The figures of an item, drawn from its trained rows: SVG files, or PNG for photographs."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitfocus.anatomy import anatomy
from vitfocus.attention.maps import attention_maps, enlarged, normalise_together, on_grid
from vitfocus.attention.plots import (
    COLOURS,
    MARKERS,
    OVERLAY_COLOURS,
    head_maps,
    map_matrices,
    new_figure,
    plot,
    style_axes,
)
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_bytes
from vitfocus.core.statistics import evenly_spaced
from vitfocus.corruptions import corrupt
from vitfocus.data.segmentation.dataset import MaskFiles, acdc
from vitfocus.reproduce.items import MEASURES
from vitfocus.reproduce.plan import centre_of, diagnosis_of, model_of, training_metrics, validation_images
from vitfocus.reproduce.results import ItemResult, RowResult, softmax_surface

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawing = Callable[[ItemResult, int | None], "Figure"]


def draw(result: ItemResult, folder: Path, images: int | None = None) -> list[Path]:
    """Draw the item's figures into the folder; a figure that cannot be drawn becomes a note."""
    files, trained = [], _trained(result)
    where = trained[0].where if trained else "computed"
    for kind in result.item.figures:
        if not trained and kind != "softmax":
            continue
        try:
            figure = FIGURES[kind](result, images)
        except VitfocusError as error:
            result.missing.append(f"The figure {kind} was not drawn: {error}")
            continue
        figure.suptitle(f"{result.item.paper}, {where}", fontsize="small", color="0.35")
        suffix = "png" if kind in _PHOTOGRAPHS else "svg"
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix)
        write_bytes(folder / f"{kind}.{suffix}", buffer.getvalue())
        files.append(folder / f"{kind}.{suffix}")
    return files


def _trained(result: ItemResult) -> list[RowResult]:
    return [one for one in result.rows if one.run is not None and one.measured]


def _by_depth(kind: str) -> Drawing:
    def drawing(result: ItemResult, images: int | None) -> Figure:
        return plot(
            {one.row.label: diagnosis_of(one.run, images, result.severity) for one in _trained(result) if one.run}, kind
        )

    return drawing


def _curves(result: ItemResult, _: int | None) -> Figure:
    """Training loss and top-1 against epochs, and evaluation loss and top-5 if the item measures them."""
    kinds = [("train", "loss", 1.0, "training loss"), ("eval", "top1", 100.0, "top-1 (%)")]
    if "eval_loss" in result.item.measures:
        kinds += [("eval", "loss", 1.0, "evaluation loss"), ("eval", "top5", 100.0, "top-5 (%)")]
    figure, panels = new_figure(10.0, 2.0 * len(kinds), len(kinds) // 2, 2, squeeze=False)
    for axes, (kind, key, scale, label) in zip(panels.flat, kinds, strict=True):
        for place, one in enumerate(_trained(result)):
            assert one.run is not None
            rows = [
                row
                for row in training_metrics(one.run)
                if row["kind"] == kind and isinstance(row.get(key), int | float)
            ]
            points = [(row["epoch"], scale * row[key]) for row in rows] or [(math.nan, math.nan)]
            style = {"marker": MARKERS[place]} if kind == "eval" else {}
            axes.plot(*zip(*points, strict=True), color=COLOURS[place], label=one.row.label, **style)
        style_axes(axes, "epoch", label)
    panels[0, 0].legend(frameon=False)
    return figure


def _heads(result: ItemResult, _: int | None) -> Figure:
    """Accuracy against the number of heads, one line with CB and one without."""
    groups = {"ViT-Ti": [one for one in _trained(result) if not one.row.treat]}
    groups["ViT-Ti + CB"] = [one for one in _trained(result) if one.row.treat]
    return _against(groups, "heads", "top1", "number of heads")


def _branches(result: ItemResult, _: int | None) -> Figure:
    rows = [one for one in _trained(result) if "K" in one.row.at]
    return _against({"TAP": rows}, "K", "mce", "branches K (1: no TAP)")


def _weights(result: ItemResult, _: int | None) -> Figure:
    rows = [one for one in _trained(result) if "weight" in one.row.at]
    figure = _against({"ADL": rows}, "weight", "mce", "weight of ADL")
    axes = figure.axes[0]
    axes.set_xscale("log")
    plain = next((one for one in _trained(result) if not one.row.treat and "mce" in one.values), None)
    if plain is not None:
        axes.axhline(plain.values["mce"].number, color="0.5", linestyle="--", label="without ADL")
        axes.legend(frameon=False)
    return figure


def _against(groups: dict[str, list[RowResult]], where: str, name: str, label: str) -> Figure:
    figure, axes = new_figure(6.0, 4.0)
    title = MEASURES[name].heading
    for place, (group, rows) in enumerate(groups.items()):
        points = sorted((one.row.at[where], one.values[name]) for one in rows if name in one.values)
        if not points:
            raise VitfocusError(f"no row of {group} has a number for it.")
        title = MEASURES[name].heading.replace(MEASURES[name].title, points[0][1].title or MEASURES[name].title)
        axes.errorbar(
            [at for at, _ in points],
            [value.number for _, value in points],
            yerr=[value.interval or 0.0 for _, value in points],
            color=COLOURS[place],
            marker=MARKERS[place],
            capsize=3,
            label=group,
        )
        axes.set_xticks([at for at, _ in points])
    style_axes(axes, label, title)
    axes.legend(frameon=False)
    return figure


def _softmax(_: ItemResult, __: int | None) -> Figure:
    """Softmax's output and the steepness of its Jacobian over two inputs, from above and along x1 - x2."""
    axis, output, steepness = softmax_surface()
    figure, panels = new_figure(10.5, 3.9, 1, 2)
    extent = (float(axis[0]), float(axis[-1])) * 2
    for axes, values, title in (
        (panels[0], output, "softmax(x)₁"),
        (panels[1], steepness, "nuclear norm of the Jacobian"),
    ):
        shown = axes.imshow(values.T, origin="lower", extent=extent, cmap="viridis", aspect="equal")
        axes.plot(extent[:2], extent[:2], color="white", linestyle="--", linewidth=1, label="uniform: x₁ = x₂")
        axes.set_xlabel("x₁")
        axes.set_ylabel("x₂")
        axes.set_title(title, fontsize="medium")
        figure.colorbar(shown, ax=axes)
    panels[0].legend(loc="upper left", fontsize="small", facecolor="0.2", labelcolor="white")
    return figure


def _clean_and_noisy(result: ItemResult) -> tuple[torch.Tensor, torch.Tensor]:
    """A validation image of the item's data, uint8 (1, 3, H, W), and a noisy copy."""
    run = _trained(result)[0].run
    assert run is not None
    clean = validation_images(run, 1)
    return clean, corrupt(clean, "gaussian_noise", severity=result.severity, flavour="any")


def _models(result: ItemResult) -> dict[str, Any]:
    return {one.row.label: model_of(one.run).cpu() for one in _trained(result) if one.run is not None}


def _last(models: dict[str, Any]) -> int:
    """The last layer in which all tokens attend; FAN ends with class attention."""
    return anatomy(next(iter(models.values()))).trunk[-1].depth


def _maps(result: ItemResult, _: int | None) -> Figure:
    clean, noisy = _clean_and_noisy(result)
    models = _models(result)
    return map_matrices(models, {"clean": clean, "Gaussian noise": noisy}, _last(models))


def _head_maps(result: ItemResult, _: int | None) -> Figure:
    clean, _noisy = _clean_and_noisy(result)
    models = _models(result)
    return _stacked([head_maps(model, clean, _last(models)) for model in models.values()], list(models))


def _head_overlays(result: ItemResult, _: int | None) -> Figure:
    """What the class token, or the middle patch, attends to in each head of the last layer: one row per model.

    For all heads and models alike, attention below 2/K is cut, and one min-max scale is used.
    """
    clean, _noisy = _clean_and_noisy(result)
    models = _models(result)
    found: list[list[torch.Tensor]] = []
    for model in models.values():
        block = anatomy(model).trunk[-1]
        size = (int(clean.shape[-2]), int(clean.shape[-1]))
        (rows, columns), keys = block.attention_grids(size)
        token = 0 if block.class_token else block.prefix_tokens + rows // 2 * columns + columns // 2
        maps = attention_maps(model, clean, layers=[block.depth], queries=token)[0][0]
        found.append([on_grid(head[0], keys, block.prefix_tokens) for head in maps])
    shown = iter(normalise_together([one for row in found for one in row], 2.0, block.prefix_tokens))
    picture = clean[0].permute(1, 2, 0)
    heads = max(map(len, found))
    figure, axes = new_figure(1.8 * (1 + heads), 2.0 * len(models), len(models), 1 + heads, squeeze=False)
    for panels, name, row in zip(axes, models, found, strict=True):
        panels[0].imshow(picture)
        panels[0].set_title(name, fontsize="small")
        for head, panel in enumerate(panels[1 : 1 + len(row)]):
            panel.imshow(picture.float().mean(dim=-1), cmap="gray")
            panel.imshow(enlarged(next(shown), size), cmap=OVERLAY_COLOURS, vmin=0, vmax=1, alpha=0.65)
            panel.set_title(f"head {head}", fontsize="small")
        for panel in panels:
            panel.axis("off")
    return figure


def _predictions(result: ItemResult, _: int | None) -> Figure:
    """Segmented images, clean, in snow, and at night if ACDC is available; one column per model."""
    from vitfocus.robustness.pixel_model import PixelModel
    from vitfocus.tasks.segmentation.evaluation import InferenceSettings, overlay, predict

    run = _trained(result)[0].run
    assert run is not None and run.recipe is not None
    section = run.recipe.segment
    protocol = InferenceSettings(section.window, section.stride, section.test_flip, section.short_side)
    clean = validation_images(run, 2)
    shown = list(torch.stack([clean, corrupt(clean, "snow", severity=3, flavour="any")], 1).flatten(0, 1))
    labels = ["clean", "snow"] * len(clean)
    folder = result.folders.find("acdc") if result.folders is not None else None
    if folder is not None:
        night = MaskFiles(folder, acdc(folder, "val", "", "night"))
        shown += [centre_of(night.read(index)[0], run.recipe.data.size) for index in evenly_spaced(len(night), 2)]
        labels += ["night"] * (len(shown) - len(labels))
    elif result.scale == "imagenet":
        result.missing.append("The figure's scenes at night are of ACDC: --data acdc=DIR.")
    models = {name: PixelModel(name, model.eval()) for name, model in _models(result).items()}
    figure, axes = new_figure(3.0 * (1 + len(models)), 3.0 * len(shown), len(shown), 1 + len(models), squeeze=False)
    for row, image in enumerate(shown):
        axes[row, 0].imshow(image.permute(1, 2, 0))
        axes[row, 0].set_ylabel(labels[row])
        for column, (name, model) in enumerate(models.items(), 1):
            with torch.no_grad():
                scores = predict(model, image[None], protocol)
            axes[row, column].imshow(overlay(image, scores[0].argmax(0), scores.shape[1], run.recipe.data.source))
            axes[0, column].set_title(name, fontsize="medium")
    for panel in axes.flat:
        panel.set_xticks([])
        panel.set_yticks([])
    return figure


def _stacked(figures: Sequence[Figure], labels: Sequence[str]) -> Figure:
    """Several figures below each other, as images."""
    from PIL import Image

    pictures = []
    for figure in figures:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        pictures.append(Image.open(buffer))
    whole, axes = new_figure(
        9.0, sum(9.0 * p.height / p.width + 0.4 for p in pictures), len(pictures), 1, squeeze=False
    )
    for panel, picture, label in zip(axes.flat, pictures, labels, strict=True):
        panel.imshow(picture)
        panel.set_title(label, fontsize="medium")
        panel.axis("off")
    return whole


FIGURES: dict[str, Drawing] = {
    "curves": _curves,
    "entropy": _by_depth("entropy"),
    "distance": _by_depth("distance"),
    "scaling": _by_depth("scaling"),
    "stability": _by_depth("stability"),
    "heads_alike": _by_depth("heads"),
    "heads": _heads,
    "branches": _branches,
    "weights": _weights,
    "softmax": _softmax,
    "maps": _maps,
    "head_maps": _head_maps,
    "head_overlays": _head_overlays,
    "predictions": _predictions,
}
_PHOTOGRAPHS = ("maps", "head_maps", "head_overlays", "predictions")
