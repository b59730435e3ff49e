"""Running a model in order to read it: in eval mode, without gradients, on its own device, and back as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy, Block, unwrap
from vitfocus.anatomy.block import Size
from vitfocus.attention.capture import observing
from vitfocus.attention.images import Batch, normalised
from vitfocus.attention.observation import Observation
from vitfocus.attention.text_inputs import PatchesInOrder, with_text
from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.modules import eval_mode

#: Called with the block, what was seen of its attention, and the size of the images as its stem received them.
SizedSink = Callable[[Block, Observation, Size], None]


@contextmanager
def reading(
    model: nn.Module, body: Anatomy, blocks: Sequence[Block], sink: SizedSink
) -> Iterator[Callable[[Batch], Any]]:
    """Within the context, the yielded function runs a batch, and every attention of `blocks` goes to the sink."""
    sizes: list[Size] = [body.build_size]

    def note_size(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 4:
                sizes[0] = (int(value.shape[-2]), int(value.shape[-1]))
                return

    modules = list(model.modules())
    # A loss that a training step has yet to ask for is not forgotten over a reading in between.
    pending: list[tuple[Any, Any]] = [(module, module.loss) for module in modules if hasattr(type(module), "forget")]
    handle = body.stem.register_forward_pre_hook(note_size, with_kwargs=True)
    try:
        order = PatchesInOrder() if body.text is not None else nullcontext()
        with (
            eval_mode(model),
            torch.no_grad(),
            order,
            observing(blocks, lambda block, seen: sink(block, seen, sizes[0])),
        ):
            yield lambda batch: _forward(model, body, batch)
    finally:
        handle.remove()
        for meter, loss in pending:
            meter.loss = loss


def _forward(model: nn.Module, body: Anatomy, batch: Batch) -> Any:
    batch = with_text(batch, model, body)
    weight = next((p for p in body.root.parameters() if p.is_floating_point()), torch.empty(0))
    pixels = normalised(batch.pixels, body).to(weight.device, weight.dtype)
    extras = {key: value.to(weight.device) for key, value in batch.extras.items()}
    size = (int(pixels.shape[-2]), int(pixels.shape[-1]))
    try:
        if extras or "pixel_values" in inspect.signature(unwrap(model).forward).parameters:
            return model(pixel_values=pixels, **extras)
        return model(pixels)
    except (AssertionError, RuntimeError, ValueError) as error:
        if f"{pixels.shape[1]} channels instead" in str(error):  # torch's words about the stem
            raise VitfocusError(
                f"{type(unwrap(model)).__name__} does not take images of {pixels.shape[1]} channels: {error}."
            ) from error
        if isinstance(error, VitfocusError) or size == body.build_size or "out of memory" in str(error):
            raise
        built, given = ("x".join(map(str, one)) for one in (body.build_size, size))
        raise VitfocusError(
            f"{type(unwrap(model)).__name__} was built for {built} images and does not take {given} ({error}); resize "
            f"the images, or build the model for that size (timm: img_size=, or dynamic_img_size=True)."
        ) from error


def pick_blocks(body: Anatomy, layers: int | str | Sequence[int | str] | None) -> list[Block]:
    """The blocks asked for, by index (negative from the end) or by name; all of them for None."""
    if layers is None:
        return list(body)
    listed: Any = [layers] if isinstance(layers, str) or hasattr(layers, "__index__") else layers
    if not isinstance(listed, Iterable) or not (asked := list(listed)):
        raise VitfocusError(f"layers takes a number, a name or a list of them, not {layers!r}.")
    return [_pick(body, layer) for layer in asked]


def _pick(body: Anatomy, layer: int | str) -> Block:
    if isinstance(layer, str):
        for block in body:
            if block.name == layer:
                return block
        raise VitfocusError(f"There is no layer {layer!r}: {nearest(layer, [block.name for block in body])}")
    if not hasattr(layer, "__index__"):
        raise VitfocusError(f"A layer is a number or a name, not {layer!r}.")
    if not -len(body) <= layer < len(body):
        raise VitfocusError(f"There is no layer {layer}: the model has {len(body)}, 0 to {len(body) - 1}.")
    return body[int(layer)]


def can_be_read(block: Block) -> bool:
    """Whether the block has a map from tokens to tokens, or from the class token to them, and it can be seen."""
    return (block.mixes_tokens_by_attention or block.attention_kind == "class") and block.reader is not None


def model_name(model: nn.Module) -> str:
    """What to call a model: its registered name where it has one, else its class."""
    inner = unwrap(model)
    config: Any = getattr(inner, "pretrained_cfg", None) or {}
    named = config.get("architecture") if isinstance(config, dict) else None
    return str(named or getattr(getattr(inner, "config", None), "name_or_path", None) or type(inner).__name__)
