"""Run a model to read its attention: in eval mode, without gradients, on its own device, and restored afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy, Block, unwrap
from vitfocus.anatomy.block import Size
from vitfocus.attention.capture import observing, reading_only
from vitfocus.attention.images import ImageBatch, normalised
from vitfocus.attention.text_inputs import PatchesInOrder, with_text
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.modules import eval_mode
from vitfocus.kernels.attention import Observation

#: Called with the block, its observed attention, and the size of the images as the stem received them.
SizedSink = Callable[[Block, Observation, Size], None]


@dataclass
class Session:
    """A model that is being read. `run` runs one batch; `size` is the image size that the stem received last."""

    model: nn.Module
    body: Anatomy
    sink: SizedSink
    size: Size

    def run(self, batch: ImageBatch) -> Any:
        """The model's output for a batch, which is normalised and moved to the model's device first."""
        model, body = self.model, self.body
        if body.text is not None:
            batch = with_text(batch, model, body)
        weight = next((p for p in body.root.parameters() if p.is_floating_point()), torch.empty(0))
        pixels = normalised(batch.pixels, body).to(weight.device, weight.dtype)
        extras = {key: value.to(weight.device) for key, value in batch.extras.items()}
        try:
            if extras or "pixel_values" in inspect.signature(unwrap(model).forward).parameters:
                return model(pixel_values=pixels, **extras)
            return model(pixels)
        except (AssertionError, RuntimeError, ValueError) as error:
            _explain(error, pixels, model, body)
            raise

    def note_size(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of the stem: remember the size of its images."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 4:
                self.size = (int(value.shape[-2]), int(value.shape[-1]))
                return

    def observe(self, block: Block, seen: Observation) -> None:
        """Pass an observed attention on with the image size."""
        self.sink(block, seen, self.size)


@contextmanager
def reading(model: nn.Module, body: Anatomy, blocks: Sequence[Block], sink: SizedSink) -> Iterator[Session]:
    """Within the context, each attention of `blocks` in a session's run is passed to the sink."""
    session = Session(model, body, sink, body.build_size)
    handle = body.stem.register_forward_pre_hook(session.note_size, with_kwargs=True)
    try:
        order = nullcontext() if body.text is None else PatchesInOrder()
        with eval_mode(model), torch.no_grad(), reading_only(), order, observing(blocks, session.observe):
            yield session
    finally:
        handle.remove()


def _explain(error: Exception, pixels: Tensor, model: nn.Module, body: Anatomy) -> None:
    """Raise a clear error if the images have a size or a number of channels that the model does not take."""
    name, size = type(unwrap(model)).__name__, (int(pixels.shape[-2]), int(pixels.shape[-1]))
    if f"{pixels.shape[1]} channels instead" in str(error):  # torch's message about the stem
        raise VitfocusError(f"{name} does not take images of {pixels.shape[1]} channels: {error}.") from error
    if isinstance(error, VitfocusError) or size == body.build_size or "out of memory" in str(error):
        return
    built, given = ("x".join(map(str, one)) for one in (body.build_size, size))
    raise VitfocusError(
        f"{name} was built for {built} images and does not take {given} ({error}); resize the images, or build the "
        f"model for that size (timm: img_size=, or dynamic_img_size=True)."
    ) from error


def pick_blocks(body: Anatomy, layers: int | str | Sequence[int | str] | None) -> list[Block]:
    """The blocks asked for, by index (negative from the end) or by name; all of them for None."""
    if layers is None:
        return list(body)
    listed: Any = [layers] if isinstance(layers, str | SupportsIndex) else layers
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


def can_be_read(block: Block) -> bool:
    """Whether the block has a map from tokens (or the class token) to tokens, and it can be observed."""
    return (block.mixes_tokens_by_attention or block.attention_kind == "class") and block.reader is not None


def model_name(model: nn.Module) -> str:
    """A model's registered name if it has one, else the name of its class."""
    inner = unwrap(model)
    config: Any = getattr(inner, "pretrained_cfg", None) or {}
    named = config.get("architecture") if isinstance(config, dict) else None
    return str(named or getattr(getattr(inner, "config", None), "name_or_path", None) or type(inner).__name__)
