"""Figures with matplotlib, as in the papers: readings by depth, N×N maps, heads side by side, overlays.

matplotlib is an optional extra (vitfocus[plot]). Figures are made without pyplot, so there is no global state.
Colours are Okabe and Ito's, which are colour-blind safe; lines also differ by marker, bars by order. Functions that
draw maps take a model, or several by the names shown in the figure; several models share one colour scale.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Block, anatomy
from vitfocus.attention.batches import Batches, Images, normalised
from vitfocus.attention.capture import Models, named_models, pick_blocks
from vitfocus.attention.curves import Diagnoses, reading_curves, series
from vitfocus.attention.maps import attention_maps, enlarged, normalise_together, on_grid, rollout
from vitfocus.attention.readings import charts, figures
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.kernels.statistics.reference import overfocus, received

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot(diagnoses: Diagnoses, kind: str = "entropy") -> Figure:
    """Draw a reading of one or more diagnoses by depth.

    Args:
        diagnoses: The diagnoses by their names in the legend.
        kind: The figure, as for `Diagnosis.plot`.

    Returns:
        A matplotlib figure with one line or box per diagnosis.

    Raises:
        VitfocusError: There is no such figure, no layer has a value for it, or matplotlib is not installed.
    """
    known = figures()
    if kind not in known:
        raise VitfocusError(f"There is no figure {kind!r}: {nearest(kind, known)}")
    key = known[kind]
    if not any(key in row for diagnosis in diagnoses.values() for row in diagnosis.rows):
        hint = " Pass `against=` to diagnose to measure it." if kind == "stability" else ""
        hint = " The model has no scaled Context Broadcasting (cbs)." if kind == "scaling" else hint
        raise VitfocusError(f"No layer has a number for the figure {kind!r}.{hint}")
    if kind == "stability":
        return _stability(diagnoses)
    return _scaling(diagnoses) if kind == "scaling" else _curves(diagnoses, key)


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Create a figure without pyplot.

    Args:
        width: Width in inches.
        height: Height in inches.
        rows: Rows of axes.
        columns: Columns of axes.
        **options: Passed to `Figure.subplots`.

    Returns:
        The figure and its axes.

    Raises:
        VitfocusError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise VitfocusError("Figures need matplotlib, which is not installed: pip install vitfocus[plot].") from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def png(figure: Figure) -> bytes:
    """Render a figure.

    Args:
        figure: A matplotlib figure.

    Returns:
        The bytes of a PNG file.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _curves(diagnoses: Diagnoses, key: str) -> Figure:
    """A reading by depth (entropy: Context Broadcasting's Figures 4 and 7a; distance: its Figure 7b)."""
    chart = charts()[key]
    figure, axes = _by_depth(diagnoses, chart.axis)
    curves = reading_curves(key, diagnoses, {name: index for index, name in enumerate(diagnoses)})
    for line in curves.lines:
        colour, marker = COLOURS[line.colour], MARKERS[line.colour]
        style: dict[str, Any] = {"linestyle": ":"} if line.dashed else {"marker": marker, "markersize": 5}
        axes.plot(*zip(*line.points, strict=True), color=colour, label=line.name, **style)
        if line.band:
            layers, low, high = zip(*line.band, strict=True)
            axes.fill_between(layers, low, high, color=colour, alpha=0.15, linewidth=0)
    for index, reference in enumerate(curves.references):
        style = {"color": "0.45", "linestyle": ("--", "-.", ":")[index % 3], "linewidth": 1, "label": reference.name}
        if reference.band:
            layers, low, high = zip(*reference.band, strict=True)
            axes.fill_between(layers, low, high, color="0.5", alpha=0.15, linewidth=0, label=reference.name, zorder=0)
        elif reference.level is not None:
            axes.axhline(reference.level, **style)
        else:
            axes.plot(*zip(*reference.points, strict=True), **style)
    axes.set_ylim(curves.low, 1.02 * curves.high if curves.high is not None else None)
    axes.set_title(f"{chart.title} by depth" + (f" (band: {chart.band})" if chart.band else ""))
    axes.legend(frameon=False, fontsize="small")
    return figure


def _stability(diagnoses: Diagnoses) -> Figure:
    """TAP and ADL's Figures 1 and 5: the cosines of every image and head, by layer and all together."""
    figure, axes = _by_depth(diagnoses, "cosine of clean and corrupted maps", width=9.0)
    last = max(depth for diagnosis in diagnoses.values() for depth in diagnosis.stability_values) + 2
    handles = []
    for index, (label, diagnosis) in enumerate(diagnoses.items()):
        values = sorted(diagnosis.stability_values.items())
        pooled = {depth: [value for image in images for value in image] for depth, images in values}
        pooled[last] = [value for cosines in pooled.values() for value in cosines]
        width = 0.8 / len(diagnoses)
        places = [depth + (index - (len(diagnoses) - 1) / 2) * width for depth in pooled]
        boxes = axes.boxplot(
            list(pooled.values()),
            positions=places,
            widths=0.85 * width,
            patch_artist=True,
            manage_ticks=False,
            flierprops={"marker": ".", "markersize": 2, "markeredgecolor": COLOURS[index], "alpha": 0.4},
            medianprops={"color": "black"},
            boxprops={"facecolor": COLOURS[index], "alpha": 0.75},
        )
        handles.append((boxes["boxes"][0], f"{label}: mean {sum(pooled[last]) / len(pooled[last]):.2f}"))
    axes.axvline(last - 1, color="0.7", linewidth=0.8)
    ticks = [tick for tick in axes.get_xticks() if tick < last - 1]
    axes.set_xticks([*ticks, last], [*(f"{tick:g}" for tick in ticks), "all"])
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.02)
    corruptions = sorted({str(diagnosis.against) for diagnosis in diagnoses.values()})
    axes.set_title(f"How stable attention is under {', '.join(corruptions)} (one value per image and head)")
    axes.legend(*zip(*handles, strict=True), frameon=False, loc="lower left")
    return figure


def _scaling(diagnoses: Diagnoses) -> Figure:
    """Context Broadcasting's Figure 8: the scaling weights' ratio of quantiles, and their mean."""
    figure, panels = new_figure(9.0, 3.6, 1, 2)
    for axes, key, label, title in (
        (panels[0], "scaling_ratio", "|λ| quantiles, 10 % over 90 %", "How similarly the channels are scaled"),
        (panels[1], "scaling_mean", "mean of λ", "How much uniform attention is added"),
    ):
        for index, (name, diagnosis) in enumerate(diagnoses.items()):
            points = zip(*series(diagnosis.rows, key), strict=True)
            axes.plot(*points, color=COLOURS[index], marker=MARKERS[index], markersize=5, label=name)
        style_axes(axes, "layer (0 is the first)", label)
        _depth_ticks(axes, diagnoses)
        axes.set_title(title)
    panels[0].set_ylim(0, 1.02)
    panels[1].axhline(0, color="0.7", linewidth=0.8)
    panels[1].legend(frameon=False)
    return figure


def _by_depth(diagnoses: Diagnoses, label: str, width: float = 7.0) -> tuple[Figure, Axes]:
    figure, axes = new_figure(width, 4.0)
    style_axes(axes, "layer (0 is the first)", label)
    _depth_ticks(axes, diagnoses)
    return figure, axes


def style_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Set the axis labels, a horizontal grid and no frame.

    Args:
        axes: The axes to change.
        x_label: Label of the horizontal axis.
        y_label: Label of the vertical axis.
    """
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.title.set_fontsize("medium")


def _depth_ticks(axes: Axes, diagnoses: Diagnoses) -> None:
    depth = 1 + max(row["layer"] for diagnosis in diagnoses.values() for row in diagnosis.rows)
    axes.set_xticks(range(0, depth, 1 if depth <= 16 else 2 if depth <= 32 else 4))
    axes.set_xlim(-0.6, depth - 0.4)
    axes.set_autoscalex_on(True)


#: Perceptually uniform and colour-blind safe: white to red for maps, dark to bright for overlays.
MAP_COLOURS, OVERLAY_COLOURS = "Reds", "inferno"


def map_matrices(models: Models, images: Images | Mapping[str, Images], layer: int | str = -1) -> Figure:
    """Draw head-averaged N×N maps (TAP and ADL's Figures 1 and 3), one row per model and one column per image.

    Dark columns are tokens that all queries attend to. The curve above a map is the attention each token receives; the
    title gives the share received by the top 5 % of the tokens.

    Args:
        models: A model, or models by name.
        images: One image, or images by name.
        layer: The layer, by index or name.

    Returns:
        A matplotlib figure.

    Raises:
        VitfocusError: The layer attends within windows, or matplotlib is not installed.
    """
    models, pictures = named_models(models), images if isinstance(images, Mapping) else {"": images}
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
            maps = attention_maps(model, _single(image, model), layers=[layer], normalised=True)[0]
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


def head_maps(model: nn.Module, image: Images, layer: int | str = -1) -> Figure:
    """Draw the N×N map of every head of a layer on one colour scale (TAP and ADL's Figure 4).

    Args:
        model: The model.
        image: One image.
        layer: The layer, by index or name.

    Returns:
        A matplotlib figure.

    Raises:
        VitfocusError: The layer has no token-to-token map, or matplotlib is not installed.
    """
    maps = attention_maps(model, _single(image, model), layers=[layer], normalised=True)[0][0]
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
    image: Images,
    query: tuple[int, int],
    layer: int | str = -1,
    threshold: float = 2.0,
) -> Figure:
    """Draw what one patch attends to, averaged over heads: the image with the query, then one overlay per model.

    All models share one threshold and one min–max scale.

    Args:
        models: A model, or models by name.
        image: One image.
        query: Row and column of the patch; negative values count from the end.
        layer: The layer, by index or name.
        threshold: Attention below `threshold` / K, for K keys, is not shown.

    Returns:
        A matplotlib figure.

    Raises:
        VitfocusError: There is no such patch, the layer attends within windows, or matplotlib is not installed.
    """
    models = named_models(models)
    found = [_row_picture(model, image, query, layer) for model in models.values()]
    _, block, size = found[0]
    pictures = normalise_together([picture for picture, _, _ in found], threshold, block.prefix_tokens)
    rows, columns = block.attention_grids(size)[0]
    place = ((query[1] % columns + 0.5) * size[1] / columns, (query[0] % rows + 0.5) * size[0] / rows)
    first = next(iter(models.values()))
    title = f"attention of patch {query} (below {threshold:g}/K cut; one scale for all)"
    return _overlay(_picture(image, first), dict(zip(models, pictures, strict=True)), title, place)


def class_overlay(models: Models, image: Images, layer: int | str = -1, through: bool = False) -> Figure:
    """Draw what the class token attends to, averaged over heads, on one scale for all models.

    Args:
        models: A model, or models by name.
        image: One image.
        layer: The layer, by index or name.
        through: Show the rollout through all layers (`rollout`) instead of the map of one layer.

    Returns:
        A matplotlib figure.

    Raises:
        VitfocusError: A model has no class token, or matplotlib is not installed.
    """
    models = named_models(models)
    pictures = []
    for label, model in models.items():
        maps = attention_maps(
            model,
            _single(image, model),
            layers=None if through else [layer],
            queries=None if through else 0,
            normalised=True,
        )
        block = maps.blocks[-1]
        if not block.class_token:
            raise VitfocusError(
                f"{label} has no class token in {block.name}; use query_overlay for a patch's attention."
            )
        attention = rollout(maps)[0, 0] if through else maps[-1][0].mean(dim=0)[0]
        pictures.append(on_grid(attention, block.attention_grids(maps.size)[1], block.prefix_tokens))
    first = next(iter(models.values()))
    title = "rollout from the class token" if through else "attention of the class token"
    return _overlay(_picture(image, first), dict(zip(models, normalise_together(pictures, 0.0), strict=True)), title)


def _row_picture(
    model: nn.Module, image: Images, query: tuple[int, int], layer: int | str
) -> tuple[Tensor, Block, tuple[int, int]]:
    pixels, (block,) = _single(image, model), pick_blocks(anatomy(model), layer)
    size = (pixels.shape[-2], pixels.shape[-1])
    (rows, columns), keys = block.attention_grids(size)
    if block.window is not None:
        raise VitfocusError(f"{block.name} attends within windows; an overlay needs a layer that sees the whole image.")
    row, column = query
    if not (-rows <= row < rows and -columns <= column < columns):
        raise VitfocusError(f"There is no patch {query}: the grid has {rows} rows and {columns} columns.")
    token = block.prefix_tokens + (row % rows) * columns + column % columns
    attention = attention_maps(model, pixels, layers=layer, queries=token, normalised=True)[0]
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


def _single(image: Images, model: nn.Module) -> Tensor:
    """One image in any form, as a normalised batch of one."""
    body = anatomy(model)
    found = [normalised(batch.pixels, body) for batch in Batches(image, body)]
    count = sum(len(batch) for batch in found)
    if count != 1:
        raise VitfocusError(f"A picture shows one image, but {count} were given; pick one, such as images[0].")
    return found[0]


def _picture(image: Images, model: nn.Module) -> Tensor:
    """The image without normalisation: (height, width, 3) in [0, 1]."""
    body = anatomy(model)
    pixels = _single(image, model)[0].float().cpu()
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (body.mean, body.std))
    return (pixels * std + mean).clamp(0, 1).permute(1, 2, 0)


def _same_height(panels: Sequence[Any]) -> None:
    top = max(panel.get_ylim()[1] for panel in panels)
    for panel in panels:
        panel.set_ylim(0, top)
