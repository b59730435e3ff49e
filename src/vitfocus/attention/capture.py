"""Observe the queries and keys of attention while a model runs, without changing it.

The `forward` of one attention module instance is replaced by one that runs the original under a `TorchFunctionMode`.
The mode records the calls of `scaled_dot_product_attention`, or of softmax in models that do not use it, for an
observer, with the softmax normalisers if torch's fused kernel returns them. Nothing global is patched, nothing outside
the module's own forward is observed, and `torch.compile(fullgraph=True)` traces through it. A `Session` runs a model
for this purpose: in eval mode, without gradients, on its own device, and restored afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitfocus.anatomy import Anatomy, Block, unwrap
from vitfocus.anatomy.block import Size, heads_of
from vitfocus.anatomy.inputs import PLACES
from vitfocus.anatomy.registry import has_forward
from vitfocus.attention.batches import TEXT, ImageBatch, PatchesInOrder, normalised, with_text
from vitfocus.core.arguments import require_values
from vitfocus.core.errors import VitfocusError, nearest, reason, warn
from vitfocus.core.modules import eval_mode, running_eagerly
from vitfocus.kernels.attention import Observation, attention_with_normalisers, join_heads, keeps_normalisers, matched
from vitfocus.kernels.backends import chosen, exporting
from vitfocus.kernels.inputs import outside_autocast
from vitfocus.kernels.statistics.op import token_norms

#: Called with a block and the norms (B, rows, columns) of the patch tokens at its output.
NormCallback = Callable[[Block, Tensor], None]


class AttentionObserver(Protocol):
    """Is called with the attention of one module at each forward."""

    @property
    def wants_attention(self) -> bool:
        """Whether to observe the next forward."""

    def __call__(self, seen: Observation) -> Any:
        """Process one observed attention."""


class _AttentionRecorder(TorchFunctionMode):
    """Records every attention that is computed while it is active."""

    def __init__(
        self,
        seen: list[Observation],
        observer: AttentionObserver,
        finished_maps: bool,
        heads: int | None,
        batch: int | None,
    ) -> None:
        super().__init__()
        self.seen = seen
        self.observer = observer
        self.finished_maps = finished_maps
        self.heads = heads
        self.batch = batch
        self.unbound: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.finished_maps:
            if func is F.dropout and args[0].ndim == 4:
                self.seen.append(Observation(map=args[0]))
        elif func is F.scaled_dot_product_attention:
            seen, value = _from_call(self.heads, self.batch, *args, **kwargs)
            if value is not None and chosen(seen.source) != "reference" and not exporting():
                made = _attended(seen, value, self._whole(seen, value), self.observer)
                if made is not None:
                    self.seen.append(made[1])
                    return made[0]
            self.seen.append(seen)
        elif func in (torch.unbind, Tensor.unbind):
            parts = func(*args, **kwargs)
            if args and (args[1] if len(args) > 1 else kwargs.get("dim", 0)) == 0:
                self.unbound = (args[0], parts)
            return parts
        elif func is Tensor.unflatten:  # calls super(), which torch 2.11 does not compile within a mode
            return torch.unflatten(*args, **kwargs)
        elif func in (F.softmax, torch.softmax, Tensor.softmax):
            scores = args[0] if args else kwargs["input"]
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if scores.ndim >= 3 and dim in (-1, scores.ndim - 1):
                self.seen.append(Observation(logits=_by_heads(scores, self.heads, self.batch)))
        return func(*args, **kwargs)

    def _whole(self, seen: Observation, value: Tensor) -> Tensor | None:
        """The tensor (3, B, H, N, D) that was unbound into these queries, keys and values, if there is one.

        Its gradient will not pass through them: there must be no hook on the way.
        """
        if self.unbound is None:
            return None
        whole, parts = self.unbound
        if whole.ndim != 5 or len(parts) != 3 or whole.shape[1:] != value.shape:
            return None
        if parts[0] is not seen.query or parts[1] is not seen.key or parts[2] is not value:
            return None
        hooked = not torch.compiler.is_compiling() and any(one._backward_hooks or one.retains_grad for one in parts)
        return None if hooked else whole


def _attended(
    seen: Observation, value: Tensor, whole: Tensor | None, observer: AttentionObserver
) -> tuple[Tensor, Observation] | None:
    """The output of an unmasked attention, and the observation with all that its kernel tells; None if that is nothing.

    An observer with a method `attend` may compute the attention itself, together with its loss.
    """
    assert seen.query is not None and seen.key is not None
    attend = getattr(observer, "attend", None)
    made = attend(seen, value, whole) if attend is not None else None
    if made is not None:
        return made[0], replace(seen, loss=made[1])
    if chosen(seen.query) != "triton" or not keeps_normalisers(seen.query, seen.key, value, seen.scale):
        return None
    output, lse = attention_with_normalisers(seen.query, seen.key, value, scale=seen.scale)
    return output, replace(seen, lse=lse)


def _by_heads(tensor: Tensor, heads: int | None, batch: int | None) -> Tensor:
    """(B, H, ·, ·), from a tensor whose heads are folded into the batch (B · H, ·, ·), or with windows on an axis.

    `batch` is the length of the module's own input: heads that are computed one after the other are not folded.
    """
    if tensor.ndim == 3:
        folded = heads and tensor.shape[0] != batch and tensor.shape[0] % heads == 0
        return tensor.unflatten(0, (-1, heads)) if folded else tensor[:, None]
    if tensor.ndim == 2:
        return tensor[None, None]
    if tensor.ndim == 5 and tensor.shape[1] == heads != tensor.shape[2]:
        tensor = tensor.transpose(1, 2)
    return tensor if tensor.ndim == 4 else tensor.flatten(0, -4)


def _from_call(
    heads: int | None,
    batch: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Observation, Tensor | None]:
    """An observation from the arguments of `scaled_dot_product_attention`; the values if nothing masks it."""
    plain = attn_mask is None and dropout_p == 0.0 and not is_causal and not enable_gqa and query.ndim == 4
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    if attn_mask is not None and attn_mask.ndim == 3 == query.ndim and len(attn_mask) > 1:
        attn_mask = _by_heads(attn_mask, heads, batch)
    elif attn_mask is not None and attn_mask.ndim > 4:
        attn_mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).flatten(0, -4)
    elif attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    query, key = _by_heads(query, heads, batch), _by_heads(key, heads, batch)
    if enable_gqa and key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    query, key = matched(query, key)
    return Observation(query=query, key=key, scale=scale, bias=attn_mask), value if plain else None


def _from_multihead(module: nn.MultiheadAttention, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Observation:
    """Queries and keys of an `nn.MultiheadAttention`, projected as it projects them.

    Its fast path in eval mode never leaves C++, so they are computed here a second time.
    """
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    tokens = [given["query"], given.get("key", given["query"])]
    tokens = [one[None] if one.ndim == 2 else one if module.batch_first else one.transpose(0, 1) for one in tokens]
    width = module.embed_dim
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight[: 2 * width].chunk(2)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight)
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias[: 2 * width].chunk(2)
    query, key = (
        F.linear(one, weight, part).unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
        for one, weight, part in zip(tokens, weights, biases, strict=True)
    )
    masks = [given.get("attn_mask"), given.get("key_padding_mask")]
    added = [_additive(mask, query.dtype) for mask in masks if mask is not None]
    if masks[0] is not None and added[0].ndim == 3:
        added[0] = added[0].unflatten(0, (-1, module.num_heads))
    if masks[1] is not None:
        added[-1] = added[-1].view(len(key), 1, 1, -1)
    bias: Tensor | None = None
    for one in added:
        bias = one[(None,) * (4 - one.ndim)] if bias is None else bias + one
    return Observation(query=query, key=key, scale=module.head_dim**-0.5, bias=bias)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to the scores; a boolean one of `nn.MultiheadAttention` is True where nothing may attend."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


class ObservedForward:
    """Replaces the `forward` of an attention module: runs the original and passes the attention to an observer.

    It is an object and not a closure, so that the module can still be copied and pickled. A treatment installs its
    bound `__call__`: the compiler then guards on what it reads, not on its identity, and compiles equal blocks once.
    """

    def __init__(self, module: nn.Module, reader: str, observer: AttentionObserver) -> None:
        self.module = module
        self.reader = reader
        self.observer = observer
        self.inner = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.observer.wants_attention:
            return self._original(*args, **kwargs)
        if isinstance((*args, *kwargs.values())[0], torch.fx.Proxy):
            warn("torch.fx does not trace the loss that a model computes from its attention in training (adl).")
            return self._original(*args, **kwargs)
        if self.reader == "multihead":
            assert isinstance(self.module, nn.MultiheadAttention)
            self.observer(_from_multihead(self.module, args, kwargs))
            return self._original(*args, **kwargs)
        seen: list[Observation] = []
        given = args[0] if args else next(iter(kwargs.values()), None)
        batch = given.shape[0] if isinstance(given, Tensor) and given.ndim > 2 else None
        with _AttentionRecorder(seen, self.observer, self.reader == "dropout", heads_of(self.module), batch):
            output = self._original(*args, **kwargs)
        if not seen:
            raise VitfocusError(_unseen(self.module))
        if len(seen) > 1:
            largest = max(seen, key=lambda one: one.shape[2] * one.shape[3]).shape
            seen = [one for one in seen if one.shape == largest]
        self.observer(seen[0] if len(seen) == 1 else join_heads(seen))
        return output

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def _unseen(module: nn.Module) -> str:
    """The error message for a module whose attention was not observed."""
    kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
    text = f"No attention was seen in {type(module).__name__}"
    if kind in (None, *_SEEN):
        return f"{text}: it calls neither softmax nor scaled_dot_product_attention."
    return f"{text}, which runs {kind}: load the model with attn_implementation='sdpa'."


#: The attention of transformers that can be observed; the others compute it inside one kernel.
_SEEN = ("sdpa", "eager")


#: How many contexts of `observing` are active.
_readers = 0


def only_reading() -> bool:
    """Whether the current forward pass only reads attention, as in a diagnosis, and must not change training state."""
    return _readers > 0


@contextmanager
def observing(blocks: Sequence[Block], callback: Callable[[Block, Observation], None]) -> Iterator[None]:
    """Context in which every attention of these blocks is passed to `callback(block, observation)`.

    Inside it, compiled models run eagerly, and transformers models whose attention is one opaque kernel use "sdpa", so
    that they can be observed too; in training mode, no diversification loss is computed. On exit, also after an
    exception, every module is restored.
    """
    watched: list[tuple[nn.Module, ObservedForward]] = []
    hidden: list[tuple[Any, str]] = []
    skipped, fast = False, torch.backends.mha.get_fastpath_enabled()
    global _readers
    _readers += 1
    try:
        for block in blocks:
            skipped = skipped or isinstance(block.host, nn.TransformerEncoderLayer)
            if block.attention is None or block.reader is None:
                continue
            replacement = ObservedForward(block.attention, block.reader, _BlockObserver(block, callback))
            block.attention.__dict__["forward"] = replacement
            watched.append((block.attention, replacement))
            config: Any = getattr(block.attention, "config", None)  # of transformers
            kernel = getattr(config, "_attn_implementation", None) or "sdpa"
            if kernel not in _SEEN:
                hidden.append((config, kernel))
                config._attn_implementation = "sdpa"
        # A TransformerEncoderLayer's fast path does not call its attention.
        torch.backends.mha.set_fastpath_enabled(fast and not skipped)
        with running_eagerly():
            yield
    finally:
        _readers -= 1
        torch.backends.mha.set_fastpath_enabled(fast)
        for config, kernel in hidden:
            config._attn_implementation = kernel
        for module, replacement in reversed(watched):
            if replacement.inner is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = replacement.inner


@dataclass(frozen=True)
class _BlockObserver:
    """Adds the block to an observation, and disables autocast for the callback."""

    block: Block
    callback: Callable[[Block, Observation], None]
    wants_attention: ClassVar[bool] = True

    def __call__(self, seen: Observation) -> None:
        with outside_autocast(seen.device):
            self.callback(self.block, seen)


#: Called with the block, its observed attention, and the size of the images as the stem received them.
AttentionCallback = Callable[[Block, Observation, Size], None]


@dataclass
class Session:
    """A model whose attention is being read; `size` is the size of the images that the stem received last."""

    model: nn.Module
    body: Anatomy
    callback: AttentionCallback
    size: Size

    def run(self, batch: ImageBatch) -> Any:
        """Normalise a batch, move it to the model's device and return the model's output."""
        model, body = self.model, self.body
        if body.text is not None:
            batch = with_text(batch, model, body)
        weight = next((p for p in body.root.parameters() if p.is_floating_point()), torch.empty(0))
        pixels = batch.pixels if batch.name != "pixel_values" else normalised(batch.pixels, body)
        pixels = pixels.to(weight.device, weight.dtype if pixels.is_floating_point() else None)
        extras = {key: value.to(weight.device) for key, value in batch.extras.items()}
        only_images = body.found_by == "structure" and not any(key in TEXT for key in (batch.name, *extras))
        if only_images or not has_forward(unwrap(model)):
            model = model if body.root is unwrap(model) else body.root  # the whole model needs more than images
        takes = inspect.signature(unwrap(model).forward).parameters
        extras = {key if key in takes else key.removeprefix("image_"): value for key, value in extras.items()}
        try:
            if batch.name in takes:
                return model(**{batch.name: pixels}, **extras)
            return model(pixels, **extras)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            _explain(error, pixels, model, body)
            raise

    def note_size(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the stem: store the size of its images."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 4:
                self.size = (int(value.shape[-2]), int(value.shape[-1]))
                return

    def observe(self, block: Block, seen: Observation) -> None:
        """Pass an observed attention and the image size to the callback."""
        self.callback(block, seen, self.size)

    def observe_norms(self, block: Block, callback: NormCallback, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of a block: pass the norms of its patch tokens to the callback, if all of them are there."""
        tokens = output[0] if isinstance(output, tuple | list) else output
        grid = (block.query_rule or block.grid_rule)(self.size)
        if not isinstance(tokens, Tensor) or not all(grid):
            return
        if tokens.ndim == 3 and tokens.shape[1] >= grid[0] * grid[1]:
            patches = tokens[:, tokens.shape[1] - grid[0] * grid[1] :]  # after prefix tokens and text
            callback(block, token_norms(patches).unflatten(1, grid))
        elif tokens.ndim == 4 and grid in (tokens.shape[1:3], tokens.shape[2:]):
            axis = -1 if tokens.shape[1:3] == grid and tokens.shape[1] != block.width else 1
            precision = torch.promote_types(tokens.dtype, torch.float32)
            callback(block, torch.linalg.vector_norm(tokens, dim=axis, dtype=precision))


@contextmanager
def reading(
    model: nn.Module,
    body: Anatomy,
    blocks: Sequence[Block],
    callback: AttentionCallback,
    *,
    norms: NormCallback | None = None,
    outputs: Sequence[Block] | None = None,
) -> Iterator[Session]:
    """Context with a session in which each attention of `blocks` is passed to `callback`.

    `norms` receives the norms of the patch tokens at the output of each block of `outputs` (default: all).
    """
    for name, value in model.named_parameters():
        require_values(name, value)
    session = Session(model, body, callback, body.build_size)
    handles = [body.stem.register_forward_pre_hook(session.note_size, with_kwargs=True)]
    for block in body if outputs is None else outputs:
        if norms is not None and block.attention_kind != "class":
            handles.append(block.host.register_forward_hook(partial(session.observe_norms, block, norms)))
    try:
        order = nullcontext() if body.text is None else PatchesInOrder()
        with eval_mode(model), torch.no_grad(), order, observing(blocks, session.observe):
            yield session
    finally:
        for handle in handles:
            handle.remove()


def _explain(error: Exception, pixels: Tensor, model: nn.Module, body: Anatomy) -> None:
    """Raise a clear error if the images have a size or a number of channels that the model does not take."""
    name, size = type(unwrap(model)).__name__, (int(pixels.shape[-2]), int(pixels.shape[-1]))
    if f"{pixels.shape[1]} channels instead" in str(error):  # torch's message about the stem
        raise VitfocusError(f"{name} does not take images of {pixels.shape[1]} channels: {error}.") from error
    if not isinstance(error, VitfocusError) and pixels.ndim > 4:  # which only models for videos take
        raise VitfocusError(f"{name} does not take a batch of shape {tuple(pixels.shape)}: {reason(error)}.") from error
    if isinstance(error, VitfocusError) or size == body.build_size or "out of memory" in str(error):
        return
    if not all(body.build_size):
        taken = " and ".join(key for key in inspect.signature(unwrap(model).forward).parameters if key in PLACES)
        raise VitfocusError(f"{name} takes what its processor makes: pass a dict with {taken or 'it'} ({error}).")
    if isinstance(error, TypeError):
        return
    built, given = ("x".join(map(str, one)) for one in (body.build_size, size))
    raise VitfocusError(
        f"{name} was built for {built} images and does not take {given} ({error}); resize the images, or build the "
        f"model for that size (timm: img_size=, or dynamic_img_size=True)."
    ) from error


def pick_blocks(body: Anatomy, layers: int | str | Sequence[int | str] | None) -> list[Block]:
    """Select blocks by index (negative from the end) or by name; None selects all."""
    if layers is None:
        return list(body)
    given: Any = layers.tolist() if hasattr(layers, "tolist") else layers  # of NumPy and torch
    listed: Any = [given] if isinstance(given, str | SupportsIndex) else given
    if not isinstance(listed, Iterable) or not (asked := list(listed)):
        raise VitfocusError(f"layers takes a number, a name or a list of them, not {layers!r}.")
    return [_pick(body, layer) for layer in asked]


def _pick(body: Anatomy, layer: int | str) -> Block:
    if isinstance(layer, str):
        for block in body:
            if block.name == layer:
                return block
        raise VitfocusError(f"There is no layer {layer!r}: {nearest(layer, [block.name for block in body])}")
    if not isinstance(layer, SupportsIndex):
        raise VitfocusError(f"A layer is a number or a name, not {layer!r}.")
    if not -len(body) <= layer < len(body):
        raise VitfocusError(f"There is no layer {layer}: the model has {len(body)}, 0 to {len(body) - 1}.")
    return body[int(layer)]


#: What layers of each kind of attention without a map of tokens have instead.
WITHOUT_TOKEN_MAP = {
    "none": "no attention (an MLP or pooling mixes the tokens)",
    "channel": "attention between channels, not tokens",
    "outlook": "outlook attention, which weighs a local window without queries and keys",
    "linear": "linear attention, without a softmax over tokens",
}


def can_be_read(block: Block) -> bool:
    """Whether the block has a map from tokens (or the class token) to tokens that can be observed."""
    return (block.mixes_tokens_by_attention or block.attention_kind in ("class", "cross")) and block.reader is not None


def model_name(model: nn.Module) -> str:
    """A model's registered name if it has one, else the name of its class."""
    inner = unwrap(model)
    config: Any = getattr(inner, "pretrained_cfg", None) or {}
    named = config.get("architecture") if isinstance(config, dict) else None
    return str(named or getattr(getattr(inner, "config", None), "name_or_path", None) or type(inner).__name__)


#: One model, or models by the name that figures and pages show.
Models = nn.Module | Mapping[str, nn.Module]


def named_models(models: Models) -> dict[str, nn.Module]:
    """Models by name; a single one by its own."""
    return {model_name(models): models} if isinstance(models, nn.Module) else dict(models)
