"""A training step of a plain or treated model, eager, compiled or recorded as a CUDA graph, ready to be timed.

`build` makes a model in which the diversification loss is active (`_activity.py`). On a CPU, with the models of `TOY`,
everything runs that needs no GPU, to test the benchmark itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from _activity import activate_diversity, patchy_images, share_above
from torch import Tensor, nn
from torch.nn import functional as F

from vitfocus.treatments import TREATMENTS

#: timm's name, further options, side of the bright squares, and by the number of tokens (pixels, batch).
Model = tuple[str, dict[str, Any], int, dict[int, tuple[int, int]]]
MODELS: dict[str, Model] = {
    "deit_s": ("deit_small_patch16_224", {}, 16, {197: (224, 256), 1025: (512, 64), 4097: (1024, 8)}),
    "vit_b": ("vit_base_patch16_224", {}, 16, {197: (224, 128)}),
    "swin_t": ("swin_tiny_patch4_window7_224", {}, 4, {3136: (224, 128)}),
    "fan_s": ("fan_small_12_p4_hybrid", {}, 16, {196: (224, 128)}),
    "vit_ti4": ("vit_tiny_patch16_224", {"patch_size": 4}, 4, {65: (32, 128)}),
}
_TINY = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
#: The same names at a size for a CPU.
TOY: dict[str, Model] = {
    name: ("vit_tiny_patch16_224", _TINY, 4, dict.fromkeys(sizes, (24, 8))) for name, (_, _, _, sizes) in MODELS.items()
}
VARIANTS = {
    "plain": "",
    "plain-again": "",
    "cb": "cb",
    "cbs": "cbs",
    "tap": "tap",
    "adl": "adl(threshold=1.0)",
    "adl-paper": "adl(variant=paper,threshold=1.0)",
    "adl-256": "adl(rows=256,threshold=1.0)",
    "tap+adl": "tap+adl(threshold=1.0)",
    "all": "cb+tap+adl(threshold=1.0)",
    "all-256": "cb+tap+adl(rows=256,threshold=1.0)",
    "released-tap": "tap",
    "released-adl": "adl(threshold=1.0)",
}
#: Every other registered treatment by its name; a uniform head has other weights to activate, and test-time registers
#: need the neurons of a trained model.
VARIANTS |= {name: name for name in TREATMENTS if name not in ("cb", "tap", "adl", "uniform", "ttr")}
SETTINGS = ("eager", "compiled", "recorded")
#: The least loss, and share of entries above the threshold, of a diversification loss that counts as active.
LEAST_LOSS, LEAST_SHARE = 0.1, 0.2


def models(device: str) -> dict[str, Model]:
    """What is measured on a device."""
    return TOY if device == "cpu" else MODELS


def build(model: Model, tokens: int, variant: str, device: str, batch: int | None = None) -> tuple[nn.Module, Tensor]:
    """A model in training mode in which the diversification loss is active, and its images."""
    import vitfocus as vf

    name, options, tile, sizes = model
    size, usual = sizes[tokens]
    torch.manual_seed(0)
    with torch.device(device):  # where weights are drawn in a moment
        made = vf.create_model("+".join(filter(None, [name, VARIANTS[variant]])), img_size=size, **options).train()
    images = patchy_images(batch or usual, size, size, tile).to(device)
    activate_diversity(made, few(images, tokens))
    return made, images


def few(images: Tensor, tokens: int) -> Tensor:
    """As many of the images as are enough to look at."""
    return images[: max(2, 2000 // tokens)]


def check_active(loss: float, share: float) -> None:
    """Raise an error if the diversification loss has nothing to do."""
    if not (loss >= LEAST_LOSS and share >= LEAST_SHARE):
        raise RuntimeError(f"inactive: the loss is {loss:.3f}, the share above the threshold {share:.3f}")


class Step:
    """A model and its training step in one of the settings: forward, loss, backward and AdamW under bf16 autocast."""

    def __init__(self, model: str, tokens: int, variant: str, setting: str, device: str) -> None:
        from vitfocus.train.compile import compile_blocks

        self.device = device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.model, self.images = build(models(device)[model], tokens, variant, device)
        self.labels = torch.randint(0, 1000, (len(self.images),), device=device)
        self.active = "adl" in VARIANTS[variant]
        self.share = share_above(self.model, few(self.images, tokens)) if self.active else 0.0
        self.released = variant.startswith("released")
        if variant == "released-tap":
            pool_by_unfold(self.model)
        cuda = device == "cuda"
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-7, fused=cuda, capturable=cuda)
        self.forward: Callable[[Tensor], Tensor] = self.model
        if setting == "compiled":
            # Every model counts as another version of one function; beyond the limit they would silently run eagerly.
            torch._dynamo.config.recompile_limit = 64
            self.forward = torch.compile(self.model, backend="inductor" if cuda else "aot_eager")
        elif setting == "recorded" and cuda:
            compile_blocks(self.model)

    def take(self) -> Tensor:
        """One step, launched kernel by kernel; returns the diversification loss."""
        import vitfocus as vf

        with torch.autocast(self.device, torch.bfloat16):
            loss = F.cross_entropy(self.forward(self.images), self.labels)
        extra = vf.auxiliary_loss(self.model)
        (loss + extra).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return extra.detach()

    def record(self) -> None:
        """Record the step as one CUDA graph, as the engine does: from now on a call replays it."""
        from vitfocus.treatments.attention_diversification import reset_losses

        reset_losses(self.model)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.take()
        self.graph = graph

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.take()

    def backend(self) -> Any:
        """What the step runs under."""
        from vitfocus.kernels.backends import backend

        return backend("reference") if self.released else nullcontext()

    def prepare(self, setting: str) -> dict[str, float]:
        """Take a few steps, measure their memory, and record one if the setting says so."""
        with self.backend():
            for _ in range(3):
                extra = self.take()
            found = {"loss": float(extra), "share": self.share} if self.active else {}
            if self.active:
                check_active(**found)
            if self.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                self.take()
                weights = 12 * sum(parameter.numel() for parameter in self.model.parameters())
                found["memory"] = torch.cuda.max_memory_allocated() - before + weights
                if setting == "recorded":
                    self.record()
        return found


def pool_by_unfold(model: nn.Module) -> None:
    """Pool as the released code does: every neighbourhood unfolded, then averaged."""
    from vitfocus.treatments.token_aware_pooling import DilationPredictor

    def pool(self: Any, image: Tensor) -> Tensor:
        weights = self.proj(image).softmax(dim=1)
        mixed = weights[:, :1] * image
        for k in range(1, weights.shape[1]):
            near = F.unfold(image, 3, dilation=k, padding=k).unflatten(1, (image.shape[1], 9)).mean(dim=2)
            mixed = mixed + weights[:, k : k + 1] * near.view_as(image)
        return mixed

    for module in model.modules():
        if isinstance(module, DilationPredictor):
            module.pool = pool.__get__(module)  # type: ignore[method-assign]
