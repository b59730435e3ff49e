"""Treatments in other training loops: a mixin for the Trainer of Hugging Face and a callback for Lightning.

Both add the auxiliary loss of the model (`vitfocus.auxiliary_loss`) to the loss of the loop in training, log it, and at
each evaluation log readings of the attention, averaged over the layers. Lightning is imported when the callback is
first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.attention.diagnosis import diagnose
from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.attention_diversification import auxiliary_loss

_READINGS = ("entropy", "overfocus")


class TrainerMixin:
    """Adds the auxiliary loss to a `transformers.Trainer`, and logs it and the attention.

    Use it as a base class in front of the trainer. `readings` are the keys of `Diagnosis.rows` that are logged at each
    evaluation as `attention_...`, from the first `readings_images` images of its first batch; an empty tuple logs none.

    Example:
        >>> class MyTrainer(TrainerMixin, transformers.Trainer):  # doctest: +SKIP
        ...     readings = ("entropy",)
        >>> MyTrainer(model=vf.treat_(model, "cbs+adl"), args=args, train_dataset=data).train()  # doctest: +SKIP
    """

    readings: Sequence[str] = _READINGS
    readings_images = 8

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The trainer's loss and, in training, the auxiliary one."""
        parent: Any = super()
        loss, outputs = parent.compute_loss(model, inputs, True, num_items_in_batch=num_items_in_batch)
        if model.training:
            extra = auxiliary_loss(model)
            self.__dict__.setdefault("_auxiliary", []).append(extra.detach())
            me: Any = self
            scaled = getattr(me, "loss_is_scaled_for_ga", None)
            if scaled is None:
                scaled = (me.model_accepts_loss_kwargs and num_items_in_batch is not None) or me.compute_loss_func
            loss = loss + (extra / me.current_gradient_accumulation_steps if scaled else extra)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log the mean of the auxiliary loss since the last time with the trainer's loss."""
        seen = self.__dict__.get("_auxiliary")
        if seen and "loss" in logs:
            logs = {**logs, "auxiliary_loss": float(torch.stack(seen).mean())}
            seen.clear()
        parent: Any = super()
        parent.log(logs, *args, **options)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **options: Any) -> dict[str, float]:
        """The trainer's evaluation, and readings of the attention."""
        parent: Any = super()
        metrics: dict[str, float] = parent.evaluate(eval_dataset, *args, **options)
        me: Any = self
        if self.readings:
            batch = next(iter(me.get_eval_dataloader(None if isinstance(eval_dataset, Mapping) else eval_dataset)))
            found = read_attention(me.model, batch, self.readings, self.readings_images)
            self.log(found)
            metrics |= found
        return metrics


def read_attention(model: nn.Module, batch: Any, keys: Sequence[str], images: int = 8) -> dict[str, float]:
    """Readings of the attention for the images of a batch, averaged over the layers that have them.

    Args:
        model: A vision transformer, or a module that contains one.
        batch: A tensor of normalised images, a tuple that begins with one, or a mapping with `pixel_values` or `image`.
        keys: Keys of `Diagnosis.rows`, such as "entropy".
        images: How many images are read.

    Returns:
        For each key, "attention_KEY" and the number.

    Raises:
        VitfocusError: The batch holds no images, or there is no such reading.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
        >>> sorted(read_attention(model, (torch.randn(2, 3, 32, 32), torch.zeros(2)), ["entropy", "overfocus"]))
        ['attention_entropy', 'attention_overfocus']
    """
    names = ("pixel_values", "image", "images", "x")
    values = [batch[key] for key in names if key in batch] if isinstance(batch, Mapping) else batch
    pixels = values if isinstance(values, Tensor) else next(iter(values), None)
    if not isinstance(pixels, Tensor) or pixels.ndim != 4:
        raise VitfocusError(f"A batch of type {type(batch).__name__} holds no images to read attention from.")
    rows = diagnose(model, pixels[:images], normalised=True).rows
    result = {}
    for key in keys:
        numbers = [float(row[key]) for row in rows if isinstance(row.get(key), int | float)]
        if not numbers:
            raise VitfocusError(f"There is no reading {key!r} of this model: its rows have {', '.join(rows[0])}.")
        result[f"attention_{key}"] = sum(numbers) / len(numbers)
    return result


def _with_loss(module: Any) -> Callable[..., Any]:
    """A LightningModule's `training_step` with the auxiliary loss added to what it returns."""
    inner = module.training_step

    @wraps(inner)
    def training_step(*args: Any, **options: Any) -> Any:
        output = inner(*args, **options)
        if output is None:
            return None
        extra = auxiliary_loss(module)
        module.log("auxiliary_loss", extra.detach(), on_step=True, on_epoch=True)
        return {**output, "loss": output["loss"] + extra} if isinstance(output, Mapping) else output + extra

    return training_step


@cache
def _lightning_callback() -> type:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            base: Any = importlib.import_module(name).Callback
            break
        except ImportError:
            continue
    else:
        raise VitfocusError("vitfocus.LightningCallback needs Lightning: pip install lightning.")

    class LightningCallback(base):
        """Adds the auxiliary loss to the loss of any LightningModule, and logs it and the attention.

        Args:
            readings: Keys of `Diagnosis.rows` that are logged at each validation as `attention_...`, read from the
                first validation batch.
            images: How many images of it are read.
        """

        def __init__(self, readings: Sequence[str] = _READINGS, images: int = 8) -> None:
            super().__init__()
            self.readings, self.images = tuple(readings), images

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            """Add the loss to the module's training step."""
            if stage == "fit":
                pl_module.__dict__["training_step"] = _with_loss(pl_module)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            """Restore the training step of the module."""
            pl_module.__dict__.pop("training_step", None)

        def on_validation_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            """Read the attention of the first batch."""
            if batch_idx == 0 and dataloader_idx == 0 and self.readings and not trainer.sanity_checking:
                found = read_attention(pl_module, batch, self.readings, self.images)
                pl_module.log_dict(found, on_step=False, on_epoch=True, sync_dist=True)

    return LightningCallback


def __getattr__(name: str) -> Any:
    if name == "LightningCallback":
        return _lightning_callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
