"""`diagnose`: one row of numbers for each attention layer of a model, and what stands out in plain sentences."""

from __future__ import annotations

import importlib.util
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from vitfocus.anatomy import Block, anatomy
from vitfocus.anatomy.block import Size
from vitfocus.attention.batches import Batches, ImageBatch, Images, paired, text_length, with_text, without_padding
from vitfocus.attention.capture import can_be_read, model_name, pick_blocks, reading
from vitfocus.attention.findings import SECOND, Finding, Situation, default_thresholds, explain, uniform_note
from vitfocus.attention.layer_readings import LayerReadings, NormReadings, add_up, geometry_of, layer_rows
from vitfocus.attention.plots import plot, png
from vitfocus.attention.readings import READINGS, LayerRow, cell, columns, context_scale, figures
from vitfocus.core.arguments import checked
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import atomic_paths, writable_folder
from vitfocus.core.modules import inserted, insertion_sentence, is_trained, treatment_specs
from vitfocus.core.records import Count, convert, read_json
from vitfocus.core.tables import Table, bullet, counted, html_list
from vitfocus.data.shapes.dataset import shapes_named
from vitfocus.kernels.attention import Observation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(repr=False)
class Diagnosis:
    """The result of `diagnose`: print it, or display it in a notebook.

    Attributes:
        rows: One dict per layer; `vitfocus.attention.readings.READINGS` describes its keys.
        model: The model's name.
        images: The number of images.
        size: Their height and width.
        against: The corruption or images that stability was measured against.
        stability_values: For each layer, the cosine similarity of each image and head (a list of lists), for box plots.
        high_norm_places: For each layer with high-norm patch tokens, the share of images in which the token at each
            grid position is one (a list of rows).
        inserted: Treatments that were inserted after the model's weights were last trained.
        taken_as: How the images were interpreted: "pixels", "normalised", or "normalised (assumed)" by their range.
        treatments: The specs of the model's treatments, joined by " + ".
        trained: Whether the model's weights are trained.
        depth: The model's number of blocks.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
        >>> diagnosis = diagnose(model, torch.rand(2, 3, 64, 64))
        >>> diagnosis, len(diagnosis.rows)
        (<Diagnosis of vit_tiny_patch16_224: 2 layers, 2 images of 64x64>, 2)
    """

    rows: list[LayerRow]
    model: str
    images: Count
    size: tuple[Count, Count]
    against: str | None = None
    stability_values: dict[int, list[list[float]]] = field(default_factory=dict)
    inserted: str = ""
    high_norm_places: dict[int, list[list[float]]] = field(default_factory=dict)
    taken_as: str = "pixels"
    treatments: str = ""
    trained: bool = True
    depth: Count = 0

    @property
    def findings(self) -> list[str]:
        """What stands out by the default thresholds, one paragraph per finding."""
        return [str(finding) for finding in self.explained]

    @property
    def explained(self) -> list[Finding]:
        """The findings as records: what was measured, the reference, what it may mean, the evidence and a next step."""
        specs = tuple(self.treatments.split(" + ")) if self.treatments else ()
        return explain(self.rows, Situation(specs, self.trained, self.against, self.depth))

    @property
    def _setting(self) -> str:
        against = f", against {self.against}" if self.against else ""
        return f"{counted(self.images, 'image')} of {self.size[0]}x{self.size[1]}{against}"

    def table(self) -> Table:
        """Format the rows as a table.

        Returns:
            A table to print or to pass to rich, with the columns for which any layer has a value.
        """
        keys = {key: heading for key, (heading, _) in columns().items() if any(key in row for row in self.rows)}
        title = f"{self.model}: {self._setting}"
        units = "Entropy in nats; distance in sides of the image, or of the window." if "entropy" in keys else ""
        assumed = "The images lie outside [0, 1] and were taken as normalised." if "assumed" in self.taken_as else ""
        caption = " ".join(filter(None, (units, assumed, insertion_sentence(self.inserted))))
        return Table(title, list(keys.values()), [[cell(row, key) for key in keys] for row in self.rows], caption)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data.

        Returns:
            The attributes, the findings and the thresholds, as JSON-serialisable values.
        """
        derived = {
            "findings": self.findings,
            "explained": [finding.to_dict() for finding in self.explained],
            "thresholds": default_thresholds(),
        }
        plain: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return plain | derived

    def to_json(self, indent: int | None = 2) -> str:
        """Convert to JSON.

        Args:
            indent: Indentation, as for `json.dumps`.

        Returns:
            What `to_dict` returns, as JSON.
        """
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Diagnosis:
        """Restore a diagnosis from the output of `to_dict`.

        Args:
            data: The dict.

        Returns:
            The diagnosis.

        Raises:
            VitfocusError: A key is missing or has an invalid value.
        """
        return convert(data, cls, "The dict", writer="Diagnosis.to_dict")

    @classmethod
    @checked
    def load(cls, folder: str | Path) -> Diagnosis:
        """Load a saved diagnosis.

        Args:
            folder: A folder that `save` or `vitfocus diagnose --out` wrote.

        Returns:
            The diagnosis.

        Raises:
            VitfocusError: The folder has no diagnosis.json, or the file is damaged.

        Example:
            >>> import tempfile
            >>> rows = [{"layer": 0, "name": "blocks.0", "attention_kind": "global", "entropy": 4.2}]
            >>> diagnosis = Diagnosis(rows, "vit", images=2, size=(64, 64))
            >>> folder = tempfile.mkdtemp()
            >>> [file.name for file in diagnosis.save(folder)][:2]
            ['diagnosis.json', 'diagnosis.txt']
            >>> Diagnosis.load(folder) == diagnosis
            True
        """
        file = Path(folder) / "diagnosis.json"
        if not file.is_file():
            raise VitfocusError(f"{folder} holds no diagnosis.json; save a diagnosis there first.")
        return read_json(file, cls, writer="vitfocus diagnose")

    def to_pandas(self) -> Any:
        """Convert the rows to pandas.

        Returns:
            A DataFrame with one row per layer.

        Raises:
            VitfocusError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise VitfocusError("to_pandas needs pandas, which is not installed: pip install pandas.") from error
        return pandas.DataFrame(self.rows)

    def plot(self, kind: str = "entropy") -> Figure:
        """Draw a reading by depth, as in the papers' figures.

        Args:
            kind: "entropy", "distance", "overfocus", "heads", "diversity", "stability", "scaling" or "high_norm";
                `plots` lists those that this diagnosis has.

        Returns:
            A matplotlib figure.

        Raises:
            VitfocusError: There is no such figure, no layer has a value for it, or matplotlib is not installed.
        """
        return plot({self.model: self}, kind)

    def plots(self) -> list[str]:
        """List the figures that `plot` can draw.

        Returns:
            The kinds for which any layer has a value.
        """
        return [kind for kind, key in figures().items() if any(key in row for row in self.rows)]

    @checked
    def save(self, folder: str | Path) -> list[Path]:
        """Save as diagnosis.json and diagnosis.txt and, if matplotlib is installed, every figure as a PNG file.

        Args:
            folder: The folder, created if needed; files are written atomically.

        Returns:
            The paths of the files.

        Raises:
            VitfocusError: The folder cannot be written.
        """
        folder = writable_folder(folder)
        text = "\n".join([self.table().text(), *(bullet(str(one), 120) for one in self.explained), ""])
        files = {"diagnosis.json": self.to_json().encode(), "diagnosis.txt": text.encode()}
        if importlib.util.find_spec("matplotlib") is not None:
            files |= {f"{kind}.png": png(self.plot(kind)) for kind in self.plots()}
        paths = [folder / name for name in files]
        with atomic_paths(paths) as temporary:
            for path, content in zip(temporary, files.values(), strict=True):
                path.write_bytes(content)
        return paths

    @checked
    def compare(self, other: Diagnosis, labels: Sequence[str] | None = None) -> DiagnosisComparison:
        """Compare with the diagnosis of a model with the same number of layers, layer by layer.

        Args:
            other: The second diagnosis.
            labels: The two names in tables and figures. Default: the names of the models.

        Returns:
            The comparison: print it, or use its `rows`, `table` and `plot`.

        Raises:
            VitfocusError: The numbers of layers differ, or there are not two labels.

        Example:
            >>> before = Diagnosis([{"layer": 0, "name": "blocks.0", "entropy": 4.2}], "vit", images=2, size=(64, 64))
            >>> after = Diagnosis([{"layer": 0, "name": "blocks.0", "entropy": 4.5}], "vit", images=2, size=(64, 64))
            >>> before.compare(after, ["plain", "cb"]).findings
            ['From plain to cb, mean entropy in nats rises from 4.20 to 4.50, averaged over the layers.']
        """
        if len(self.rows) != len(other.rows):
            raise VitfocusError(
                f"{self.model} was read in {len(self.rows)} layers and {other.model} in {len(other.rows)}: compare "
                f"models of the same depth, or pick layers with diagnose(layers=...)."
            )
        names = tuple(labels) if labels is not None else (self.model, other.model)
        if len(names) != 2:
            raise VitfocusError(f"Two labels are needed, but {len(names)} were given.")
        if names[0] == names[1]:
            names = (f"{names[0]} (1)", f"{names[1]} (2)")
        return DiagnosisComparison(self, other, names)

    def __repr__(self) -> str:
        return f"<Diagnosis of {self.model}: {counted(len(self.rows), 'layer')}, {self._setting}>"

    def __str__(self) -> str:
        return "\n".join([str(self.table()), *map(bullet, self.findings)])

    def _repr_html_(self) -> str:
        """Displayed by notebooks."""
        return self.table()._repr_html_() + html_list([(one.read, one.explanation) for one in self.explained])


@dataclass(frozen=True, repr=False)
class DiagnosisComparison:
    """Two diagnoses, layer by layer; `Diagnosis.compare` returns it."""

    first: Diagnosis
    second: Diagnosis
    labels: tuple[str, str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dict per layer: second minus first, for every number that both have."""
        pairs = zip(self.first.rows, self.second.rows, strict=True)
        return [
            {"layer": a["layer"], "name": b["name"]}
            | {key: b[key] - a[key] for key in _compared() if key in a and key in b}
            for a, b in pairs
        ]

    @property
    def findings(self) -> list[str]:
        """How the mean over the layers changes, one sentence per number."""
        sentences = []
        for key, what in _compared().items():
            before, after = (_mean(diagnosis, key) for diagnosis in (self.first, self.second))
            if before is None or after is None:
                continue
            low, high = (format(value, READINGS[key].format) for value in (before, after))
            verb = "stays at" if low == high else "rises" if after > before else "falls"
            change = f"{verb} {low}" if low == high else f"{verb} from {low} to {high}"
            sentences.append(f"From {self.labels[0]} to {self.labels[1]}, {what} {change}, averaged over the layers.")
        note = uniform_note(dict(zip(self.labels, (self.first.rows, self.second.rows), strict=True)))
        return [*sentences, note] if note else sentences

    def table(self) -> Table:
        """Format both values of every number as "first → second"."""
        keys = [key for key in _compared() if any(key in row for row in self.rows)]
        rows = [
            [str(a["layer"]), *(f"{cell(a, key)} → {cell(b, key)}" for key in keys)]
            for a, b in zip(self.first.rows, self.second.rows, strict=True)
        ]
        title, headings = f"{self.labels[0]} → {self.labels[1]}", columns()
        pairs = zip((self.first, self.second), self.labels, strict=True)
        caption = " ".join(insertion_sentence(one.inserted, label) for one, label in pairs if one.inserted)
        return Table(title, ["layer", *(headings[key][0] for key in keys)], rows, caption)

    def to_dict(self) -> dict[str, Any]:
        """Both diagnoses and the differences, as plain data."""
        first, second = self.first.to_dict(), self.second.to_dict()
        return {"labels": list(self.labels), "differences": self.rows, "first": first, "second": second}

    def plot(self, kind: str = "entropy") -> Figure:
        """Draw both diagnoses in the figure that `Diagnosis.plot` draws."""
        return plot(dict(zip(self.labels, (self.first, self.second), strict=True)), kind)

    def __repr__(self) -> str:
        return f"<DiagnosisComparison of {self.labels[0]} and {self.labels[1]}: {counted(len(self.rows), 'layer')}>"

    def __str__(self) -> str:
        return "\n".join([str(self.table()), *map(bullet, self.findings)])

    def _repr_html_(self) -> str:
        """Displayed by notebooks."""
        return self.table()._repr_html_() + html_list(self.findings)


def _mean(diagnosis: Diagnosis, key: str) -> float | None:
    values = [row[key] for row in diagnosis.rows if key in row]
    return sum(values) / len(values) if values else None


def _compared() -> dict[str, str]:
    """What is compared, and what a sentence calls it."""
    return {key: reading.label for key, reading in READINGS.items() if reading.label}


@checked
def diagnose(
    model: nn.Module,
    images: Images,
    against: Images | str | None = None,
    *,
    layers: int | str | Sequence[int | str] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    name: str | None = None,
    normalised: bool | None = None,
) -> Diagnosis:
    """Measure what each attention layer of a vision transformer does with these images.

    The model keeps its fused attention, its device, its mode and its outputs; no map is stored.

    Args:
        model: a timm, transformers, torchvision or vitfocus model.
        images: a folder, a path or a list of paths, PIL images or arrays (H, W, 3), which are resized and cropped as by
            `evaluate`; a tensor (B, 3, H, W) or a list of tensors, taken at their size; a data set, a DataLoader or
            another iterable of these; or "shapes:N", images of the built-in data set. uint8 and floats in [0, 1] are
            pixels and are normalised as the model expects. A model that reads text takes dicts of "pixel_values" and
            "input_ids", as its Hugging Face processor makes them, or, loaded with its tokenizer, of "pixel_values" and
            "question". Padding of a text or an image is excluded.
        against: a second set of images to compare the maps with, or a corruption such as "gaussian_noise/3".
        layers: layers to read, by index or name; all by default.
        batch_size: how many images of a tensor or data set to read at once.
        seed: the seed of the corruption.
        name: what tables and figures call the model.
        normalised: whether float tensors are normalised already. By default those clearly outside [0, 1] are, and the
            diagnosis records that as `taken_as`.

    Returns:
        The diagnosis, with one row per layer.

    Raises:
        VitfocusError: if there are no images, or the model, the images or a layer are not what is expected.

    Example:
        >>> import timm
        >>> from vitfocus.data.shapes.dataset import shapes_batch
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
        >>> diagnosis = diagnose(model, shapes_batch(range(2), size=64)[0], against="gaussian_noise/3")
        >>> [row["layer"] for row in diagnosis.rows], diagnosis.rows[0]["entropy_bound"] >= diagnosis.rows[0]["entropy"]
        ([0, 1], True)
    """
    body = anatomy(model)
    blocks = list(dict.fromkeys(pick_blocks(body, layers)))
    given = Batches(images, body, batch_size, normalised)
    source: Iterable[ImageBatch] = given
    if body.text is not None:
        source = (with_text(batch, model, body) for batch in given)
    corruption = None
    if against is not None:
        corruption = _corruption(against)
        partners = corruption or Batches(against, body, batch_size, normalised)
        source = paired(source, partners, body, seed)
    reader = _ReadingCollector([block for block in blocks if can_be_read(block)], 1 if against is None else 2)
    count = 0
    with reading(model, body, reader.blocks, reader, norms=reader.norms, outputs=blocks) as session:
        for batch in source:
            for piece in [batch] if body.text is None else reader.without_padding(batch):
                reader.images = len(piece.pixels) // reader.pairs
                session.run(piece)
                reader.add_up()
                count += reader.images
    if count == 0:
        raise VitfocusError("There are no images to diagnose with: the iterable was empty.")
    numbers, (norms, places) = reader.rows(), reader.norms.finish()
    rows = [_row(block, numbers.get(block.name, {}) | norms.get(block.depth, {})) for block in blocks]
    described = None if against is None else corruption or SECOND
    stability = {block.depth: torch.cat(found).tolist() for block in blocks if (found := reader.stability[block.name])}
    name, late = name or model_name(model), "+".join(inserted(model))
    facts = " + ".join(treatment_specs(model)), is_trained(model), len(body)
    return Diagnosis(rows, name, count, session.size, described, stability, late, places, given.taken_as, *facts)


def _corruption(against: Images | str | None) -> str | None:
    """The corruption's name and severity; None for images, such as a folder."""
    if not isinstance(against, str) or Path(against).exists() or shapes_named(against, 1) is not None:
        return None
    from vitfocus.corruptions import parse

    return "{}/{}".format(*parse(against))


class _ReadingCollector:
    """Receives each observed attention and keeps the readings of its layer.

    `images` and `text_tokens` describe the batch that is running; `pairs` is 2 if its second half is corrupted.
    """

    def __init__(self, blocks: Sequence[Block], pairs: int) -> None:
        self.blocks, self.pairs = blocks, pairs
        self.layers = {block.name: LayerReadings(block.mixes_tokens_by_attention, pairs == 2) for block in blocks}
        self.stability: dict[str, list[Tensor]] = defaultdict(list)
        self.norms = NormReadings(pairs)
        self.images = self.text_tokens = 0

    def __call__(self, block: Block, seen: Observation, size: Size) -> None:
        geometry = geometry_of(block, seen, size, self.text_tokens)
        cosines = self.layers[block.name].observe(seen, geometry)
        if cosines is not None:
            # Windows are averaged into the image they belong to.
            self.stability[block.name].append(cosines.unflatten(0, (self.images, -1)).mean(dim=1))

    def add_up(self) -> None:
        """Add the batch that was run to the sums of all layers."""
        add_up(list(self.layers.values()))
        self.norms.add_up()

    def without_padding(self, batch: ImageBatch) -> Iterator[ImageBatch]:
        """The batch in pieces without padding, for a model that reads text."""
        for piece in without_padding(batch, self.pairs):
            self.text_tokens = text_length(piece)
            yield piece

    def rows(self) -> dict[str, dict[str, float]]:
        """The numbers of each layer that was observed, by its name."""
        read = [name for name, layer in self.layers.items() if layer.heads]
        rows = dict(zip(read, layer_rows([self.layers[name] for name in read]), strict=True))
        for name, row in rows.items():
            if math.isnan(row["entropy"]):
                raise VitfocusError(f"The attention of {name} is not a number: look for NaN in images and weights.")
        return rows


def _row(block: Block, numbers: dict[str, float]) -> LayerRow:
    row = LayerRow(layer=block.depth, name=block.name, attention_kind=block.attention_kind, **numbers)
    scale = context_scale(block.host)
    if scale is not None:
        values = {key: one.scale(scale) for key, one in READINGS.items() if one.scale is not None}
        row.update({key: value for key, value in values.items() if value is not None})
    return row
