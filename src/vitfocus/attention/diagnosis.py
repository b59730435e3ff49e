"""`diagnose`: one row of numbers for every attention layer of a model, and what stands out in plain words."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from vitfocus.anatomy import Block, anatomy, inserted
from vitfocus.anatomy.block import Size
from vitfocus.attention.findings import SECOND, Thresholds, findings
from vitfocus.attention.images import Batch, Images, batches, paired
from vitfocus.attention.observation import Observation
from vitfocus.attention.scaling_profile import context_scale, scaling_profile
from vitfocus.attention.session import can_be_read, model_name, pick_blocks, reading
from vitfocus.attention.stream import LayerStream, geometry_of
from vitfocus.attention.stream import rows as rows_of
from vitfocus.attention.table import diagnosis_table
from vitfocus.attention.text_inputs import text_length, with_text, without_padding
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_bytes
from vitfocus.core.records import Count, OpenDict, convert, read_json
from vitfocus.core.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitfocus.attention.comparison import Comparison

#: What `plot` draws, and the key a row must have for it.
PLOTS = {
    "entropy": "entropy",
    "distance": "distance",
    "overfocus": "overfocus",
    "heads": "head_similarity",
    "diversity": "diversity_official",
    "stability": "stability",
    "scaling": "scaling_mean",
}


class _RowFields(msgspec.Struct):
    layer: Count
    name: str
    attention_kind: str = ""


class Row(OpenDict):
    """The numbers of one layer."""

    fields, numbers = _RowFields, True


class DiagnosisRecord(msgspec.Struct):
    """diagnosis.json, without what follows from the rows."""

    model: str
    images: Count
    size: tuple[Count, Count]
    against: str | None
    rows: list[Row]
    stability_values: dict[int, list[list[float]]] = msgspec.field(default_factory=dict)
    inserted: str = ""


@dataclass
class Diagnosis:
    """What `diagnose` found: `rows`, one dict a layer, and what they were taken from.

    `stability_values` holds, for each layer, the cosine of every image and head (a list of lists), for the box plots.
    `inserted` names treatments that were inserted after the model's weights were last trained.
    """

    rows: list[dict[str, Any]]
    model: str
    images: int
    size: Size
    against: str | None = None
    stability_values: dict[int, list[list[float]]] = field(default_factory=dict)
    inserted: str = ""

    @property
    def findings(self) -> list[str]:
        """What stands out, in sentences, by the default `Thresholds`."""
        return findings(self.rows, self.against)

    def table(self) -> Table:
        """The rows as a table: print it, or give it to rich."""
        return diagnosis_table(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "model": self.model,
            "images": self.images,
            "size": list(self.size),
            "against": self.against,
            "inserted": self.inserted,
            "rows": [dict(row) for row in self.rows],
            "findings": self.findings,
            "thresholds": Thresholds().to_dict(),
            "stability_values": {str(layer): values for layer, values in self.stability_values.items()},
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Diagnosis:
        """The opposite of `to_dict`."""
        return cls._from(convert(data, DiagnosisRecord, "The dict", writer="Diagnosis.to_dict"))

    @classmethod
    def _from(cls, found: DiagnosisRecord) -> Diagnosis:
        rows: list[dict[str, Any]] = [*found.rows]
        return cls(rows, found.model, found.images, found.size, found.against, found.stability_values, found.inserted)

    @classmethod
    def load(cls, folder: str | Path) -> Diagnosis:
        """Read what `save` wrote."""
        file = Path(folder) / "diagnosis.json"
        if not file.is_file():
            raise VitfocusError(f"{folder} holds no diagnosis.json; save a diagnosis there first.")
        return cls._from(read_json(file, DiagnosisRecord, writer="vitfocus diagnose"))

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame."""
        try:
            import pandas
        except ImportError as error:
            raise VitfocusError("to_pandas needs pandas, which is not installed: pip install pandas.") from error
        return pandas.DataFrame(self.rows)

    def plot(self, kind: str = "entropy") -> Figure:
        """One of the papers' figures: entropy, distance, overfocus, heads, diversity, stability or scaling."""
        from vitfocus.report.plots import plot

        return plot({self.model: self}, kind)

    def plots(self) -> list[str]:
        """The kinds of figure there are numbers for."""
        return [kind for kind, key in PLOTS.items() if any(key in row for row in self.rows)]

    def save(self, folder: str | Path) -> list[Path]:
        """Write diagnosis.json, the table as text, and every figure if matplotlib is installed; return the files."""
        folder = Path(folder)
        text = f"{self.table().text()}\n" + "".join(f"- {sentence}\n" for sentence in self.findings)
        files = {"diagnosis.json": self.to_json().encode(), "diagnosis.txt": text.encode()}
        if importlib.util.find_spec("matplotlib") is not None:
            from vitfocus.report.plots import png

            files |= {f"{kind}.png": png(self.plot(kind)) for kind in self.plots()}
        for name, content in files.items():
            write_bytes(folder / name, content)
        return [folder / name for name in files]

    def compare(self, other: Diagnosis, labels: Sequence[str] | None = None) -> Comparison:
        """This diagnosis beside another, layer by layer."""
        from vitfocus.attention.comparison import compare

        return compare(self, other, labels)

    def __str__(self) -> str:
        return "\n".join([str(self.table()), *(f"- {sentence}" for sentence in self.findings)])


def diagnose(
    model: nn.Module,
    images: Images,
    against: Images | str | None = None,
    *,
    layers: int | str | Sequence[int | str] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    name: str | None = None,
) -> Diagnosis:
    """Read what every attention layer of a vision transformer does with these images.

    `images` is a batch as the model takes it (normalised floats), or uint8, which is then normalised; or an iterable of
    batches, such as a DataLoader. `against` is a second set to compare the maps with, or a corruption such as
    "gaussian_noise/3", drawn from `seed`. `layers` picks layers by index or name, `batch_size` cuts up a large tensor,
    and `name` is what tables and figures call the model.

    A model that reads text takes dicts of "pixel_values" and "input_ids", as its Hugging Face processor makes them, or,
    loaded with its word pieces, of "pixel_values" and "question"; what pads a text or an image is not read.

    The model keeps its fused attention, its device, its mode and its outputs; no map is stored.

    >>> import timm
    >>> from vitfocus.data.shapes.dataset import shapes_batch
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
    >>> diagnosis = diagnose(model, shapes_batch(range(2), size=64)[0], against="gaussian_noise/3")
    >>> [row["layer"] for row in diagnosis.rows], diagnosis.rows[0]["entropy_bound"] >= diagnosis.rows[0]["entropy"]
    ([0, 1], True)
    """
    body = anatomy(model)
    blocks = list(dict.fromkeys(pick_blocks(body, layers)))
    if isinstance(against, str):
        from vitfocus.corruptions import parse

        against = "{}/{}".format(*parse(against))
    streams = {
        block.name: LayerStream(block.mixes_tokens_by_attention, against is not None)
        for block in blocks
        if can_be_read(block)
    }
    values: dict[str, list[torch.Tensor]] = {block: [] for block in streams}
    pairs = 1 if against is None else 2
    count, size, batch_images, text_tokens = 0, body.build_size, 0, 0

    def sink(block: Block, seen: Observation, seen_size: Size) -> None:
        nonlocal size
        size = seen_size
        stream = streams[block.name]
        stream.observe(seen, geometry_of(block, seen, seen_size, text_tokens))
        if stream.stability is not None:
            # Windows are averaged into the image they belong to.
            values[block.name].append(stream.stability.take().unflatten(0, (batch_images, -1)).mean(dim=1))

    source: Iterator[Batch] = (with_text(batch, model, body) for batch in batches(images, batch_size))
    if against is not None:
        source = paired(source, against, body, batch_size, seed)
    with reading(model, body, [block for block in blocks if block.name in streams], sink) as run:
        for piece in (piece for batch in source for piece in without_padding(batch, pairs)):
            batch_images, text_tokens = len(piece.pixels) // pairs, text_length(piece)
            run(piece)
            count += batch_images
    if count == 0:
        raise VitfocusError("There are no images to diagnose with: the iterable was empty.")
    read = [name for name, stream in streams.items() if stream.maps]
    numbers = dict(zip(read, rows_of(streams[name] for name in read), strict=True))
    rows = [_row(block, numbers.get(block.name, {})) for block in blocks]
    for row in rows:
        if row.get("entropy", 0.0) != row.get("entropy", 0.0):
            raise VitfocusError(f"The attention of {row['name']} is not a number: look for NaN in images and weights.")
    stability = {block.depth: torch.cat(values[block.name]).tolist() for block in blocks if values.get(block.name)}
    described = against if isinstance(against, str) or against is None else SECOND
    return Diagnosis(rows, name or model_name(model), count, size, described, stability, "+".join(inserted(model)))


def _row(block: Block, numbers: dict[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": block.depth, "name": block.name, "attention_kind": block.attention_kind, **numbers}
    scale = context_scale(block.host)
    return row | (scaling_profile(scale) if scale is not None else {})
