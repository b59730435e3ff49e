"""The records that describe every family of vision transformers, and how they are built from a plan of names.

Treatments and readings do not depend on the family: they ask a `Block` for its ports, its grid and its kind of
attention. Families differ by the records that `timm.py`, `transformers.py` and `torchvision.py` fill.

A `Plan` names places as "path<" (the input of the module at that path), "path>" (its output) or "path()" (the input of
that method), with the layout of the tokens if it is not that of the block: "drop_path1< BHWC".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from torch import Tensor, nn

Layout = Literal["BNC", "BHWC", "BCHW"]
Size = tuple[int, int]
Step = tuple[int | Size, ...]

#: What mixes the tokens of a block. The first five attend from tokens to tokens, so attention can be read and
#: diversified there; "class" attends from the class token alone, and "cross" from other tokens than are attended to;
#: the rest mix without a token-to-token map.
TOKEN_ATTENTION = frozenset({"global", "window", "grid", "reduced", "pooled"})
AttentionKind = Literal[
    "global", "window", "grid", "reduced", "pooled", "class", "cross", "channel", "outlook", "linear", "none"
]

#: Where attention can be captured: at the call of `scaled_dot_product_attention` or softmax inside the module's
#: forward ("call"), from the input of an `nn.MultiheadAttention` ("multihead"), at the dropout that receives the
#: finished map ("dropout"), or nowhere (None).
Reader = Literal["call", "multihead", "dropout"]

#: The key in a block's `__dict__` under which a treatment notes how many tokens it adds inside the block.
ADDED_TOKENS = "_vitfocus_added_tokens"


@dataclass(frozen=True)
class GridRule:
    """The token grid as a function of the image size: convolution arithmetic, one step per convolution.

    Each step is (kernel, stride, padding), which rounds down; or (stride,), which rounds up, for a layer that pads the
    remainder; or (rows, columns), an adaptive pooling to that size. A number may also be a pair, for height and width.

    >>> GridRule(((16, 16, 0),))((224, 320))
    (14, 20)
    >>> GridRule(((7, 4, 3), (2,)))((225, 224))
    (29, 28)
    """

    steps: tuple[Step, ...]

    def __call__(self, size: Size) -> Size:
        sides = []
        for axis, side in enumerate(size):
            for step in self.steps:
                numbers = [number if isinstance(number, int) else number[axis] for number in step]
                if len(numbers) == 1:
                    side = -(-side // numbers[0])
                elif len(numbers) == 2:
                    side = numbers[axis]
                else:
                    kernel, stride, padding = numbers
                    side = (side + 2 * padding - kernel) // stride + 1
            sides.append(side)
        return sides[0], sides[1]

    def then(self, *steps: Step) -> GridRule:
        """Append steps.

        Args:
            *steps: The steps of the next stage.

        Returns:
            A new rule.

        Example:
            >>> GridRule(((4, 4, 0),)).then((2, 2, 0))((224, 224))
            (28, 28)
        """
        return GridRule(self.steps + steps)


@dataclass(frozen=True, eq=False)
class Port:
    """A place where tokens can be changed: the input or the output of a module, or the input of one of its methods.

    `side` is "input", "output" or the name of a method, for its first argument; `width` is the number of channels.
    """

    module: nn.Module
    side: str
    layout: Layout
    width: int


@dataclass(frozen=True, eq=False)
class Block:
    """One block of a vision transformer: its place in the model, its tokens and its parts.

    Attributes:
        prefix_tokens: Tokens before the patches inside the block: class tokens, the `registers` of the model, and the
            `added_tokens` of treatments, which the input and output of the block do not have.
        host: The module to which treatments add theirs, under a name that ends in `suffix`.
        ports: The places "pool" (Token-aware Average Pooling: before the norm before attention, so that the shortcut
            keeps the original tokens), "mlp.front", "mlp.mid", "mlp.end", "attention.front", "attention.mid" and
            "attention.end", as far as the family has them; found by structure, also "block.end".
        window: The grid of one window of windowed attention.
        feeds_pyramid: Whether the output of the block is also a feature map of a detector or segmenter.
        query_key: The outputs of queries and keys, whose last axis has the channels of one head or of all heads.
    """

    name: str
    depth: int
    stage: int
    width: int
    layout: Layout
    prefix_tokens: int
    host: nn.Module
    mlp: nn.Module | None
    attention: nn.Module | None
    norm: nn.Module | None
    attention_kind: AttentionKind
    reader: Reader | None
    ports: Mapping[str, Port]
    grid_rule: GridRule
    build_size: Size
    class_token: bool = False
    query_rule: GridRule | None = None
    key_rule: GridRule | None = None
    window: Size | None = None
    suffix: str = ""
    feeds_pyramid: bool = False
    query_key: tuple[Port, Port] | None = None
    registers: int = 0
    added_tokens: int = 0

    @property
    def heads(self) -> int | None:
        """The number of heads according to an attribute of the attention module; None if it has none."""
        return heads_of(self.attention)

    @overload
    def grid(self) -> Size: ...
    @overload
    def grid(self, size: int | Sequence[int]) -> Size: ...
    @overload
    def grid(self, size: int, width: int) -> Size: ...
    def grid(self, size: int | Sequence[int] | None = None, width: int | None = None) -> Size:
        """Compute the token grid for an image size.

        Args:
            size: Height and width of the image, or its height or side. Default: the size the model was built for.
            width: Its width, if `size` is the height.

        Returns:
            Rows and columns of the grid.

        Example:
            >>> import timm, vitfocus as vf
            >>> block = vf.anatomy(timm.create_model("vit_tiny_patch16_224", depth=1))[0]
            >>> block.grid(), block.grid((448, 320)), block.grid(64)
            ((14, 14), (28, 20), (4, 4))
        """
        return self.grid_rule(_as_size(size, width, self.build_size))

    def attention_grids(self, size: int | Sequence[int] | None = None) -> tuple[Size, Size]:
        """Compute the grids of queries and keys in one attention map.

        Args:
            size: Height and width of the image, or its side. Default: the size the model was built for.

        Returns:
            The grid of the queries and that of the keys: the grid of the block, or of a window in windowed attention.
            The grid of the keys is coarser if attention reduces them (PVT, SegFormer), and that of the queries if it
            pools them (MViT).
        """
        if self.window is not None:
            return self.window, self.window
        size = _as_size(size, None, self.build_size)
        return (self.query_rule or self.grid_rule)(size), (self.key_rule or self.grid_rule)(size)

    @property
    def mixes_tokens_by_attention(self) -> bool:
        """Whether every token attends to other tokens here, so that a token-to-token map exists."""
        return self.attention_kind in TOKEN_ATTENTION

    def __repr__(self) -> str:
        rows, columns = self.grid()
        parts = f"{self.name}, depth={self.depth}, stage={self.stage}, width={self.width}, grid={rows}x{columns}"
        return f"Block({parts}, prefix_tokens={self.prefix_tokens}, {self.layout}, {self.attention_kind})"


@dataclass(frozen=True, eq=False)
class Anatomy(Sequence[Block]):
    """The blocks of a model in order of depth, and the images that it expects.

    Attributes:
        root: The transformer, to which the names of the blocks are relative.
        stem: The first module that receives the image.
        mean, std: The normalisation of images that the model expects.
        encoder: The module that receives the padding mask, if the model takes one.
        text: The module that embeds the text of a vision-language model.
        takes_tokens: Whether nothing in the blocks depends on the number or order of tokens, so that more can be added.
        found_by: "record" for a registered family, "structure" if the blocks were found from a traced forward pass.
        confidence: The share of the checks of such a trace that passed.
    """

    family: str
    root: nn.Module
    stem: nn.Module
    blocks: tuple[Block, ...]
    build_size: Size
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    encoder: nn.Module | None = None
    text: nn.Module | None = None
    takes_tokens: bool = False
    notes: tuple[str, ...] = field(default=())
    found_by: Literal["record", "structure"] = "record"
    confidence: float = 1.0

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | Sequence[Block]:
        return self.blocks[index]

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    @property
    def trunk(self) -> tuple[Block, ...]:
        """The blocks that process all tokens: every block except those of class attention and cross-attention."""
        return tuple(block for block in self.blocks if block.attention_kind not in ("class", "cross"))

    @property
    def attention_kinds(self) -> str:
        """The kinds of attention of the trunk, for messages: "channel, window"."""
        return ", ".join(sorted({block.attention_kind for block in self.trunk}))

    def __repr__(self) -> str:
        lines = [f"Anatomy of {type(self.root).__name__} ({self.family}), {len(self.blocks)} blocks:"]
        return "\n  ".join(lines + [repr(block) for block in self.blocks])


def heads_of(attention: nn.Module | None) -> int | None:
    """The number of heads according to an attribute of an attention module; None if it has none."""
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead"):
        if isinstance(heads := getattr(attention, name, None), int):
            return heads
    return None


def _as_size(size: int | Sequence[int] | None, width: int | None, default: Size) -> Size:
    if size is None:
        return default
    if isinstance(size, int):
        return (size, size if width is None else width)
    height, width_ = size
    return (int(height), int(width_))


Places = tuple[str | None, str | None, str | None]


@dataclass(frozen=True)
class Plan:
    """The names of the parts of a block; each of the tuples is (front, mid, end)."""

    norm: str | None = "norm1"
    attention: str | None = "attn"
    mlp: str | None = "mlp"
    pool: str | None = "norm1<"
    attention_places: Places = ("norm1>", "attn.proj<", "attn>")
    mlp_places: Places = ("mlp<", "mlp.fc2<", "mlp>")
    layout: Layout = "BNC"
    kind: AttentionKind = "global"
    reader: Reader | None = "call"


@dataclass
class Trunk:
    """Collects the blocks of a model in order of depth."""

    build_size: Size
    blocks: list[Block] = field(default_factory=list)

    def add(
        self,
        host: nn.Module,
        plan: Plan,
        name: str,
        rule: GridRule,
        stage: int = 0,
        *,
        prefix_tokens: int = 0,
        **more: Any,
    ) -> None:
        """Append a block.

        Args:
            host: The module of the block.
            plan: The names of its parts.
            name: The path of the module in the model.
            rule: The grid rule of its tokens.
            stage: The stage it belongs to.
            prefix_tokens: The number of tokens before the patches.
            **more: Further fields of `Block`, such as `window`.
        """
        added = int(host.__dict__.get(ADDED_TOKENS, 0))
        mlp, attention, norm = (find(host, path) for path in (plan.mlp, plan.attention, plan.norm))
        width = _width(mlp, "input") or _width(attention, "input") or _width(norm, "input") or 0
        places = {"pool": plan.pool if plan.kind in TOKEN_ATTENTION else None}
        for branch, paths in (("attention", plan.attention_places), ("mlp", plan.mlp_places)):
            places |= {f"{branch}.{end}": path for end, path in zip(("front", "mid", "end"), paths, strict=True)}
        ports = {key: port for key, path in places.items() if path and (port := _port(host, path, plan.layout, width))}
        block = Block(
            name=name,
            depth=len(self.blocks),
            stage=stage,
            width=width,
            layout=plan.layout,
            prefix_tokens=prefix_tokens + added,
            host=host,
            mlp=mlp,
            attention=attention,
            norm=norm,
            attention_kind=plan.kind,
            reader=plan.reader if attention is not None else None,
            ports=ports,
            grid_rule=rule,
            build_size=self.build_size,
            query_key=query_key(attention),
            added_tokens=added,
            **more,
        )
        self.blocks.append(block)

    def anatomy(self, model: nn.Module, stem: nn.Module, **more: Any) -> Anatomy:
        """Build the anatomy from the blocks that were added.

        Args:
            model: The transformer.
            stem: The first module that receives the image.
            **more: Further fields of `Anatomy`. The default `mean` and `std` are those of a timm model's
                `pretrained_cfg`, if it has one.

        Returns:
            The anatomy; the registry fills in the family.
        """
        cfg = getattr(model, "pretrained_cfg", None) or {}
        stated = {key: tuple(cfg[key]) for key in ("mean", "std") if cfg.get(key)}
        return Anatomy("", model, stem, tuple(self.blocks), self.build_size, **stated | more)


def query_key(attention: nn.Module | None) -> tuple[Port, Port] | None:
    """The modules that return queries and keys: their norms in timm, or separate projections."""
    for names in (("q_norm", "k_norm"), ("q_proj", "k_proj"), ("query", "key")):
        query, key = getattr(attention, names[0], None), getattr(attention, names[1], None)
        if isinstance(query, nn.Module) and isinstance(key, nn.Module):
            width = _width(query, "output") or int(getattr(attention, "head_dim", 0))
            return Port(query, "output", "BNC", width), Port(key, "output", "BNC", width)
    return None


def find(host: nn.Module, path: str | None) -> nn.Module | None:
    """The module at a dotted path ("." is the host itself), or None if there is none."""
    if path == ".":
        return host
    found: Any = host
    for part in path.split(".") if path else ():
        if isinstance(found, nn.Sequential | nn.ModuleList) and part.lstrip("-").isdigit():
            found = found[int(part)]
        else:
            found = getattr(found, part, None)
        if found is None:
            return None
    return found if path and isinstance(found, nn.Module) else None


def _port(host: nn.Module, place: str, layout: Layout, width: int) -> Port | None:
    place, _, other_layout = place.partition(" ")
    layout = other_layout or layout  # type: ignore[assignment]
    if place.endswith("()"):
        path, _, method = place[:-2].rpartition(".")
        module = find(host, path) if path else host
        return Port(module, method, layout, width) if module is not None and hasattr(module, method) else None
    side = {"<": "input", ">": "output"}[place[-1]]
    module = find(host, place[:-1])
    return Port(module, side, layout, _width(module, side) or width) if module is not None else None


def _width(module: nn.Module | None, side: str) -> int | None:
    """The channels of the input or output of a module, from its first or last linear layer or convolution."""
    if module is None:
        return None
    last = next((child for name in ("proj", "fc2", "out_proj") if (child := find(module, name)) is not None), module)
    layers = [m for m in (last if side == "output" else module).modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    if layers:
        layer = layers[0] if side == "input" else layers[-1]
        if isinstance(layer, nn.Linear):
            return layer.in_features if side == "input" else layer.out_features
        return layer.in_channels if side == "input" else layer.out_channels
    for inner in module.modules():
        weight = getattr(inner, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 1:
            return int(weight.shape[0])
    return None


def pair(value: Any) -> Size:
    """An int or a pair as a pair of ints.

    >>> pair(7), pair([7, 5])
    ((7, 7), (7, 5))
    """
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def conv_step(conv: nn.Conv2d) -> Step:
    """The grid step of a convolution: (kernel, stride, padding)."""
    kernel, stride = pair(conv.kernel_size), pair(conv.stride)
    if isinstance(conv.padding, str):
        return kernel, stride, (0, 0) if conv.padding == "valid" else (kernel[0] // 2, kernel[1] // 2)
    return kernel, stride, pair(conv.padding)
