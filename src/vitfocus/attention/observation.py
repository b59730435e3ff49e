"""One attention as it happened: queries, keys, scale and bias, or the logits or the map where the model made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Observation:
    """What was seen of one attention. Shapes: B images (or windows), H heads, Q queries, K keys, D channels a head.

    Either `query` (B, H, Q, D) and `key` (B, H, K, D) with `scale` and an optional additive `bias` broadcastable to
    (B, H, Q, K), and where they are known the softmax's normalisers `lse` (B, H, Q), log Σ exp; or the `logits`
    (B, H, Q, K) that the model fed to its softmax; or the finished `map` (B, H, Q, K).
    """

    query: Tensor | None = None
    key: Tensor | None = None
    scale: float = 1.0
    bias: Tensor | None = None
    lse: Tensor | None = None
    logits: Tensor | None = None
    map: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q, K)."""
        if self.query is not None and self.key is not None:
            batch, heads, queries, _ = self.query.shape
            return batch, heads, queries, self.key.shape[2]
        made = self.logits if self.logits is not None else self.map
        assert made is not None
        batch, heads, queries, keys = made.shape
        return batch, heads, queries, keys

    @property
    def device(self) -> torch.device:
        """Where it happened."""
        return next(t.device for t in (self.query, self.logits, self.map) if t is not None)

    def attention(self, rows: slice | Tensor | None = None) -> Tensor:
        """The attention map's rows (all of them by default) in float32 or wider: (B, H, rows, K), each summing to one.

        >>> seen = Observation(query=torch.zeros(1, 1, 4, 8), key=torch.randn(1, 1, 4, 8), scale=8**-0.5)
        >>> seen.attention(slice(0, 2)).shape, float(seen.attention()[0, 0, 0, 0])
        (torch.Size([1, 1, 2, 4]), 0.25)
        """
        pick = slice(None) if rows is None else rows
        if self.map is not None:
            return _wide(self.map[:, :, pick])
        return self.scores(pick).softmax(dim=-1)

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

    def of_tokens(self, images: Tensor, tokens: Tensor) -> Observation:
        """The same for G of the images (G,) and, of each, the tokens (G, N) alone, as queries and as keys.

        Right where every other key is masked, so that no attention is lost with it.

        >>> seen = Observation(map=torch.eye(3).expand(2, 1, 3, 3))
        >>> seen.of_tokens(torch.tensor([1]), torch.tensor([[0, 2]])).attention()
        tensor([[[[1., 0.],
                  [0., 1.]]]])
        """
        place = images[:, None]

        def rows(values: Tensor) -> Tensor:
            return values[place, :, tokens].transpose(1, 2)

        def pairs(values: Tensor) -> Tensor:
            whole = values.expand(self.shape[0], -1, *self.shape[2:])
            return whole[place[..., None], :, tokens[:, :, None], tokens[:, None]].permute(0, 3, 1, 2)

        return Observation(
            query=rows(self.query) if self.query is not None else None,
            key=rows(self.key) if self.key is not None else None,
            scale=self.scale,
            bias=pairs(self.bias) if self.bias is not None else None,
            lse=rows(self.lse) if self.lse is not None else None,
            logits=pairs(self.logits) if self.logits is not None else None,
            map=pairs(self.map) if self.map is not None else None,
        )

    def detach(self) -> Observation:
        """The same without a gradient."""
        tensors = {name: getattr(self, name) for name in ("query", "key", "bias", "lse", "logits", "map")}
        kept = {name: tensor.detach() if tensor is not None else None for name, tensor in tensors.items()}
        return Observation(scale=self.scale, **kept)


def join_heads(seen: Sequence[Observation]) -> Observation:
    """Several attentions over the same tokens as one with all their heads (differential attention calls twice).

    The attentions of one head stand together, as they do in a model that makes all of its maps at once.
    """
    if len(seen) == 1:
        return seen[0]
    if all(one.query is not None and one.bias is None and one.scale == seen[0].scale for one in seen):
        query = torch.stack([one.query for one in seen if one.query is not None], dim=2)
        key = torch.stack([one.key for one in seen if one.key is not None], dim=2)
        return Observation(query=query.flatten(1, 2), key=key.flatten(1, 2), scale=seen[0].scale)
    return Observation(logits=torch.stack([one.scores() for one in seen], dim=2).flatten(1, 2))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
