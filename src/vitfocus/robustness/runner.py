"""The loop: one decoded batch feeds every condition of its group and every model, and each image counts once.

Corruption, normalisation and models run on the device, without waiting for it; outcomes come back when a part is kept:
every twenty seconds, at the end, and when anything goes wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.core.processes import Processes
from vitfocus.core.progress import Progress
from vitfocus.robustness.cells import Watched
from vitfocus.robustness.pixels import PixelModel
from vitfocus.robustness.plan import Columns, Group, Plan, Samples, in_order
from vitfocus.robustness.runfolder import RunFolder, keeping
from vitfocus.robustness.sources import Batch, Share, digest_of


def run(
    plan: Plan,
    models: Sequence[PixelModel],
    classes: int,
    processes: Processes,
    batch_size: int,
    folder: RunFolder | None = None,
    show: bool = True,
    title: str = "Evaluating",
) -> tuple[Samples, dict[str, str]]:
    """Measure every condition; return the samples on every process, and a digest of each group's data."""
    kept: dict[str, Columns] = {}
    if folder is not None and processes.first:
        kept = {group.name: _merge(folder.read_parts(group.name)) for group in plan.groups}
    kept = processes.agree(kept)
    done = sum(len(kept[g.name]["positions"]) * len(g.cells) for g in plan.groups if kept.get(g.name))
    samples: Samples = {}
    digests: dict[str, str] = {}
    opening = f"{title}, {plan.steps - done:,} image evaluations." if plan.steps is not None else f"{title}."
    with Progress(title, plan.steps, done, opening=opening, show=show and processes.first) as progress:
        for group in plan.groups:
            columns = _run_group(
                group, models, classes, processes, batch_size, folder, kept.get(group.name, {}), progress
            )
            digests[group.name] = group.source.digest or digest_of(map(str, columns["checksum"].tolist()))
            for i, cell in enumerate(group.cells):
                samples[cell.name] = {
                    model.name: {k.partition("|")[2]: v for k, v in columns.items() if k.startswith(f"{i}.{j}|")}
                    for j, model in enumerate(models)
                }
    return samples, digests


def read_digests(plan: Plan, processes: Processes, batch_size: int) -> dict[str, str]:
    """A digest of each group's data without measuring anything, by reading what is not known by its files."""
    digests: dict[str, str] = {}
    for group in plan.groups:
        if group.source.digest is not None:
            digests[group.name] = group.source.digest
            continue
        share = Share(rank=processes.rank, world=processes.world)
        parts = [
            {"positions": batch.positions.numpy(), "checksum": _checksums(batch).numpy()}
            for batch in group.source.batches(batch_size, share)
        ]
        columns = _merge([part for content in processes.gather(parts) for part in content])
        digests[group.name] = digest_of(map(str, columns["checksum"].tolist() if columns else []))
    return digests


def _run_group(
    group: Group,
    models: Sequence[PixelModel],
    classes: int,
    processes: Processes,
    batch_size: int,
    folder: RunFolder | None,
    kept: Columns,
    progress: Progress,
) -> Columns:
    known = dict(zip(kept["positions"].tolist(), kept["checksum"].tolist(), strict=True)) if "checksum" in kept else {}
    done = frozenset(kept["positions"].tolist()) if kept and not known else frozenset[int]()
    share = Share(done, processes.rank, processes.world)
    parts: list[Columns] = []
    pending: list[dict[str, Tensor]] = []
    tried: set[tuple[int, int]] = set()

    def keep() -> None:
        if not pending:
            return
        part = {name: torch.cat([item[name] for item in pending]).cpu().numpy() for name in pending[0]}
        pending.clear()
        _refuse_nan(part, group, models)
        parts.append(part)
        if folder is not None:
            folder.write_part(group.name, part)

    with keeping(keep) as now_and_then:
        for batch in group.source.batches(batch_size, share):
            _check(batch, classes)
            checksums = _checksums(batch) if group.source.digest is None else None
            if checksums is not None and known:
                left = _not_done(batch, checksums, known)
                batch, checksums = batch.take(left), checksums[left]
                if not len(batch):
                    continue
            size = (batch.images.shape[-2], batch.images.shape[-1])
            if size not in tried:
                _try_size(size, group, models, processes.device)
                tried.add(size)
            item = {"positions": batch.positions}
            if checksums is not None:
                item["checksum"] = checksums
            batch = batch.to(processes.device)
            for i, cell in enumerate(group.cells):
                for j, outcome in enumerate(cell(batch, models)):
                    item |= {f"{i}.{j}|{name}": values for name, values in outcome.items()}
                progress.advance(len(batch) * processes.world, cell.name)
            if not (parts or pending):
                _refuse_nan({name: values.cpu().numpy() for name, values in item.items()}, group, models)
            pending.append(item)
            now_and_then()
    if known and group.source.count is not None and max(known) >= group.source.count:
        raise VitfocusError(
            _OTHER_DATA.format(f"there were at least {max(known) + 1} images, now {group.source.count}")
        )
    everything = [part for content in processes.gather(parts) for part in content]
    columns = _merge([kept, *everything] if kept else everything)
    _account(group, columns)
    return columns


def _merge(parts: list[Columns]) -> Columns:
    """Parts as one, in order of position; an image that two parts hold (a crash between them) counts once."""
    if not parts:
        return {}
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    _, first = np.unique(columns["positions"], return_index=True)
    return in_order(columns["positions"][first], {name: values[first] for name, values in columns.items()})


def _account(group: Group, columns: Columns) -> None:
    """Every image once, none twice."""
    expected = group.source.count
    found = columns["positions"].tolist() if columns else []
    if not found:
        raise VitfocusError("The data holds no images, so there is nothing to measure.")
    if found != list(range(len(found) if expected is None else expected)):
        raise RuntimeError(f"{group.name}: {len(found)} images were measured, but there are {expected}.")


def _try_size(size: tuple[int, int], group: Group, models: Sequence[PixelModel], device: torch.device) -> None:
    """Ask the models whether they take images of this size, where it is not their own."""
    for model in models:
        if size != model.size and not model.resize and not any(isinstance(cell, Watched) for cell in group.cells):
            model.classes(size, device)


def _check(batch: Batch, classes: int) -> None:
    """What only the data itself can tell: values in range, labels the model knows."""
    images, labels = batch.images, batch.labels
    if images.dtype != torch.uint8:
        if not images.is_floating_point():
            raise VitfocusError(f"Images have dtype {images.dtype}; expected uint8, or floats in [0, 1].")
        low, high = (float(value) for value in images.aminmax())
        if not (low >= -1e-3 and high <= 1 + 1e-3):  # so that NaN is refused as well
            raise VitfocusError(
                f"Float images lie in [{low:.3g}, {high:.3g}]; expected [0, 1]: evaluate itself normalises."
            )
    if labels.numel() and (int(labels.max()) >= classes or (labels.ndim == 1 and int(labels.min()) < 0)):
        raise VitfocusError(
            f"The data has the label {int(labels.max() if labels.max() >= classes else labels.min())}, "
            f"but the model knows the classes 0 to {classes - 1}."
        )


_OTHER_DATA = "The data is not what this run began with ({}), so it cannot be resumed: name another folder."


def _not_done(batch: Batch, checksums: Tensor, known: dict[int, int]) -> list[int]:
    """The places in a batch of images that were not measured yet; those that were must be the same as then."""
    left = []
    for place, (position, found) in enumerate(zip(batch.positions.tolist(), checksums.tolist(), strict=True)):
        if position not in known:
            left.append(place)
        elif known[position] != found:
            raise VitfocusError(_OTHER_DATA.format(f"image {position} or its label differs"))
    return left


def _refuse_nan(part: Columns, group: Group, models: Sequence[PixelModel]) -> None:
    """A model that answers with NaN has no prediction, which would pass for a wrong one."""
    for i, cell in enumerate(group.cells):
        for j, model in enumerate(models):
            for name in ("confidence", "flip"):
                values = part.get(f"{i}.{j}|{name}")
                if values is not None and np.isnan(values).any():
                    image = int(part["positions"][np.isnan(values)][0])
                    raise VitfocusError(f"{model.name} gave NaN for image {image} ({cell.name}): it cannot be scored.")


def _checksums(batch: Batch) -> Tensor:
    """Eight bytes of BLAKE2 per image and its label, int64; floats that are 8-bit values count as those."""
    images, labels = batch.images.detach().cpu(), batch.labels.cpu().long().reshape(len(batch), -1).tolist()
    sizes = [images.shape[-2:]] * len(batch) if batch.sizes is None else batch.sizes.tolist()
    sums = []
    for padded, label, (height, width) in zip(images, labels, sizes, strict=True):
        image = padded[..., :height, :width]
        if image.is_floating_point():
            levels = image.float() * 255
            whole = levels.round()
            exact = bool(levels.sub_(whole).abs_().amax() < 1e-2)
            image = whole.to(torch.uint8) if exact else image.float()
        state = hashlib.blake2b(f"{tuple(image.shape)} {label}".encode(), digest_size=8)
        state.update(image.contiguous().view(torch.uint8).numpy().data)
        sums.append(int.from_bytes(state.digest(), "big", signed=True))
    return torch.tensor(sums, dtype=torch.int64)
