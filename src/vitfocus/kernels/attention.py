"""A recorded attention call (`Observation`), and torch's fused attention with its softmax normalisers.

A fused attention kernel keeps log Σ exp of each row's logits for its backward pass. Reading the map a second time
needs exactly these values, and recomputing them takes a pass over all logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from vitfocus.core.errors import VitfocusError

#: Queries, keys, and optionally bias and normalisers, as the kernels take them.
AttentionInputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class Observation:
    """One observed attention. Shapes: B images (or windows), H heads, Q queries, K keys, D channels per head.

    Either `query` (B, H, Q, D) and `key` (B, H, K, D) with `scale` and an optional additive `bias` broadcastable to
    (B, H, Q, K), and, where known, the softmax normalisers `lse` (B, H, Q), log Σ exp; or the `logits` (B, H, Q, K)
    that the model passed to its softmax; or the finished `map` (B, H, Q, K). `loss` is that of an observer which
    computed it together with the attention.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    scale: float = 1.0
    bias: Tensor | None = None
    lse: Tensor | None = None
    logits: Tensor | None = None
    map: Tensor | None = None
    loss: Tensor | None = None

    @property
    def source(self) -> Tensor:
        """The tensor that the attention was computed from: queries, logits or the map."""
        for tensor in (self.query, self.logits, self.map):
            if tensor is not None:
                return tensor
        raise ValueError("An observation needs queries and keys, logits or a map.")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q, K)."""
        batch, heads, queries, keys = self.source.shape
        return batch, heads, queries, keys if self.key is None else self.key.shape[2]

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.source.device

    def attention(self, rows: slice | Tensor | None = None) -> Tensor:
        """The attention map's rows (all by default) in float32 or wider: (B, H, rows, K), each summing to one.

        >>> seen = Observation(query=torch.zeros(1, 1, 4, 8), key=torch.randn(1, 1, 4, 8), scale=8**-0.5)
        >>> seen.attention(slice(0, 2)).shape, float(seen.attention()[0, 0, 0, 0])
        (torch.Size([1, 1, 2, 4]), 0.25)
        """
        if self.map is not None:
            return _wide(self.map if rows is None else self.map[:, :, rows])
        scores = self.scores(rows)
        # As in torch's attention, a row with every key masked by a bias attends to nothing.
        return scores.softmax(dim=-1) if self.bias is None else torch.ops.aten._safe_softmax(scores, -1)

    def scores(self, rows: slice | Tensor | None = None) -> Tensor:
        """The logits' rows before the softmax, in float32 or wider: (B, H, rows, K)."""
        pick = slice(None) if rows is None else rows
        if self.logits is not None:
            return _wide(self.logits[:, :, pick])
        assert self.query is not None and self.key is not None
        scores = _wide(self.query[:, :, pick]) * self.scale @ _wide(self.key).transpose(-2, -1)
        if self.bias is not None:
            bias = self.bias if self.bias.shape[-2] == 1 else self.bias[..., pick, :]
            scores = scores + bias.to(scores.dtype)
        return scores

    def select(self, images: slice = slice(None), heads: slice | Tensor = slice(None)) -> Observation:
        """The same attention for some of the images and heads, as views."""
        batch, count, _, _ = self.shape

        def cut(tensor: Tensor) -> Tensor:
            tensor = tensor if tensor.shape[0] == 1 and batch > 1 else tensor[images]
            return tensor if tensor.shape[1] == 1 and count > 1 else tensor[:, heads]

        return self._each(cut)

    def of_tokens(self, images: Tensor, tokens: Tensor) -> Observation:
        """The attention among some tokens of some images: `images` (G,) and for each of them `tokens` (G, N).

        Valid only if all other keys are masked, so that dropping them loses no attention.

        >>> seen = Observation(map=torch.eye(3).expand(2, 1, 3, 3))
        >>> seen.of_tokens(torch.tensor([1]), torch.tensor([[0, 2]])).attention()
        tensor([[[[1., 0.],
                  [0., 1.]]]])
        """
        place = images[:, None]

        def rows(values: Tensor | None) -> Tensor | None:
            return values[place, :, tokens].transpose(1, 2) if values is not None else None

        def pairs(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            whole = values.expand(self.shape[0], -1, *self.shape[2:])
            return whole[place[..., None], :, tokens[:, :, None], tokens[:, None]].permute(0, 3, 1, 2)

        by_token = {name: rows(getattr(self, name)) for name in ("query", "key", "lse")}
        by_pair = {name: pairs(getattr(self, name)) for name in ("bias", "logits", "map")}
        return Observation(scale=self.scale, **by_token, **by_pair)

    def detach(self) -> Observation:
        """The same observation, detached from the autograd graph."""
        return self._each(Tensor.detach)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Observation:
        """The same observation with `change` applied to each tensor."""
        names = ("query", "key", "bias", "lse", "logits", "map")
        changed: Any = {name: change(one) for name in names if (one := getattr(self, name)) is not None}
        return replace(self, loss=None, **changed)


def join_heads(seen: Sequence[Observation]) -> Observation:
    """Several attentions over the same tokens as one with all their heads (differential attention calls twice).

    The attentions of one head are adjacent, as in a model that computes all maps at once.
    """
    if all(one.query is not None and one.bias is None and one.scale == seen[0].scale for one in seen):
        query = torch.stack([one.query for one in seen if one.query is not None], dim=2)
        key = torch.stack([one.key for one in seen if one.key is not None], dim=2)
        return Observation(query=query.flatten(1, 2), key=key.flatten(1, 2), scale=seen[0].scale)
    return Observation(logits=torch.stack([one.scores() for one in seen], dim=2).flatten(1, 2))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def matched(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (B, H, Q, D) and keys (B, H, K, D) of one dtype, expanded to the same images and heads.

    Under autocast a model may pass two dtypes, and heads may share their keys; attention accepts both.

    >>> query, key = matched(torch.zeros(2, 3, 5, 8), torch.zeros(2, 1, 7, 8, dtype=torch.bfloat16))
    >>> key.shape, key.dtype
    (torch.Size([2, 3, 7, 8]), torch.float32)
    """
    given = query.ndim == key.ndim == 4 and query.shape[3] == key.shape[3]
    if not given or any(a != b and 1 not in (a, b) for a, b in zip(query.shape[:2], key.shape[:2], strict=True)):
        raise VitfocusError(
            f"Attention takes queries (B, H, Q, D) and keys (B, H, K, D) and was given {tuple(query.shape)} and "
            f"{tuple(key.shape)}."
        )
    if query.dtype != key.dtype:
        dtype = torch.promote_types(query.dtype, key.dtype)
        query, key = query.to(dtype), key.to(dtype)
    if query.shape[:2] != key.shape[:2]:
        both = torch.broadcast_shapes(query.shape[:2], key.shape[:2])
        query, key = (tensor.expand(*both, -1, -1) for tensor in (query, key))
    return query, key


def keeps_normalisers(query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    """Whether torch chooses a kernel for these tensors whose normalisers `attention_with_normalisers` returns.

    >>> keeps_normalisers(*torch.zeros(3, 1, 1, 4, 8), scale=1.0)
    True
    """
    if query.device.type == "cpu":
        choice = torch._fused_sdp_choice(query, key, value, None, 0.0, False, scale=scale)
        return bool(choice == SDPBackend.FLASH_ATTENTION.value)
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    for tensor in (query, key, value):
        ends = (*query.shape[:2], query.shape[-1]) == (*tensor.shape[:-2], tensor.shape[-1])
        if not ends or tensor.dtype != query.dtype or tensor.stride(-1) != 1:
            return False
    if query.shape[-1] not in range(8, 129, 8) or min(query.shape[2], key.shape[2]) < 2:
        return False
    if torch.compiler.is_compiling():
        return _is_cudnn_first(query.device)
    choice = torch._fused_sdp_choice(query, key, value, None, 0.0, False, scale=scale)
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def attention_with_normalisers(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ) v and log Σ exp (B, H, Q), by the kernel that torch would choose, if it keeps them."""
    if query.device.type == "cpu":
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
        return output, lse.detach()
    made = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, False, False, scale=scale
    )
    return made[0], made[1].detach().reshape(query.shape[:3])


@torch.compiler.assume_constant_result
def _is_cudnn_first(device: torch.device) -> bool:
    """Whether torch prefers cuDNN's attention: from compute capability 9.0 on, unless configured otherwise.

    For compiled code, where there are no tensors to ask torch about yet.
    """
    if not torch.backends.cuda.cudnn_sdp_enabled() or torch.are_deterministic_algorithms_enabled():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0) and (torch.backends.cudnn.version() or 0) >= 90100
