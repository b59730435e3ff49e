"""The attention explorer: point at a patch of a photograph and see what its token attends to.

Its data (a few images, clean and corrupted, and the maps of some layers and heads) are written into a page by
`add_explorer`, or saved in a run's folder (`explorer.json`) for later reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from vitfocus.attention.capture import model_name
from vitfocus.core.arguments import checked
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.core.records import Count, read_json
from vitfocus.core.statistics import evenly_spaced
from vitfocus.corruptions import corrupt, parse
from vitfocus.report.explorer_maps import LEFT_OUT, LEVELS, Reader, Unit, choose_maps, coarse_grids, data_url, encode
from vitfocus.report.page import Page
from vitfocus.report.runs import ReportModel

EXPLORER = "explorer.json"
#: Default limits: bytes of base64 text of all maps together, and number of images.
BUDGET, IMAGES = 4_000_000, 8

#: How to ask for fewer images, and the start of the note on their number.
_OPTION, _SHOWN = "--limit N, or limit=N", "Shown here:"

Data = dict[str, Any]


class View(TypedDict):
    """The maps of one view of an image: digits, and the scale and offset of each head."""

    d: str
    m: list[float]
    o: list[float]


Layer = TypedDict(
    "Layer",
    {
        "name": str,
        "depth": Count,
        "prefix": Count,
        "heads": Count,
        "class": bool,
        "each": bool,
        "queries": tuple[Count, Count],
        "keys": tuple[Count, Count],
        "maps": list[list[View]],
    },
)


class ExplorerImage(TypedDict):
    """An image, clean and corrupted, as data URLs."""

    name: str
    views: list[str]


class ExplorerModel(TypedDict):
    """A model's layers that are shown."""

    name: str
    blocks: Count
    layers: list[Layer]


class ExplorerData(TypedDict):
    """explorer.json."""

    images: list[ExplorerImage]
    asked: Count
    size: tuple[Count, Count]
    against: str | None
    levels: Count
    models: list[ExplorerModel]
    notes: list[str]


def explorer_data(
    models: nn.Module | Mapping[str, nn.Module],
    images: Tensor,
    against: str | None = "gaussian_noise/3",
    *,
    names: Sequence[str] | None = None,
    limit: int = IMAGES,
    budget: int = BUDGET,
    seed: int = 0,
) -> Data:
    """Collect the explorer's data: images, and the attention maps of layers and heads that fit into the budget.

    Only layers in which tokens attend to the whole image are included; keys may be fewer than queries (PVT).

    Args:
        models: One model, or models by name.
        images: uint8 images (B, 3, H, W); each model sees them at its own size.
        against: Corruption shown beside the clean images; None for none.
        names: Names of the images.
        limit: At most this many images, evenly spaced.
        budget: The largest size of all maps together, in bytes of base64 text.
        seed: Seed of the corruption.

    Returns:
        Plain data for `report(..., explorer=...)` and `write_explorer`.

    Raises:
        VitfocusError: If the images are not uint8, or no layer of a model attends to the whole image.
    """
    named = {model_name(models): models} if isinstance(models, nn.Module) else dict(models)
    if images.dtype != torch.uint8 or images.ndim != 4 or not len(images):
        raise VitfocusError(
            f"The explorer shows uint8 images (B, 3, H, W), not {images.dtype} of shape {tuple(images.shape)}."
        )
    chosen = list(evenly_spaced(len(images), limit))
    pictures = images[chosen].cpu()
    titles = [str(names[index]) if names is not None else f"image {index}" for index in chosen]
    conditions = [pictures]
    if against is not None:
        corruption, severity = parse(against)
        against = f"{corruption}/{severity}"
        conditions.append(corrupt(pictures, corruption, severity, seed=seed, ids=chosen))
    readers = [Reader(name, model) for name, model in named.items()]
    units, count, notes = choose_maps(readers, conditions, budget)
    data = {
        "images": [{"name": titles[i], "views": [data_url(batch[i]) for batch in conditions]} for i in range(count)],
        "asked": len(chosen),
        "size": list(pictures.shape[-2:]),
        "against": against,
        "levels": LEVELS,
        "models": [_model(reader, units[reader.name], conditions, count) for reader in readers],
        "notes": notes,
    }
    while size_of(data) > budget and _shrink(data):
        pass
    return _with_image_note(data)


@checked
def explore(
    models: nn.Module | Mapping[str, nn.Module],
    images: Tensor,
    against: str | None = "gaussian_noise/3",
    *,
    out: str | Path = "explorer.html",
    title: str = "Attention explorer",
    **options: Any,
) -> Path:
    """Write an HTML page with the attention explorer.

    Args:
        models: One model, or models by name, shown side by side.
        images: uint8 images (B, 3, H, W); each model sees them at its own size.
        against: Corruption shown beside the clean images, such as "gaussian_noise/3"; None for none.
        out: The file to write.
        title: Title of the page.
        **options: Further options of `explorer_data`, such as `names`, `limit` and `budget`.

    Returns:
        The path of the page.

    Raises:
        VitfocusError: If the images are not uint8, or no layer of a model attends to the whole image.

    Example:
        >>> import tempfile, timm
        >>> from vitfocus.data.shapes.dataset import shapes_batch
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
        >>> page = explore(model, shapes_batch(range(2), size=64)[0], out=Path(tempfile.mkdtemp()) / "explorer.html")
        >>> "explorer-data" in page.read_text()
        True
    """
    page = Page(title)
    add_explorer(page, explorer_data(models, images, against, **options))
    return page.write(out)


def size_of(data: Data) -> int:
    """Bytes of the maps as base64 text."""
    return sum(
        len(view["d"])
        for model in data["models"]
        for layer in model["layers"]
        for image in layer["maps"]
        for view in image
    )


def write_explorer(folder: str | Path, data: Data) -> Path:
    """Save the data in a run's folder, for later reports."""
    path = Path(folder) / EXPLORER
    write_text(path, json.dumps(data, separators=(",", ":")))
    return path


def load_explorer(models: Sequence[ReportModel], budget: int = BUDGET) -> Data | None:
    """The explorer data saved in the runs' folders, joined where they show the same images."""
    joined: Data | None = None
    for model in models:
        for folder in model.folders:
            if not (folder / EXPLORER).is_file():
                continue
            data: Data = {**read_json(folder / EXPLORER, ExplorerData, hint="remove it, or write it again")}
            if len(data["models"]) == 1:
                data["models"][0]["name"] = model.name
            joined = data if joined is None else _joined(joined, data, budget)
    return joined


def _joined(one: Data, two: Data, budget: int) -> Data:
    """Both models side by side; if the second does not fit, it is left out with a note."""
    names = ", ".join(model["name"] for model in two["models"])
    before = one
    count = min(len(one["images"]), len(two["images"]))
    one, two = _take_images(one, count), _take_images(two, count)
    same = [image["views"] for image in one["images"]] == [image["views"] for image in two["images"]]
    if not same or one["against"] != two["against"]:
        note = f"{names} was explored on other images, so it is not shown here."
        return _with_image_note({**before, "notes": [*before["notes"], note]})
    if size_of(one) + size_of(two) > budget:
        note = f"{names} is left out to keep the page small; with fewer images ({_OPTION}) it may fit."
        return _with_image_note({**before, "notes": [*before["notes"], note]})
    known = {model["name"] for model in one["models"]}
    new = [model for model in two["models"] if model["name"] not in known]
    notes = [*one["notes"], *two["notes"]]
    if one["asked"] != two["asked"]:
        notes.append("Only images that every model was explored on are shown.")
    joined = {**one, "models": [*one["models"], *new], "notes": list(dict.fromkeys(notes))}
    return _with_image_note({**joined, "asked": min(one["asked"], two["asked"])})


def _with_image_note(data: Data) -> Data:
    """The data with one note on how many of the images are shown, replacing any earlier one."""
    shown, asked = len(data["images"]), data["asked"]
    notes = [note for note in data["notes"] if not note.startswith(_SHOWN)]
    crowded = shown > 1 and any(f"{LEFT_OUT}:" in note for note in notes)
    if shown < asked or crowded:
        said = f"{shown} of {asked} images, to keep the page small" if shown < asked else f"{shown} images"
        more = f"; with fewer ({_OPTION}) there is room for more layers and heads" if crowded else ""
        notes.append(f"{_SHOWN} {said}{more}.")
    return {**data, "notes": notes}


def _take_images(data: Data, count: int) -> Data:
    models = [
        {**model, "layers": [{**layer, "maps": layer["maps"][:count]} for layer in model["layers"]]}
        for model in data["models"]
    ]
    return {**data, "images": data["images"][:count], "models": models}


def add_explorer(page: Page, data: Data) -> None:
    """Put the explorer into a page; `explorer.js` fills it."""
    page.explorer = '<div id="stage"><noscript>The explorer needs JavaScript.</noscript></div>'
    page.data = data


def _model(reader: Reader, units: set[Unit], conditions: Sequence[Tensor], count: int) -> Data:
    kept = sorted({index for index, _ in units})
    blocks = [reader.blocks[index] for index in kept]
    layers: list[Data] = []
    for index, block in zip(kept, blocks, strict=True):
        layers.append(
            {"depth": block.depth, "name": block.name, "kind": block.attention_kind, "prefix": block.prefix_tokens,
             "class": block.class_token, "heads": 0, "each": (index, True) in units, "maps": []}
        )  # fmt: skip
    for i in range(count):
        for layer in layers:
            layer["maps"].append([])
        for batch in conditions:
            for layer, block, maps in zip(layers, blocks, reader.maps(batch[i], blocks), strict=True):
                layer["heads"] = len(maps)
                queries, keys, group = coarse_grids(block, reader.size, maps)
                layer |= {"queries": list(queries), "keys": list(keys), "group": list(group)}
                layer["maps"][i].append(encode(block, reader.size, maps, layer["each"]))
    return {"name": reader.name, "blocks": reader.depth, "layers": layers}


def _shrink(data: Data) -> bool:
    """Drop the last image, or if there is one, a layer; False if nothing can be dropped."""
    if len(data["images"]) > 1:
        data["images"].pop()
        for model in data["models"]:
            for layer in model["layers"]:
                layer["maps"].pop()
        return True
    most = max(data["models"], key=lambda model: len(model["layers"]))
    if len(most["layers"]) == 1:
        return False
    dropped = most["layers"].pop(0)
    data["notes"].append(f"{most['name']}: layer {dropped['depth']} did not fit the page.")
    return True
