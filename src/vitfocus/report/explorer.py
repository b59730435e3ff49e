"""The attention explorer: point at a patch of an image and see what its token attends to.

Its data are a few images, clean and corrupted, with the maps of every layer and head. The maps are in chunks, one per
image and layer. A page contains the chunks of the first images, and loads others from a folder beside it when they
are shown. A page on disk may load scripts but no other files, so a chunk is a script that calls one function.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any, TypedDict
from urllib.parse import quote

import msgspec
import torch
from torch import Tensor

from vitfocus.attention.capture import Models, named_models
from vitfocus.core.arguments import check_int, checked, require_values
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import writable_path, write_text
from vitfocus.core.records import Count, convert, parse_json, read_json, read_text
from vitfocus.core.statistics import evenly_spaced
from vitfocus.core.tables import counted
from vitfocus.corruptions import corrupt, parse
from vitfocus.report.explorer_maps import ENTRIES, LEVELS, Layer, Prediction, Reader, View, data_url, headings
from vitfocus.report.page import Page, remove_other_chunks
from vitfocus.report.runs import ReportModel

EXPLORER, CHUNKS = "explorer.json", "explorer-maps"
#: Default limits: megabytes of all maps together, bytes of those inside the page, and number of images.
BUDGET, INLINE, IMAGES = 64.0, 4_000_000, 8

Data = dict[str, Any]
Key = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class ExploredLayer(Layer):
    """A layer, and the key of its chunk for each image."""

    chunks: list[Key]


class ExplorerImage(TypedDict):
    """An image, clean and corrupted, as data URLs."""

    name: str
    views: list[str]


class ExplorerModel(TypedDict):
    """A model's layers, and its predictions for each view of each image."""

    name: str
    blocks: Count
    layers: list[ExploredLayer]
    predictions: list[list[Prediction]]


class ExplorerData(TypedDict):
    """explorer.json."""

    images: list[ExplorerImage]
    asked: Count
    against: str | None
    levels: Count
    headings: dict[str, tuple[str, str]]
    models: list[ExplorerModel]
    notes: list[str]


def explorer_data(
    models: Models,
    images: Tensor,
    against: str | None = "gaussian_noise/3",
    *,
    names: Sequence[str] | None = None,
    limit: int = IMAGES,
    budget: float = BUDGET,
    seed: int = 0,
) -> Data:
    """Collect the explorer's data: images, and the attention maps and readings of every layer and head.

    Only layers in which tokens attend to the whole image are included; keys may be fewer than queries (PVT).

    Args:
        models: One model, or models by name.
        images: uint8 images (B, 3, H, W); each model sees them at its own size.
        against: Corruption shown beside the clean images; None for none.
        names: Names of the images.
        limit: At most this many images, evenly spaced.
        budget: The largest size of all maps together, in megabytes. Images that do not fit are left out; if not even
            one fits, its maps are made coarser. Every layer and head is kept.
        seed: Seed of the corruption.

    Returns:
        Data for `report(..., explorer=...)`, `add_explorer` and `write_explorer`.

    Raises:
        VitfocusError: If the images are not uint8, or no layer of a model attends to the whole image.

    Example:
        >>> import timm
        >>> from vitfocus.data.shapes.dataset import shapes_batch
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
        >>> data = explorer_data({"tiny": model}, shapes_batch(range(2), size=64)[0], "fog/3")
        >>> len(data["images"]), [layer["heads"] for layer in data["models"][0]["layers"]]
        (2, [3, 3])
    """
    require_values("images", images)
    if images.dtype != torch.uint8 or images.ndim != 4 or not len(images):
        raise VitfocusError(
            f"The explorer shows uint8 images (B, 3, H, W), not {images.dtype} of shape {tuple(images.shape)}."
        )
    if not budget > 0:
        raise VitfocusError(f"budget is a number of megabytes above 0, not {budget}.")
    chosen = list(evenly_spaced(len(images), check_int("limit", limit, low=1)))
    pictures = images[chosen].cpu()
    titles = [str(names[index]) if names is not None else f"image {index}" for index in chosen]
    conditions = [pictures]
    if against is not None:
        corruption, severity = parse(against)
        against = f"{corruption}/{severity}"
        conditions.append(corrupt(pictures, corruption, severity, seed=seed, ids=chosen))
    readers = [Reader(name, model) for name, model in named_models(models).items()]
    packed: list[list[_PackedImage]] = []  # by image and model
    entries, size = ENTRIES, 0
    for index in range(len(pictures)):
        views = [batch[index] for batch in conditions]
        found = [_PackedImage(reader, views, entries) for reader in readers]
        while not packed and sum(one.size for one in found) > 1e6 * budget and entries > 16:
            entries //= 4
            found = [_PackedImage(reader, views, entries) for reader in readers]
        size += sum(one.size for one in found)
        if packed and size > 1e6 * budget:
            break
        packed.append(found)
    notes = [sentence for reader in readers for sentence in reader.notes()]
    if entries < ENTRIES:
        notes.append(f"Neighbouring patches are merged to fit {budget:g} MB; a larger --budget shows each of them.")
    data: Data = {
        "images": [
            {"name": titles[i], "views": [data_url(batch[i]) for batch in conditions]} for i in range(len(packed))
        ],
        "asked": len(chosen),
        "against": against,
        "levels": LEVELS,
        "headings": headings(),
        "models": [],
        "notes": notes,
        "chunks": {key: views for image in packed for one in image for key, views in one.chunks.items()},
    }
    for m, reader in enumerate(readers):
        keys = zip(*(list(image[m].chunks) for image in packed), strict=True)
        layers = [{**layer, "chunks": list(of)} for layer, of in zip(reader.layers(entries), keys, strict=True)]
        one = {"name": reader.name, "blocks": len(reader.body), "layers": layers}
        data["models"].append({**one, "predictions": [image[m].predictions for image in packed]})
    return _with_image_note(data)


class _PackedImage:
    """One image as one model sees it: a chunk per layer, the likeliest classes of each view, and the size in bytes."""

    def __init__(self, reader: Reader, views: Sequence[Tensor], entries: int) -> None:
        observed = [reader.observe(view) for view in views]
        made = [reader.pack(block, observed, entries) for block in reader.blocks]
        self.chunks = {chunk_key(one, number): one for number, one in enumerate(made)}
        self.predictions = [one.prediction for one in observed]
        self.size = sum(len(view["d"]) for one in made for view in one)


@dataclass(frozen=True, repr=False)
class Explorer:
    """An attention explorer, which notebooks display. `path` is the page that was written, if any."""

    data: Data
    title: str
    path: Path | None = None

    def __repr__(self) -> str:
        names = " and ".join(model["name"] for model in self.data["models"])
        place = f" in {self.path}" if self.path is not None else ""
        return f"<Explorer of {names}: {counted(len(self.data['images']), 'image')}{place}>"

    def __fspath__(self) -> str:
        if self.path is None:
            raise VitfocusError("This explorer was not written: explore(..., out=FILE) writes it.")
        return str(self.path)

    def html(self) -> str:
        """The page with all maps inside."""
        page = Page(self.title)
        add_explorer(page, self.data)
        return page.html()

    def _repr_html_(self) -> str:
        """The page in a sandboxed frame, for notebooks."""
        return (
            f'<iframe sandbox="allow-scripts" title="{escape(self.title, quote=True)}" style="width:100%;height:46rem;'
            f'border:0" srcdoc="{escape(self.html(), quote=True)}"></iframe>'
        )


@checked
def explore(
    models: Models,
    images: Tensor,
    against: str | None = "gaussian_noise/3",
    *,
    out: str | Path | None = None,
    title: str = "Attention explorer",
    **options: Any,
) -> Explorer:
    """The attention explorer, to be shown in a notebook or written as an HTML page.

    Args:
        models: One model, or models by name; two are shown side by side.
        images: uint8 images (B, 3, H, W); each model sees them at its own size.
        against: Corruption shown beside the clean images, such as "gaussian_noise/3"; None for none.
        out: The file to write, such as "explorer.html". Maps beyond 4 MB go into a folder beside it (explorer-data).
            By default nothing is written.
        title: Title of the page.
        **options: Further options of `explorer_data`, such as `names`, `limit` and `budget`. A notebook keeps what it
            shows: `limit=1` keeps it small.

    Returns:
        The explorer, which is also a path if it was written.

    Raises:
        VitfocusError: If the images are not uint8, no layer of a model attends to the whole image, or the page cannot
            be written.

    Example:
        >>> import tempfile, timm
        >>> from vitfocus.data.shapes.dataset import shapes_batch
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
        >>> images = shapes_batch(range(2), size=64)[0]
        >>> explore(model, images)  # a notebook shows it
        <Explorer of vit_tiny_patch16_224: 2 images>
        >>> explore(model, images, out=Path(tempfile.mkdtemp()) / "explorer.html").path.name
        'explorer.html'
    """
    if out is not None:
        writable_path(out)  # before any slow work
    data = explorer_data(models, images, against, **options)
    if out is None:
        return Explorer(data, title)
    page = Page(title)
    add_explorer(page, data, Path(out))
    return Explorer(data, title, page.write(out))


def add_explorer(page: Page, data: Data, target: Path | None = None) -> None:
    """Put the explorer into a page; `explorer.js` fills it.

    Args:
        page: The page.
        data: The result of `explorer_data` or `load_explorer`.
        target: The file that the page will be written to: maps that are too large for a page are then loaded from
            files beside it. None puts all of them into the page.
    """
    inline: dict[str, list[View]] = {}
    files: dict[str, str] = {}
    budget = INLINE if target is not None else float("inf")
    for key in _by_image(data):
        views = data["chunks"][key]
        source = views if isinstance(views, Path) else None
        if isinstance(views, Path):
            views = read_chunk(views, key)
        budget -= sum(len(view["d"]) for view in views)
        if budget >= 0 or target is None:
            inline[key] = views
        elif source is not None and source.absolute().is_relative_to(target.absolute().parent):
            files[key] = quote(source.absolute().relative_to(target.absolute().parent).as_posix())
        else:
            folder = f"{target.stem}-data"
            files[key] = quote(f"{folder}/{key}.js")
            page.extra_files[f"{folder}/{key}.js"] = chunk_text(key, views)
    page.data = {**data, "chunks": inline, "files": files}


def _by_image(data: Data) -> Iterator[str]:
    """The keys of all chunks, image by image, from the last layer to the first."""
    for index in range(len(data["images"])):
        for model in data["models"]:
            yield from (layer["chunks"][index] for layer in reversed(model["layers"]))


def chunk_key(views: Sequence[View], layer: int = 0) -> str:
    """The name of a chunk: a digest of its content and of the layer, since untrained layers may have equal maps."""
    return hashlib.sha256(f"{layer} {json.dumps(views)}".encode()).hexdigest()[:16]


def chunk_text(key: str, views: Sequence[View]) -> str:
    """A chunk as the script that a page loads."""
    return f'vitfocusChunk("{key}",{json.dumps(views, separators=(",", ":"))});\n'


def read_chunk(file: Path, key: str) -> list[View]:
    """Read a chunk that `write_explorer` wrote; a script with any other content is refused.

    Raises:
        VitfocusError: If the file is missing or was changed.
    """
    try:
        text = read_text(file)
        content = parse_json(text.removeprefix(f'vitfocusChunk("{key}",').removesuffix(");\n"), file)
    except VitfocusError as error:
        raise VitfocusError(f"{str(error).rstrip('.')}: diagnose again with --explore.") from None
    views: list[View] = convert(content, list[View], file, writer="vitfocus diagnose --explore")
    if chunk_text(key, views) != text:
        raise VitfocusError(f"{file} is not as vitfocus wrote it: diagnose again with --explore.")
    return views


def write_explorer(folder: str | Path, data: Data) -> Path:
    """Save the data in a run's folder, for its reports: explorer.json, and the chunks in explorer-maps."""
    folder = Path(folder)
    for key, views in data["chunks"].items():
        write_text(folder / CHUNKS / f"{key}.js", chunk_text(key, views))
    remove_other_chunks(folder / CHUNKS, data["chunks"])
    path = folder / EXPLORER
    plain = {name: value for name, value in data.items() if name != "chunks"}
    write_text(path, json.dumps(plain, separators=(",", ":")))
    return path


def load_explorer(models: Sequence[ReportModel]) -> Data | None:
    """The explorer data saved in the runs' folders, joined where they show the same images."""
    joined: Data | None = None
    for model in models:
        for folder in model.folders:
            if not (folder / EXPLORER).is_file():
                continue
            data: Data = {**read_json(folder / EXPLORER, ExplorerData, hint="remove it, or write it again")}
            if any(len(layer["chunks"]) != len(data["images"]) for one in data["models"] for layer in one["layers"]):
                raise VitfocusError(
                    f"{folder / EXPLORER} does not have one chunk per image: remove it, or write it again."
                )
            data["chunks"] = {key: folder / CHUNKS / f"{key}.js" for key in _by_image(data)}
            if len(data["models"]) == 1:
                data["models"][0]["name"] = model.name
            joined = data if joined is None else _join(joined, data)
    return joined


def _join(one: Data, two: Data) -> Data:
    """Join the models of both, with the images that both have."""
    names = ", ".join(model["name"] for model in two["models"])
    before = one
    count = min(len(one["images"]), len(two["images"]))
    one, two = _take_images(one, count), _take_images(two, count)
    same = [image["views"] for image in one["images"]] == [image["views"] for image in two["images"]]
    if not same or one["against"] != two["against"]:
        note = f"{names} was explored with different images, so it is not shown here."
        return {**before, "notes": [*before["notes"], note]}
    known = {model["name"] for model in one["models"]}
    new = [model for model in two["models"] if model["name"] not in known]
    notes = [*one["notes"], *two["notes"]]
    if one["asked"] != two["asked"]:
        notes.append("Only images that every model was explored on are shown.")
    joined = {**one, "models": [*one["models"], *new], "notes": list(dict.fromkeys(notes))}
    joined["chunks"] = {**one["chunks"], **two["chunks"]}
    return _with_image_note({**joined, "asked": min(one["asked"], two["asked"])})


_IMAGE_NOTE = "Shown here:"


def _with_image_note(data: Data) -> Data:
    """The data with one note on how many of the images are shown, replacing any earlier one."""
    shown, asked = len(data["images"]), data["asked"]
    notes = [note for note in data["notes"] if not note.startswith(_IMAGE_NOTE)]
    if shown < asked:
        notes.append(f"{_IMAGE_NOTE} {shown} of {asked} images; a larger --budget shows more.")
    return {**data, "notes": notes}


def _take_images(data: Data, count: int) -> Data:
    models = [
        {
            **model,
            "layers": [{**layer, "chunks": layer["chunks"][:count]} for layer in model["layers"]],
            "predictions": model["predictions"][:count],
        }
        for model in data["models"]
    ]
    return {**data, "images": data["images"][:count], "models": models}
