"""The probe: sees an attention's queries and keys at the moment they meet, and changes nothing.

It replaces the `forward` of the attention module, on that instance alone, by one that runs the original under a
`TorchFunctionMode`. The mode watches for `scaled_dot_product_attention`, or the softmax of a model that does without
it, and hands what it saw to a sink; where torch's own kernel can tell its normalisers, it is asked to. Nothing global
is patched; outside the module's own forward nothing is watched, and `torch.compile(fullgraph=True)` traces straight
through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitfocus.anatomy import Block
from vitfocus.attention.observation import Observation, join_heads
from vitfocus.kernels.attention import attention_with_normalisers, matched
from vitfocus.kernels.backends import chosen, exporting, outside_autocast

Sink = Callable[[Observation], None]


class _Watch(TorchFunctionMode):
    """Collects every attention that happens while it is active."""

    def __init__(self, seen: list[Observation], finished_maps: bool, heads: int | None) -> None:
        super().__init__()
        self.seen = seen
        self.finished_maps = finished_maps
        self.heads = heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.finished_maps:
            if func is F.dropout and args[0].ndim == 4:
                self.seen.append(Observation(map=args[0]))
        elif func is F.scaled_dot_product_attention:
            seen, value = _from_call(self.heads, *args, **kwargs)
            made = None
            if value is not None and seen.query is not None and seen.key is not None and triton_reads(seen.query):
                made = attention_with_normalisers(seen.query, seen.key, value, scale=seen.scale)
            if made is not None:
                self.seen.append(replace(seen, lse=made[1]))
                return made[0]
            self.seen.append(seen)
        elif func in (F.softmax, torch.softmax, Tensor.softmax) and args[0].ndim >= (3 if self.heads else 4):
            self.seen.append(Observation(logits=_by_heads(args[0], self.heads)))
        return func(*args, **kwargs)


def _by_heads(tensor: Tensor, heads: int | None) -> Tensor:
    """(B, H, ·, ·), from a tensor whose heads are folded into the batch (B · H, ·, ·), or with windows on an axis."""
    if tensor.ndim == 3 and heads:
        return tensor.unflatten(0, (-1, heads))
    return tensor if tensor.ndim == 4 else tensor.flatten(0, -4)


def _from_call(
    heads: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Observation, Tensor | None]:
    """An observation from the arguments of `scaled_dot_product_attention`, and the values where these are all."""
    plain = attn_mask is None and dropout_p == 0.0 and not is_causal and not enable_gqa and query.ndim == 4
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    if attn_mask is not None and attn_mask.ndim == 3 == query.ndim and len(attn_mask) > 1:
        attn_mask = _by_heads(attn_mask, heads)
    elif attn_mask is not None and attn_mask.ndim > 4:
        attn_mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).flatten(0, -4)
    elif attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    query, key = _by_heads(query, heads), _by_heads(key, heads)
    if enable_gqa and key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    query, key = matched(query, key)
    return Observation(query=query, key=key, scale=scale, bias=attn_mask), value if plain else None


def triton_reads(query: Tensor) -> bool:
    """Whether what was seen goes to the kernels, which profit from knowing the normalisers."""
    return not exporting() and chosen(query) == "triton"


def _from_multihead(module: nn.MultiheadAttention, tokens: Tensor) -> Observation:
    """Queries and keys of an `nn.MultiheadAttention`, projected as it projects them.

    Its eval-mode fast path never leaves C++, so they are computed here beside it rather than caught inside.
    """
    if not module.batch_first:
        tokens = tokens.transpose(0, 1)
    weight, bias = module.in_proj_weight[: 2 * module.embed_dim], module.in_proj_bias
    projected = F.linear(tokens, weight, bias[: 2 * module.embed_dim] if bias is not None else None)
    heads = (*tokens.shape[:2], module.num_heads, module.head_dim)
    query, key = (part.reshape(heads).transpose(1, 2) for part in projected.chunk(2, dim=-1))
    return Observation(query=query, key=key, scale=module.head_dim**-0.5)


class Watched:
    """Stands in for an attention module's `forward`: the original, watched.

    It is an object rather than a closure so that the module can still be copied and pickled.
    """

    def __init__(self, module: nn.Module, reader: str, sink: Sink) -> None:
        self.module = module
        self.reader = reader
        self.sink = sink
        self.inner = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self.sink, "wants_attention", True):
            return self._original(*args, **kwargs)
        if self.reader == "multihead":
            tokens = args[0] if args else kwargs["query"]
            assert isinstance(self.module, nn.MultiheadAttention)
            self.sink(_from_multihead(self.module, tokens))
            return self._original(*args, **kwargs)
        seen: list[Observation] = []
        with _Watch(seen, self.reader == "dropout", _heads(self.module)):
            output = self._original(*args, **kwargs)
        if seen:
            self.sink(join_heads(seen))
        return output

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def _heads(module: nn.Module) -> int | None:
    """How many heads an attention module says it has."""
    for name in ("num_heads", "num_attention_heads", "n_heads"):
        if isinstance(heads := getattr(module, name, None), int):
            return heads
    return None


@contextmanager
def observing(blocks: Sequence[Block], sink: Callable[[Block, Observation], None]) -> Iterator[None]:
    """Within the context, every attention of these blocks is handed to `sink(block, observation)`.

    Compiled models run eagerly meanwhile, so that they can be read too. On the way out, exceptions included, every
    module is as it was.
    """
    watched: list[tuple[nn.Module, Watched]] = []
    try:
        for block in blocks:
            if block.attention is None or block.reader is None:
                continue
            stand_in = Watched(block.attention, block.reader, _BlockSink(block, sink))
            block.attention.__dict__["forward"] = stand_in
            watched.append((block.attention, stand_in))
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, stand_in in reversed(watched):
            if stand_in.inner is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = stand_in.inner


class _BlockSink:
    """Tells the sink which block an observation came from, and has it compute with the precision that it asks for."""

    def __init__(self, block: Block, sink: Callable[[Block, Observation], None]) -> None:
        self.block = block
        self.sink = sink

    def __call__(self, seen: Observation) -> None:
        with outside_autocast(seen.device):
            self.sink(self.block, seen)
