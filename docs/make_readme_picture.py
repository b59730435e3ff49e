"""Draws the README's picture: a diagnosis of DeiT-Ti with its published weights, clean and under noise.

    python docs/make_readme_picture.py --weights deit_tiny_patch16_224.safetensors --image astronaut.png

The photograph is NASA's portrait of Eileen Collins, in the public domain (scikit-image's "astronaut"). It writes
docs/images/diagnosis.jpg, on its own white card so that it reads in light and dark.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

import vitfocus as vf
from vitfocus.attention.maps import enlarged, on_grid
from vitfocus.core.files import atomic_path
from vitfocus.kernels.statistics.reference import overfocus, received

LAYER, QUERY, NOISE = 11, (5, 5), "gaussian_noise"
INK, ACCENT, SECOND = "#24292f", "#D55E00", "#0072B2"


def main() -> None:
    """Diagnose, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--image", required=True, type=Path, help="a picture, or an .npz whose `clean` is one")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images" / "diagnosis.jpg")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = vf.open_model("deit_tiny_patch16_224", weights=args.weights)
    clean = read(args.image)
    noisy = vf.corrupt(clean, NOISE, severity=5)
    diagnosis = vf.diagnose(model, clean[None], noisy[None], name="DeiT-Ti")
    figure = draw(model, clean, noisy, diagnosis)
    with atomic_path(args.out) as path:  # JPEG without subsampling: the noise would make a PNG twice as large
        figure.savefig(path, dpi=140, facecolor="white", pil_kwargs={"quality": 90, "subsampling": 0, "optimize": True})
    print(f"{args.out}: {args.out.stat().st_size / 1024:.0f} kB")


def read(file: Path) -> Tensor:
    """The picture as uint8 (3, 224, 224)."""
    pixels = np.load(file)["clean"] if file.suffix == ".npz" else np.asarray(Image.open(file).convert("RGB"))
    return torch.from_numpy(np.asarray(Image.fromarray(pixels).resize((224, 224))).copy()).permute(2, 0, 1)


def draw(model: torch.nn.Module, clean: Tensor, noisy: Tensor, diagnosis: vf.Diagnosis) -> Figure:
    """Two rows, clean and noisy: the picture, where one patch looks, the map; beside them the layers' curves."""
    figure = Figure(figsize=(11.6, 5.6))
    pictures = figure.add_gridspec(2, 3, left=0.04, right=0.645, top=0.81, bottom=0.07, wspace=0.06, hspace=0.2)
    curves = figure.add_gridspec(2, 1, left=0.705, right=0.985, top=0.81, bottom=0.1, hspace=0.38)
    figure.text(0.04, 0.93, "Where does DeiT-Ti look?", fontsize=17, fontweight="bold", color=INK)
    said = "In its last layer all patches lean on the same few tokens, and under noise (severity 5) on others."
    figure.text(0.04, 0.882, said, fontsize=11, color="#57606a")
    maps = {"clean": one_map(model, clean), "noisy": one_map(model, noisy)}
    top = max(float(heads.mean(0).quantile(0.995)) for heads, _ in maps.values())
    looks = {name: row_of(heads, block) for name, (heads, block) in maps.items()}
    bright = max(float(look.max()) for look in looks.values())
    for row, (name, image) in enumerate((("clean", clean), ("noisy", noisy))):
        heads, _ = maps[name]
        photograph, overlay, matrix = (figure.add_subplot(pictures[row, column]) for column in range(3))
        photograph.imshow(image.permute(1, 2, 0))
        overlay.imshow(image.float().mean(0), cmap="gray", vmin=0, vmax=255)
        overlay.imshow(enlarged(looks[name], (224, 224)), cmap="inferno", vmin=0, vmax=bright, alpha=0.72)
        for panel in (photograph, overlay):
            panel.add_patch(Rectangle((16 * QUERY[1], 16 * QUERY[0]), 16, 16, fill=False, edgecolor="white", lw=2.4))
            panel.add_patch(Rectangle((16 * QUERY[1], 16 * QUERY[0]), 16, 16, fill=False, edgecolor=SECOND, lw=1.2))
        matrix.imshow(heads.mean(0), cmap="Reds", vmin=0, vmax=top, interpolation="nearest")
        share = 100 * float(overfocus(received(heads)).mean())
        matrix.set_xlabel(f"10 of 197 tokens receive {share:.0f} %", fontsize=9.5, color=ACCENT)
        photograph.set_ylabel(name, fontsize=12, fontweight="bold", color=INK)
        if row == 0:
            for panel, title in zip(
                (photograph, overlay, matrix), ("photograph", "where one patch looks", "every patch's attention"),
                strict=True,
            ):  # fmt: skip
                panel.set_title(title, fontsize=11, color=INK)
        for panel in (photograph, overlay, matrix):
            panel.set_xticks([])
            panel.set_yticks([])
    curve(figure.add_subplot(curves[0]), diagnosis, "overfocus", ACCENT, "overfocus: share of the top 5 % tokens", 0.05)
    stability = figure.add_subplot(curves[1])
    curve(stability, diagnosis, "stability", SECOND, "stability: cosine of clean and noisy maps")
    stability.set_xlabel("layer", fontsize=9.5)
    return figure


def one_map(model: torch.nn.Module, image: Tensor) -> tuple[Tensor, Any]:
    """The heads' maps (heads, N, N) of the layer shown, and the layer's block."""
    maps = vf.attention_maps(model, image[None], layers=[LAYER])
    return maps[0][0], maps.blocks[0]


def row_of(heads: Tensor, block: Any) -> Tensor:
    """Where the marked patch looks, heads averaged: (rows, columns)."""
    token = block.prefix_tokens + QUERY[0] * block.grid()[1] + QUERY[1]
    return on_grid(heads.mean(0)[token], block.grid(), block.prefix_tokens)


def curve(panel: Any, diagnosis: vf.Diagnosis, key: str, colour: str, title: str, uniform: float | None = None) -> None:
    """One number by depth."""
    values = [row[key] for row in diagnosis.rows]
    panel.plot(range(len(values)), values, color=colour, marker="o", markersize=4.5, lw=2)
    if uniform is not None:
        panel.axhline(uniform, color="#8c959f", lw=1, ls=":")
        panel.text(len(values) - 1, uniform + 0.015, "uniform attention", ha="right", fontsize=8.5, color="#57606a")
    panel.set_ylim(0, None if uniform is not None else 1.03)
    panel.set_title(title, fontsize=11, color=INK, loc="left")
    panel.set_xticks(range(0, len(values), 2))
    panel.tick_params(labelsize=8.5)
    panel.grid(axis="y", color="#d0d7de", lw=0.6)
    panel.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
