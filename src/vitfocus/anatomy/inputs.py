"""Candidate inputs for the traced forward pass of a module, guessed from its signature, config and layers.

A module may take images, videos, pairs of images, pre-cut patches, or text. Each guess is a dict of named inputs, the
likeliest first; a wrong guess raises an error in the module.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.anatomy.block import Size, pair

_IMAGES = ("pixel_values", "pixel_values_videos", "images")
_TEXT = ("input_ids", "tokens", "text", "ids", "decoder_input_ids")
#: Arguments with the positions of pre-cut patches.
PLACES = ("grid_thw", "image_grid_thw", "spatial_shapes", "target_sizes", "tgt_sizes", "pixel_position_ids")
_SIDE = 12  # patches: divisible by the windows and mergers of the usual towers


def example_inputs(root: nn.Module) -> Iterator[dict[str, Any]]:
    """Inputs on which a module may run, likeliest first."""
    examples = _ExampleInputs(root)
    if set(examples.names) & set(PLACES):
        yield from examples.cut_images()
    first = next((one for one in _IMAGES if one in examples.names), None)
    first = first or (examples.names[0] if examples.names and examples.names[0] not in _TEXT else None)
    if first is not None:
        for tensor in examples.images(first):
            yield from examples.with_others({first: tensor})
    text = next((one for one in (*examples.names[:1], "input_ids") if one in _TEXT and one in examples.names), None)
    if text is not None:
        yield from examples.with_others({text: examples.text()})


class _ExampleInputs:
    """Makes inputs of the sizes that a module states in its config, its `pretrained_cfg` or its layers."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        parameters = [p for p in inspect.signature(root.forward).parameters.values() if p.kind in (0, 1, 3)]
        self.names = [p.name for p in parameters]
        self.required = [p.name for p in parameters if p.default is p.empty]
        weight = next((p for p in root.parameters() if p.is_floating_point()), torch.empty(0))
        self.place: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        convs = (nn.Conv2d, nn.Conv3d)
        self.conv: Any = next((m for m in root.modules() if isinstance(m, convs) and m.in_channels <= 16), None)
        config = getattr(root, "config", None)
        self.config: Any = getattr(config, "vision_config", None) or config

    def number(self, *names: str, default: int) -> int:
        """The first of these numbers that the config states."""
        for name in names:
            value = getattr(self.config, name, None)
            value = value[-1] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def filled(self, *shape: int) -> Tensor:
        """Return a tensor of grey pixels."""
        return torch.full(shape, 0.5, **self.place)

    def ones(self, *shape: int) -> Tensor:
        """Return a mask of ones."""
        return torch.ones(*shape, dtype=torch.long, device=self.place["device"])

    def sizes(self) -> list[Size]:
        """The image sizes to try."""
        stated: list[Any] = []
        cfg = getattr(self.root, "pretrained_cfg", None)
        for module in self.root.modules():
            stated.append(getattr(module, "img_size", None) or getattr(module, "image_size", None))
            if stated[-1] is not None:
                break
        stated.append(getattr(self.config, "image_size", None))
        stated.append(cfg["input_size"][-2:] if cfg and cfg.get("input_size") else None)
        found = []
        for size in [*stated, *self.from_positions(), 224, 256, 64, 32, 384]:
            size = (size.get("height"), size.get("width")) if isinstance(size, dict) else size
            try:
                found.append(pair(size))
            except (TypeError, ValueError, IndexError):
                continue
        return list(dict.fromkeys(found))

    def from_positions(self) -> Iterator[int]:
        """The sizes for which position embeddings (1, N, C) are made: a square of patches, and a few tokens more."""
        step = int(self.conv.stride[-1]) if self.conv is not None else self.number("patch_size", default=16)
        for parameter in self.root.parameters():
            if parameter.ndim == 3 and len(parameter) == 1 and parameter.shape[1] > 3:
                for more in (0, 1, 2, 5):
                    side = math.isqrt(parameter.shape[1] - more) if parameter.shape[1] > more else 0
                    if side > 1 and side * side + more == parameter.shape[1]:
                        yield side * step

    def images(self, name: str) -> Iterator[Tensor]:
        """Images (1, C, H, W); videos where the first convolution has three axes or there are frames; a pair."""
        cfg = getattr(self.root, "pretrained_cfg", None) or {}
        stated = self.conv.in_channels if self.conv is not None else 3
        channels = (cfg.get("input_size") or [self.number("num_channels", default=stated)])[0]
        frames = self.number("num_frames", "frames_per_clip", "temporal_patch_size", default=0)
        tubes = isinstance(self.conv, nn.Conv3d)
        for size in self.sizes():
            shapes: list[tuple[int, ...]] = [(1, channels, *size)]
            if tubes or frames or "video" in name:
                counts = (frames or 16, 8, 32) if tubes else (frames or 8,)
                clips = [shape for n in counts for shape in ((1, n, channels, *size), (1, channels, n, *size))]
                shapes = [*clips, *shapes] if tubes or frames else [*shapes, *clips]
            for shape in shapes:
                yield self.filled(*shape)
        for size in sorted(self.sizes()):  # every pixel may become a token of such a model
            yield self.filled(1, 2, channels, *size)

    def cut_images(self) -> Iterator[dict[str, Any]]:
        """One image as patches, with the argument that says where they lie."""
        cut, depth = self.number("patch_size", default=14), self.number("temporal_patch_size", default=1)
        channels = self.number("in_channels", "num_channels", "in_chans", default=3)
        count = self.number("num_patches", default=_SIDE * _SIDE)
        rows = next(r for r in range(math.isqrt(count), 0, -1) if count % r == 0)
        known = self.others(None, False) | self.places(rows, count // rows)
        first = next(one for one in ("hidden_states", *_IMAGES, self.names[0]) if one in self.names)
        layer = next((m for m in self.root.modules() if isinstance(m, nn.Linear)), None)
        widths = dict.fromkeys((channels * depth * cut * cut, layer.in_features if layer is not None else 0))
        shapes: list[tuple[int, ...]] = [shape for w in widths if w for shape in ((count, w), (1, count, w))]
        if not any(name.endswith("grid_thw") for name in self.names):
            shapes.reverse()
        cells = (channels, cut, cut)
        shapes += [(count, *cells), (1, count, *cells), (count, channels, depth, cut, cut)]
        shapes += [(1, channels, cut, count * cut)]
        for shape in shapes:
            yield {**{name: known[name] for name in self.names if name in known}, first: self.filled(*shape)}

    def places(self, rows: int, columns: int) -> dict[str, Tensor]:
        """The positions of patches: real tensors even for a meta module, because modules compute with the values."""
        size = torch.tensor([[rows, columns]], device="cpu")
        grid = torch.tensor([[1, rows, columns]], device="cpu")
        across, down = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
        return {
            **dict.fromkeys(("grid_thw", "image_grid_thw"), grid),
            **dict.fromkeys(("spatial_shapes", "target_sizes", "tgt_sizes"), size),
            "pixel_position_ids": torch.stack([across, down], -1).reshape(1, -1, 2).to(self.place["device"]),
            "merge_sizes": torch.tensor([self.number("spatial_merge_size", default=1)], device="cpu"),
            "pixel_attention_mask": self.ones(1, rows * columns),
        }

    def text(self) -> Tensor:
        """A text of a few tokens."""
        count = self.number("vocab_size", default=100)
        ids = torch.arange(3, 19, device=self.place["device"]) % max(count - 1, 1)
        return ids[None]

    def with_others(self, given: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
        """The input with the other required arguments, then with all other arguments whose names are known."""
        tensor = next(iter(given.values()))
        few, many = (self.others(tensor, everything) | given for everything in (False, True))
        yield few
        if set(many) != set(few) or any(value is None for value in few.values()):
            yield many

    def others(self, tensor: Tensor | None, everything: bool) -> dict[str, Any]:
        """The other arguments of a module, as far as their names are known."""
        made: dict[str, Any] = {}
        for name in self.names:
            needed = name in self.required
            if not needed and not everything and not (name == "input_ids" and self._needs_text()):
                continue
            if name in _TEXT:
                made[name] = self.text()
            elif name == "bbox":
                made[name] = torch.zeros(1, 16, 4, dtype=torch.long, device=self.place["device"])
            elif needed and name in ("attention_mask", "text_mask"):
                made[name] = self.ones(1, 16)
            elif needed and name in ("pixel_mask", "patch_attention_mask") and tensor is not None:
                made[name] = self.ones(1, *tensor.shape[-2:])
            elif needed and ("mask" in name or name == "position_ids"):
                made[name] = tensor if everything else None
            elif needed and tensor is not None and ("pixel" in name or "image" in name or name in ("x2", "right")):
                made[name] = tensor
            elif needed and name == "interpolate_pos_encoding":
                made[name] = False
        return made

    def _needs_text(self) -> bool:
        return any(isinstance(module, nn.Embedding) for module in self.root.modules())
