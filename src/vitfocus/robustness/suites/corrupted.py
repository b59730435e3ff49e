"""ImageNet-C and CIFAR-10/100-C: from their published files, or generated on the fly from clean images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitfocus.core.arguments import several, whole
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.progress import Progress
from vitfocus.core.statistics import evenly_spaced
from vitfocus.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt, fingerprint
from vitfocus.corruptions.constants import Setting
from vitfocus.corruptions.draws import Draws
from vitfocus.corruptions.jpeg import jpeg_compression
from vitfocus.data.preprocessing import Preprocessing
from vitfocus.robustness.cells import Classify
from vitfocus.robustness.folders import ImageFiles, check_readable, list_classes, one_size
from vitfocus.robustness.plan import Group, Plan
from vitfocus.robustness.sources import Batch, ItemSource, digest_of
from vitfocus.robustness.suites.context import Context, codec_name
from vitfocus.robustness.summaries import corrupted

SEVERITIES = (1, 2, 3, 4, 5)
_TARS = ("noise", "blur", "weather", "digital", "extra")


def chosen(context: Context) -> tuple[list[str], list[int]]:
    """The corruptions and severities asked for: the fifteen at five, the extra four as well, or some by name."""
    known = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
    names = several("corruptions", context.options.get("corruptions", CORRUPTIONS))
    if context.options.get("extra"):
        names += [name for name in EXTRA_CORRUPTIONS if name not in names]
    for name in names:
        if name not in known:
            raise VitfocusError(f"There is no corruption {name!r}: {nearest(str(name), known)}")
    given = several("severities", context.options.get("severities", SEVERITIES))
    severities = sorted(whole("A severity", severity, 1, 5) for severity in given)
    if not set(CORRUPTIONS) <= set(names) or severities != list(SEVERITIES):
        context.notes.append("Not all 15 corruptions at all 5 severities were measured, so there is no mCE.")
    return names, severities


def imagenet_c(context: Context) -> Plan:
    """ImageNet-C, in whichever form the data is."""
    published = _published_folders(context.folder) if context.folder is not None else {}
    if published:
        _refuse(context, ("frost", "jpeg_quality"), "for generated corruptions, and these are published files")
        if not context.options.get("clean_data"):
            context.refuse_resizing("published files, which are never resized")
        return _published(context, published)
    _refuse(context, ("clean_data",), "for published files, and these corruptions are generated")
    if context.classes != 1000:
        context.notes.append("AlexNet's errors are ImageNet's: on other data, CE and mCE serve to compare models only.")
    return _generated(context, "imagenet", "bilinear", partial(corrupted, alexnet=True))


def _refuse(context: Context, options: tuple[str, ...], why: str) -> None:
    """An option that this form of the data has no use for is not silently passed over."""
    for name in options:
        if context.options.get(name) is not None:
            raise VitfocusError(f"{name} is {why}.")


def cifar_c(context: Context) -> Plan:
    """CIFAR-10-C and CIFAR-100-C, in whichever form the data is; the mean error is not divided by AlexNet's."""
    wanted = 100 if context.suite.startswith("cifar100") else 10
    if context.classes != wanted:
        raise VitfocusError(
            f"The suite {context.suite} is for models of {wanted} classes, and this one has {context.classes}."
        )
    context.notes.append("The mean error over the 15 corruptions is not divided by AlexNet's, as is usual for CIFAR.")
    if context.size != (32, 32):
        context.notes.append(
            f"Corrupted at 32x32, then enlarged to the model's {context.size[0]}x{context.size[1]} (bicubic)."
        )
        context.protocol["enlarged_to"] = list(context.size)
    if context.folder is not None and any(context.folder.glob("*.npy")):
        _refuse(context, ("frost",), "for generated corruptions, and these are published files")
        context.refuse_resizing("published arrays")
        return _arrays(context, context.folder)
    return _generated(context, "cifar", None, partial(corrupted, alexnet=False))


def _generated(context: Context, flavour: str, interpolation: str | None, summarise: Any) -> Plan:
    names, severities = chosen(context)
    frost, quality = context.options.get("frost"), context.options.get("jpeg_quality")
    if quality is not None:
        quality = whole("jpeg_quality", quality, 1, 100)
    cells = [Classify("clean")]
    for name in names:
        for severity in severities:
            change = partial(_corrupted, name, severity, context.seed, flavour, frost, quality)
            cells.append(Classify(f"{name}/{severity}", change))
    source = context.images(interpolation)
    made = fingerprint(flavour, frost)
    context.protocol |= {"mode": "generated", "seed": context.seed, "corruptions": made}
    context.notes.insert(
        0, "Corruptions were generated on the fly from clean images, with vitfocus's own implementation."
    )
    if quality is not None:
        context.protocol["jpeg_quality"] = quality
        context.notes.append(
            f"Every corrupted image went through JPEG at quality {quality}, as the published files did (85)."
        )
    if "frost" in names and not made["comparable"]:
        context.notes.append(
            "Frost overlays were drawn for want of the published ones: frost and mCE are not comparable."
        )
    return Plan((Group("generated", source, tuple(cells)),), context.protocol, summarise, tuple(context.notes))


def _corrupted(
    name: str, severity: int, seed: int, flavour: str, frost: str | None, quality: int | None, batch: Batch
) -> Tensor:
    images = corrupt(batch.images, name, severity, seed=seed, ids=batch.ids, flavour=flavour, frost=frost)
    if quality is None:
        return images
    whole = images if images.dtype == torch.uint8 else images.mul(255).round().to(torch.uint8)
    return jpeg_compression(whole, Setting(quality), Draws(0, "", 0, batch.ids))


def _published_folders(root: Path) -> dict[str, Path]:
    """Corruption -> folder, for data laid out as published, inside the archives' own folders or not."""
    known = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
    places = [root, *(root / name for name in _TARS)]
    return {name: place / name for place in places for name in known if (place / name).is_dir()}


def _published(context: Context, folders: dict[str, Path]) -> Plan:
    context.need_imagenet()
    names, severities = chosen(context)
    missing = [f"{n}/{s}" for n in names for s in severities if n not in folders or not (folders[n] / str(s)).is_dir()]
    if missing:
        raise VitfocusError(
            f"{context.folder} looks like ImageNet-C but lacks {', '.join(missing[:4])} ({len(missing)} in all): "
            "it is only half extracted (name the ones you have with corruptions=, --corruptions)."
        )
    groups: list[Group] = []
    counts: dict[str, int] = {}
    labels: dict[str, int] = {}
    lists: dict[tuple[str, ...], list[int]] = {}  # 75 folders hold the same names: one list of them, not 75
    with Progress("Listing the files", len(names) * len(severities), show=context.show) as progress:
        for name in names:
            for severity in severities:
                cell = f"{name}/{severity}"
                listed = list_classes(folders[name] / str(severity))
                if set(listed.classes) - set(labels):
                    labels |= context.labels(listed)
                files = tuple(entry.name for entry in listed.entries)
                answers = lists.setdefault(files, [labels[entry.folder] for entry in listed.entries])
                files = next(known for known in lists if known == files)
                if not groups:
                    size = one_size(check_readable(listed.root, listed.entries))
                    _scale_to_model(context, size)
                counts[cell] = len(files)
                source = ItemSource(
                    ImageFiles(listed.root, files, answers),
                    pick=evenly_spaced(len(files), context.limit),
                    names=files,
                    digest=listed.digest(),
                    size=size,
                    workers=context.workers,
                    pin=context.device.type == "cuda",
                )
                groups.append(Group(cell, source, (Classify(cell),)))
                progress.advance(note=cell)
    _same_counts(context.folder, counts)
    if context.options.get("clean_data"):
        context.notes.append(f"The clean error, for the relative mCE, is measured on {context.options['clean_data']}.")
        clean = _clean_group(context, size)
        if clean.source.count != groups[0].source.count:
            context.notes.append(
                f"There are {clean.source.count:,} clean images for {groups[0].source.count:,} of each corruption: the "
                "interval of the relative mCE takes the clean error as exact."
            )
        groups.insert(0, clean)
    else:
        context.notes.append(
            "The published files hold no clean images, so there is no relative mCE: name them as clean_data."
        )
    context.notes.insert(0, "ImageNet-C's published files were read, without any resizing.")
    context.protocol |= {
        "mode": "published",
        "preprocessing": Preprocessing(None, size).to_dict(),
        "decoder": codec_name(),
    }
    context.notes[:] = dict.fromkeys(context.notes)
    return Plan(tuple(groups), context.protocol, partial(corrupted, alexnet=True), tuple(context.notes))


def _scale_to_model(context: Context, size: tuple[int, int]) -> None:
    """The files are read as they are; a model that was built for another size than theirs scales them itself."""
    if size != context.size:
        context.notes.append(f"The files measure {size[0]}x{size[1]}; the model scales them to its own size (bicubic).")
        context.protocol["scaled_to"] = list(context.size)
        for model in context.models:
            model.resize = True


def _clean_group(context: Context, size: tuple[int, int]) -> Group:
    """Clean images as the generator took them, whatever the model's size: to 256 pixels, bilinear, cut to 224."""
    other = replace(context, data=context.options["clean_data"], size=size, protocol={}, notes=[])
    group = Group("clean", other.images("bilinear"), (Classify("clean"),))
    context.protocol["clean"] = other.protocol
    context.notes.extend(other.notes)
    return group


def _same_counts(root: Path | None, counts: dict[str, int]) -> None:
    most = max(counts.values())
    short = [f"{name} holds {count:,}" for name, count in counts.items() if count != most]
    if short:
        raise VitfocusError(
            f"{root} is only half extracted: most folders hold {most:,} images, but {', '.join(short[:3])}"
            f"{'...' if len(short) > 3 else ''}."
        )


class Pixels:
    """Images of one severity in a published array, (N, 32, 32, 3) uint8, with their labels."""

    def __init__(self, path: Path, start: int, labels: Sequence[int]) -> None:
        self.path, self.start, self.labels = path, start, labels
        self._array: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._array is None:  # opened in the worker that reads it
            self._array = np.load(self.path, mmap_mode="r")
        pixels = np.array(self._array[self.start + index])
        return torch.from_numpy(pixels).permute(2, 0, 1), int(self.labels[index])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}


def _arrays(context: Context, root: Path) -> Plan:
    names, severities = chosen(context)
    missing = [name for name in names if not (root / f"{name}.npy").is_file()]
    if missing:
        raise VitfocusError(
            f"{root} lacks {', '.join(f'{name}.npy' for name in missing[:4])}: it is only half extracted."
        )
    if "index" in context.options:
        raise VitfocusError("index maps class folders to classes, but the data is published arrays: leave it out.")
    labels = _labels(root / "labels.npy")
    groups = []
    for name in names:
        array = _load(root / f"{name}.npy")
        if array.ndim != 4 or array.shape[1:] != (32, 32, 3) or array.dtype != np.uint8 or len(array) % 5:
            raise VitfocusError(f"{root / name}.npy is {array.dtype} {array.shape}; expected uint8 (50000, 32, 32, 3).")
        if len(labels) != len(array):
            raise VitfocusError(
                f"{root / 'labels.npy'} holds {len(labels)} labels, but {name}.npy {len(array)} images."
            )
        each = len(array) // 5
        for severity in severities:
            start = (severity - 1) * each
            answers = labels[start : start + each]
            pick = evenly_spaced(each, context.limit)
            stamp = digest_of([f"{name} {severity} {len(array)}", str(answers.tolist()), _sums(array, start, each)])
            source = ItemSource(Pixels(root / f"{name}.npy", start, answers.tolist()), pick=pick, digest=stamp)
            groups.append(Group(f"{name}/{severity}", source, (Classify(f"{name}/{severity}"),)))
    context.notes.insert(0, f"{context.suite}'s published arrays were read.")
    context.protocol |= {"mode": "published", "preprocessing": "none"}
    return Plan(tuple(groups), context.protocol, partial(corrupted, alexnet=False), tuple(context.notes))


def _labels(path: Path) -> Any:
    """The class of every image, (N,); a column (N, 1) will do."""
    labels = _load(path)
    if not np.issubdtype(labels.dtype, np.integer) or labels.size != len(labels):
        raise VitfocusError(f"{path} is {labels.dtype} {labels.shape}; expected one whole number an image.")
    return labels.reshape(-1).astype(np.int64)


def _sums(array: Any, start: int, count: int) -> str:
    """A cheap look at the pixels: the sum of a hundred images."""
    return str([int(array[start + index].astype(np.int64).sum()) for index in evenly_spaced(count, 100)])


def _load(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise VitfocusError(f"{path} cannot be read as an array: {error}.") from None
