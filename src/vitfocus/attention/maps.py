"""`attention_maps`: explicit maps of the layers, heads and queries asked for.

`rollout` follows attention through all layers; `normalise_together` makes the maps of two models comparable.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfocus.anatomy import Block, anatomy
from vitfocus.anatomy.block import Size
from vitfocus.attention.batches import Batches, Images
from vitfocus.attention.capture import WITHOUT_TOKEN_MAP, can_be_read, pick_blocks, reading
from vitfocus.core.arguments import checked
from vitfocus.core.errors import VitfocusError
from vitfocus.kernels.attention import Observation

Indices = int | Sequence[int] | slice | None

#: Bytes above which `attention_maps` warns, and above which it refuses unless `limit` is raised.
WARN_BYTES, LIMIT_BYTES = 1 << 29, 1 << 32
_ADVICE = "ask for fewer layers, heads or queries, or raise `limit` (bytes)."


class AttentionMaps(list[Tensor]):
    """A list of one tensor (B, heads, queries, K) per layer, in the order asked for; B counts windows if there are any.

    Attributes:
        blocks: the layers' records, which say where each token lies.
        size: the height and width of the images.
    """

    def __init__(self, maps: Sequence[Tensor], blocks: Sequence[Block], size: Size) -> None:
        super().__init__(maps)
        self.blocks, self.size = list(blocks), size


@checked
def attention_maps(
    model: nn.Module,
    images: Images,
    layers: int | str | Sequence[int | str] | None = (-1,),
    heads: int | Sequence[int] | None = None,
    queries: int | Sequence[int] | slice | None = None,
    *,
    batch_size: int | None = None,
    limit: int = LIMIT_BYTES,
    normalised: bool | None = None,
) -> AttentionMaps:
    """The attention maps of some layers, as float32 tensors on the CPU.

    Args:
        model: a timm, transformers, torchvision or vitfocus model.
        images: the images, in any form that `diagnose` takes.
        layers: layers by index or name; the last by default, None for all.
        heads: heads by index; all by default.
        queries: query rows by index; all by default.
        batch_size: how many images of a tensor or data set to run at once.
        limit: the most bytes that the maps may take. Above half a gigabyte a warning says how much they take.
        normalised: whether float tensors are normalised already; see `diagnose`.

    Returns:
        One tensor (B, heads, queries, K) per layer.

    Raises:
        VitfocusError: if a layer has no token-to-token map, an index does not exist, or the maps exceed `limit`.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
        >>> maps = attention_maps(model, torch.zeros(2, 3, 64, 64), layers=[0, -1], heads=[2], queries=[0])
        >>> [tuple(layer.shape) for layer in maps]
        [(2, 1, 1, 17), (2, 1, 1, 17)]
    """
    wanted = pick_blocks(body := anatomy(model), layers)
    blocks = [block for block in wanted if can_be_read(block)]
    if not blocks or (layers is not None and len(blocks) < len(wanted)):
        missing = next(block for block in wanted if not can_be_read(block))
        kind = WITHOUT_TOKEN_MAP.get(missing.attention_kind, "attention that cannot be observed")
        raise VitfocusError(f"{missing.name} has no token-to-token map, but {kind}.")
    collector = _Collector(blocks, heads, queries, limit)
    with reading(model, body, list(dict.fromkeys(blocks)), collector) as session:
        for batch in Batches(images, body, batch_size, normalised):
            session.run(batch)
    unseen = [name for name, maps in collector.maps.items() if not maps]
    if unseen:
        raise VitfocusError(f"The attention of {', '.join(unseen)} could not be observed; were there any images?")
    return AttentionMaps([torch.cat(collector.maps[block.name]) for block in blocks], blocks, session.size)


class _Collector:
    """Receives each observed attention and stores the chosen part of its map, up to `limit` bytes."""

    def __init__(self, blocks: Sequence[Block], heads: Indices, queries: Indices, limit: int) -> None:
        self.blocks, self.heads, self.queries, self.limit = blocks, heads, queries, limit
        self.maps: dict[str, list[Tensor]] = {block.name: [] for block in blocks}
        self.stored = 0

    def __call__(self, block: Block, seen: Observation, size: Size) -> None:
        images, heads, queries, keys = seen.shape
        chosen, rows = _indices(self.heads, heads, "head"), _indices(self.queries, queries, "query")
        added = 4 * images * len(chosen) * len(rows) * keys
        if not self.stored:
            _announce(added, block, [b for b in self.blocks if b.depth > block.depth], size, self.limit, self.queries)
        self.stored += added
        if self.stored > self.limit:
            taken = f"The maps so far take {_bytes(self.stored)}, more than limit={_bytes(self.limit)}"
            raise VitfocusError(f"{taken}: {_ADVICE}")
        part = seen.detach().select(heads=chosen if self.heads is not None else slice(None))
        self.maps[block.name].append(part.attention(None if self.queries is None else rows).float().cpu())


def _announce(first: int, block: Block, left: Sequence[Block], size: Size, limit: int, queries: object) -> None:
    """Say how much memory all the maps will take, from the first one's size and the grids of the others."""
    entries = _entries(block, size, queries)
    others = [_entries(other, size, queries) for other in left]
    total = first + sum(round(first * (other / entries if entries and other else 1)) for other in others)
    if total > limit:
        raise VitfocusError(f"These maps take {_bytes(total)}, more than limit={_bytes(limit)}: {_ADVICE}")
    if total > WARN_BYTES:
        warnings.warn(f"These attention maps take {_bytes(total)}.", stacklevel=2)


def _entries(block: Block, size: Size, queries: object) -> float:
    """Entries of one head's map, windows together; 0 if they are not known before."""
    rows, keys = (math.prod(grid) and math.prod(grid) + block.prefix_tokens for grid in block.attention_grids(size))
    sides = zip(block.grid(size), block.window or (), strict=block.window is not None)
    windows = math.prod(-(-side // window) for side, window in sides)
    return windows * keys * (1 if queries is not None or block.attention_kind == "class" else rows)


def _bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GB" if number >= 1 << 30 else f"{number / 2**20:.1f} MB"


def _indices(chosen: Indices, length: int, what: str) -> Tensor:
    every = torch.arange(length, device="cpu")
    if chosen is None or isinstance(chosen, slice):
        return every[chosen or slice(None)]
    try:
        picked = [chosen] if isinstance(chosen, int) else [operator.index(index) for index in chosen]
    except TypeError:
        plural = "heads" if what == "head" else "queries"
        raise VitfocusError(f"{plural} takes a number or a list of numbers, not {chosen!r}.") from None
    for index in picked:
        if not -length <= index < length:
            raise VitfocusError(f"There is no {what} {index}: there are {length}, 0 to {length - 1}.")
    return every[picked]


def rollout(maps: Sequence[Tensor], residual: float = 0.5) -> Tensor:
    """Attention rollout through the layers (Abnar and Zuidema, 2020): maps (B, H, N, N), in order, to (B, N, N).

    The heads are averaged, the identity is mixed in with the weight `residual` for the skip connection, and the maps
    are multiplied. Row 0 of the result shows where the class token gets its information from.

    >>> bool(torch.allclose(rollout([torch.full((1, 2, 4, 4), 0.25)] * 3).sum(-1), torch.ones(1, 4)))
    True
    """
    shapes = {tuple(layer.shape[-2:]) for layer in maps}
    if len(shapes) != 1 or any(queries != keys for queries, keys in shapes):
        listed = ", ".join(f"{queries}x{keys}" for queries, keys in sorted(shapes))
        raise VitfocusError(
            f"Rollout needs square maps over the same tokens in every layer, but these are {listed or 'none'}."
        )
    identity = torch.eye(maps[0].shape[-1], device=maps[0].device, dtype=maps[0].dtype)
    joined = identity.expand(len(maps[0]), -1, -1)
    for layer in maps:
        joined = ((1 - residual) * layer.mean(dim=1) + residual * identity) @ joined
    return joined


def on_grid(attention: Tensor, grid: Size, prefix_tokens: int = 0) -> Tensor:
    """Reshape attention over keys (..., K) to the token grid (..., rows, columns), without the prefix tokens.

    >>> on_grid(torch.arange(5.0), (2, 2), prefix_tokens=1)
    tensor([[1., 2.],
            [3., 4.]])
    """
    return attention[..., prefix_tokens:].unflatten(-1, grid)


def normalise_together(pictures: Sequence[Tensor], threshold: float = 2.0, prefix_tokens: int = 0) -> list[Tensor]:
    """Make the attention of several models over the same grid comparable: one threshold, one min–max scale.

    Values below `threshold` / K, for K keys, are set to 0 (2/K is the threshold of ADL). Then the minimum over all
    pictures becomes 0 and the maximum 1, so that a colour has the same meaning in each.

    >>> normalise_together([torch.tensor([[0.5, 0.1], [0.2, 0.2]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])])
    [tensor([[0.5000, 0.0000],
            [0.0000, 0.0000]]), tensor([[1., 0.],
            [0., 0.]])]
    """
    keys = [picture.shape[-2] * picture.shape[-1] + prefix_tokens for picture in pictures]
    kept = [p.where(p >= threshold / count, torch.zeros_like(p)) for p, count in zip(pictures, keys, strict=True)]
    low = min(float(picture.min()) for picture in kept)
    high = max(float(picture.max()) for picture in kept)
    return [(picture - low) / max(high - low, torch.finfo(picture.dtype).tiny) for picture in kept]


def enlarged(picture: Tensor, size: Size) -> Tensor:
    """A picture of tokens (rows, columns) at the image's size, bilinear."""
    return F.interpolate(picture[None, None].float(), size=size, mode="bilinear", align_corners=False)[0, 0]
