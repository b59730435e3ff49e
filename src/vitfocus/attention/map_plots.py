"""Attention maps with matplotlib: N×N maps, in which overfocus shows as vertical lines, heads side by side, overlays.

Every function takes a model, or several by the names shown in the figure, and one image as the model takes it. Several
models share one colour scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy, Block, anatomy
from vitfocus.attention.images import normalised
from vitfocus.attention.maps import AttentionMaps, attention_maps, enlarged, normalise_together, on_grid, rollout
from vitfocus.attention.plots import new_figure
from vitfocus.attention.session import model_name
from vitfocus.core.errors import VitfocusError
from vitfocus.kernels.statistics.reference import overfocus, received

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Models = nn.Module | Mapping[str, nn.Module]

#: Perceptually uniform and colour-blind safe: white to red for maps, dark to bright for overlays.
MAP_COLOURS, OVERLAY_COLOURS = "Reds", "inferno"


def map_matrices(models: Models, images: Tensor | Mapping[str, Tensor], layer: int | str = -1) -> Figure:
    """Head-averaged N×N maps (TAP and ADL's Figures 1 and 3), one row per model and one column per image.

    Dark columns are tokens that all queries attend to. The curve above a map is the attention each token receives; the
    title gives the share received by the top 5 % of the tokens.
    """
    models, pictures = _named(models), images if isinstance(images, Mapping) else {"": images}
    figure, axes = new_figure(
        3.4 * len(pictures) + 0.8,
        4.1 * len(models),
        2 * len(models),
        len(pictures),
        squeeze=False,
        height_ratios=[1, 5] * len(models),
    )
    drawn = []
    for row, (model_label, model) in enumerate(models.items()):
        for column, (image_label, image) in enumerate(pictures.items()):
            maps = attention_maps(model, _single(image), layers=[layer])[0]
            if maps.shape[0] != 1:
                raise VitfocusError(
                    f"This layer of {model_label} attends within {maps.shape[0]} windows; choose one without windows."
                )
            title = " · ".join(filter(None, (model_label, image_label)))
            drawn.append((axes[2 * row, column], axes[2 * row + 1, column], maps[0], title))
    top = max(float(maps.mean(dim=0).quantile(0.99)) for *_, maps, _ in drawn)
    for above, below, maps, title in drawn:
        average = maps.mean(dim=0)
        share = float(overfocus(received(maps)).mean())
        above.fill_between(range(average.shape[1]), 100 * received(average), color="#D55E00", linewidth=0)
        above.set_xlim(-0.5, average.shape[1] - 0.5)
        above.set_xticks([])
        above.set_ylabel("received\n(%)", fontsize="small")
        above.spines[["top", "right"]].set_visible(False)
        above.set_title(f"{title}\n5 % of tokens receive {100 * share:.0f} %", fontsize="medium")
        shown = below.imshow(average, cmap=MAP_COLOURS, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        below.set_xlabel("key token")
        below.set_ylabel("query token")
    figure.colorbar(shown, ax=[below for _, below, *_ in drawn], label="attention, mean of heads", shrink=0.8)
    _same_height([above for above, *_ in drawn])
    return figure


def head_maps(model: nn.Module, image: Tensor, layer: int | str = -1) -> Figure:
    """The N×N map of every head of a layer on one colour scale (TAP and ADL's Figure 4)."""
    maps = attention_maps(model, _single(image), layers=[layer])[0][0]
    columns = min(len(maps), 6)
    rows = -(-len(maps) // columns)
    figure, axes = new_figure(2.6 * columns + 0.6, 2.9 * rows, rows, columns, squeeze=False)
    top = float(maps.flatten(1).quantile(0.99, dim=-1).max()) if maps[0].numel() < 1 << 23 else float(maps.max())
    for index, panel in enumerate(axes.flat):
        if index >= len(maps):
            panel.axis("off")
            continue
        shown = panel.imshow(maps[index], cmap=MAP_COLOURS, vmin=0, vmax=top, interpolation="nearest")
        share = float(overfocus(received(maps[index])))
        panel.set_title(f"head {index}: top 5 % get {100 * share:.0f} %", fontsize="small")
        panel.tick_params(labelsize="x-small")
        if index % columns == 0:
            panel.set_ylabel("query token")
        if index >= len(maps) - columns:
            panel.set_xlabel("key token")
    figure.colorbar(shown, ax=axes, label="attention", shrink=0.8)
    return figure


def query_overlay(
    models: Models,
    image: Tensor,
    query: tuple[int, int],
    layer: int | str = -1,
    threshold: float = 2.0,
) -> Figure:
    """What one patch attends to, averaged over heads: the image with the query marked, then each model's attention.

    For all models alike, attention below `threshold` / K is cut, and one min–max scale is used.
    """
    models = _named(models)
    found = [_row_picture(model, image, query, layer) for model in models.values()]
    _, block, size = found[0]
    pictures = normalise_together([picture for picture, _, _ in found], threshold, block.prefix_tokens)
    rows, columns = block.attention_grids(size)[0]
    place = ((query[1] % columns + 0.5) * size[1] / columns, (query[0] % rows + 0.5) * size[0] / rows)
    body = anatomy(next(iter(models.values())))
    title = f"attention of patch {query} (below {threshold:g}/K cut; one scale for all)"
    return _overlay(_picture(image, body), dict(zip(models, pictures, strict=True)), title, place)


def class_overlay(models: Models, image: Tensor, layer: int | str = -1, through: bool = False) -> Figure:
    """What the class token attends to, averaged over heads, on one scale for all models.

    `through` follows attention through all layers (`rollout`) instead of showing one layer's map.
    """
    models = _named(models)
    pictures = []
    for label, model in models.items():
        maps = attention_maps(
            model, _single(image), layers=None if through else [layer], queries=None if through else 0
        )
        block = maps.blocks[-1]
        if not block.class_token:
            raise VitfocusError(
                f"{label} has no class token in {block.name}; use query_overlay for a patch's attention."
            )
        attention = rollout(maps)[0, 0] if through else maps[-1][0].mean(dim=0)[0]
        pictures.append(on_grid(attention, block.attention_grids(maps.size)[1], block.prefix_tokens))
    body = anatomy(next(iter(models.values())))
    title = "rollout from the class token" if through else "attention of the class token"
    return _overlay(_picture(image, body), dict(zip(models, normalise_together(pictures, 0.0), strict=True)), title)


def _row_picture(
    model: nn.Module, image: Tensor, query: tuple[int, int], layer: int | str
) -> tuple[Tensor, Block, tuple[int, int]]:
    maps: AttentionMaps = attention_maps(model, _single(image), layers=[layer], queries=slice(0, 0))
    block, size = maps.blocks[0], maps.size
    (rows, columns), keys = block.attention_grids(size)
    if block.window is not None:
        raise VitfocusError(f"{block.name} attends within windows; an overlay needs a layer that sees the whole image.")
    row, column = query
    if not (-rows <= row < rows and -columns <= column < columns):
        raise VitfocusError(f"There is no patch {query}: the grid has {rows} rows and {columns} columns.")
    token = block.prefix_tokens + (row % rows) * columns + column % columns
    attention = attention_maps(model, _single(image), layers=[layer], queries=token)[0]
    return on_grid(attention[0].mean(dim=0)[0], keys, block.prefix_tokens), block, size


def _overlay(
    picture: Tensor, overlays: Mapping[str, Tensor], title: str, mark: tuple[float, float] | None = None
) -> Figure:
    height, width = picture.shape[:2]
    figure, axes = new_figure(3.0 * (1 + len(overlays)) + 0.6, 3.0 * height / width + 0.7, 1, 1 + len(overlays))
    panels: Sequence[Any] = axes
    panels[0].imshow(picture)
    panels[0].set_title("image", fontsize="medium")
    for panel, (label, overlay) in zip(panels[1:], overlays.items(), strict=True):
        panel.imshow(picture.mean(dim=-1), cmap="gray", vmin=0, vmax=1)
        shown = panel.imshow(enlarged(overlay, (height, width)), cmap=OVERLAY_COLOURS, vmin=0, vmax=1, alpha=0.65)
        panel.set_title(label, fontsize="medium")
    for panel in panels:
        panel.axis("off")
        if mark is not None:
            for colour, thickness in (("white", 3), ("#0072B2", 1.5)):
                panel.plot(*mark, marker="s", ms=8, mfc="none", mec=colour, mew=thickness)
    figure.colorbar(shown, ax=list(panels), label="attention (0 to 1)", shrink=0.8)
    figure.suptitle(title, fontsize="medium")
    return figure


def _named(models: Models) -> dict[str, nn.Module]:
    return {model_name(models): models} if isinstance(models, nn.Module) else dict(models)


def _single(image: Tensor) -> Tensor:
    batch = image if image.ndim == 4 else image[None]
    if len(batch) != 1:
        raise VitfocusError(f"A picture shows one image, but {len(batch)} were given; pick one, such as images[0].")
    return batch


def _picture(image: Tensor, body: Anatomy) -> Tensor:
    """The image without normalisation: (height, width, 3) in [0, 1]."""
    pixels = normalised(_single(image), body)[0].float().cpu()
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (body.mean, body.std))
    return (pixels * std + mean).clamp(0, 1).permute(1, 2, 0)


def _same_height(panels: Sequence[Any]) -> None:
    top = max(panel.get_ylim()[1] for panel in panels)
    for panel in panels:
        panel.set_ylim(0, top)
