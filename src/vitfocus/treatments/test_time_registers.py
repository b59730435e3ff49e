"""Test-time registers: move the activations that make outlier tokens to an added token, without training.

"Vision Transformers Don't Need Trained Registers" (Jiang et al., NeurIPS 2025). A few neurons of the MLPs ("register
neurons") write the high norms of outlier tokens. `find_registers` finds them from some images: those with the largest
mean activation at outliers. The treatment adds one token, initially zero, gives it the largest activation that each of
these neurons has on any token, and sets the neuron to zero on all patches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy, Block
from vitfocus.anatomy import anatomy as anatomy_of
from vitfocus.attention.batches import Batches, Images
from vitfocus.attention.capture import pick_blocks, reading
from vitfocus.attention.readings import high_norm
from vitfocus.core.errors import VitfocusError
from vitfocus.treatments.base import Treatment
from vitfocus.treatments.operations import Surgeon
from vitfocus.treatments.registers import AddedTokens, add_tokens
from vitfocus.treatments.surgery import handles

#: More neurons than any published setting takes (DINOv2-L: 45), and few enough for a record.
MOST_NEURONS = 500


@dataclass(frozen=True)
class TestTimeRegisters(Treatment):
    """A test-time register (`ttr`), which needs no training.

    Args:
        neurons: The register neurons, each as (block, channel between the two layers of its MLP). `find_registers`
            returns this treatment with those of a model.

    Example:
        >>> str(TestTimeRegisters(neurons=[(5, 133), (5, 20)]))
        'ttr(neurons=[[5,133],[5,20]])'
    """

    name: ClassVar[str] = "ttr"
    label: ClassVar[str] = "TTR"
    about: ClassVar[str] = "An added token takes the activations of the neurons that make outlier tokens"
    columns: ClassVar[Mapping[str, str]] = {"ttr": "ttr(neurons=[[0,0]])"}
    training_free: ClassVar[bool] = True
    __test__: ClassVar[bool] = False  # pytest must not collect the class

    neurons: Sequence[tuple[int, int]] = ()

    def check(self) -> None:
        """Pairs of numbers, each once."""
        given: Any = self.neurons
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        pairs = [tuple(pair) if isinstance(pair, Sequence) else () for pair in given] if is_list else []
        if not pairs:
            raise VitfocusError("ttr needs neurons: vitfocus.find_registers(model, images) finds those of a model.")
        if not all(len(pair) == 2 and all(isinstance(n, int) and n >= 0 for n in pair) for pair in pairs):
            raise VitfocusError(f"ttr takes neurons as pairs of block and channel, such as [[5,133]], not {given!r}.")
        if len(set(pairs)) < len(pairs) or len(pairs) > MOST_NEURONS:
            raise VitfocusError(f"ttr takes each neuron once, and at most {MOST_NEURONS} of them.")
        object.__setattr__(self, "neurons", tuple(pairs))

    @property
    def operations_per_element(self) -> int:
        """The maximum over tokens, and the choice of what stays."""
        return 2


class MoveNeurons(nn.Module):
    """Moves some channels (neurons) of the MLP from the patches to the token at `index`.

    >>> move = MoveNeurons([0], width=2, index=0, prefix_tokens=1)
    >>> move(torch.tensor([[[0.0, 1.0], [5.0, 1.0], [7.0, 1.0]]]))
    tensor([[[7., 1.],
             [0., 1.],
             [0., 1.]]])
    """

    def __init__(self, neurons: Sequence[int], width: int, index: int, prefix_tokens: int) -> None:
        super().__init__()
        self.moved = torch.tensor([n in neurons for n in range(width)], device="cpu")  # loaders may empty buffers
        self.index, self.prefix_tokens = index, prefix_tokens

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if (device := fn(self.moved).device).type != "meta":
            self.moved = self.moved.to(device)
        return super()._apply(fn, recurse)

    def forward(self, hidden: Tensor) -> Tensor:
        """Activations (B, N, hidden width); the shape is kept."""
        before, register, after, patches = hidden.tensor_split((self.index, self.index + 1, self.prefix_tokens), dim=1)
        moved = self.moved.to(hidden.device)
        register = torch.where(moved, hidden.amax(dim=1, keepdim=True), register)
        return torch.cat((before, register, after, patches.masked_fill(moved, 0.0)), dim=1)


@handles(TestTimeRegisters)
def insert_register(config: TestTimeRegisters, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Add the token, and move the neurons of every MLP that has some."""
    by_depth = {depth: [neuron for at, neuron in config.neurons if at == depth] for depth, _ in config.neurons}
    blocks = _movable(anatomy)
    for depth, neurons in by_depth.items():
        if depth not in blocks or max(neurons) >= blocks[depth].ports["mlp.mid"].width:
            raise VitfocusError(f"Block {depth} has no neuron {max(neurons)}: use find_registers on this model.")
    add_tokens(AddedTokens(1), "test_time_register", anatomy, surgeon)
    for depth, neurons in by_depth.items():
        block, port = blocks[depth], blocks[depth].ports["mlp.mid"]
        move = MoveNeurons(neurons, port.width, block.prefix_tokens, block.prefix_tokens + 1)
        surgeon.insert(block, "mlp.mid", "move_neurons", move)


def _movable(anatomy: Anatomy) -> dict[int, Block]:
    """The blocks whose MLP neurons can be moved, by depth."""
    found = {b.depth: b for b in anatomy.trunk if "mlp.mid" in b.ports and b.ports["mlp.mid"].layout == "BNC"}
    if not found:
        raise VitfocusError(f"{type(anatomy.root).__name__} has no MLP whose neurons can be moved.")
    return found


def find_registers(
    model: nn.Module,
    images: Images,
    neurons: int = 10,
    *,
    layer: int | None = None,
    threshold: float | None = None,
    batch_size: int | None = None,
) -> TestTimeRegisters:
    """Find the neurons that write the high norms of outlier tokens.

    Args:
        model: A vision transformer; it is not changed.
        images: Some images, in any form that `diagnose` takes; a few dozen are enough.
        neurons: How many neurons to move.
        layer: The block at whose output outliers are looked for, and up to which neurons are searched; by default the
            first block with at least half as many outliers as the block with the most.
        threshold: The norm above which a patch token is an outlier; by default that of the reading `high_norm`.
        batch_size: How many images to run at once.

    Returns:
        The treatment for this model, for `treat_`.

    Raises:
        VitfocusError: If no patch token is an outlier, or the model has no such neurons.

    Example:
        >>> import timm, vitfocus as vf
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
        >>> treatment = vf.find_registers(model, torch.randn(2, 3, 64, 64), 3, layer=1, threshold=0.0)
        >>> len(treatment.neurons)
        3
    """
    body = anatomy_of(model)
    blocks = _movable(body)
    wanted = None if layer is None else pick_blocks(body, layer)[0].depth
    batches = list(Batches(images, body, batch_size))
    outliers: dict[int, list[Tensor]] = defaultdict(list)

    def find_outliers(block: Block, norms: Tensor) -> None:
        flat = norms.flatten(1)
        outliers[block.depth].append(high_norm(flat) if threshold is None else flat > threshold)

    with reading(model, body, [], lambda *_: None, norms=find_outliers) as session:
        for batch in batches:
            session.run(batch)
    counts = {depth: sum(int(mask.sum()) for mask in masks) for depth, masks in outliers.items()}
    most = max(counts.values(), default=0)
    depth = next((one for one, count in counts.items() if 2 * count >= most), 0) if wanted is None else wanted
    if not counts.get(depth):
        of = f"of block {depth}" if layer is not None else "of any block"
        raise VitfocusError(
            f"No patch token at the output {of} has a norm far above the others, so there is nothing to move: "
            "test-time registers treat models with outliers, such as DINOv2-L and CLIP."
        )
    activations = _Activations()
    with ExitStack() as stack:
        for index, block in blocks.items():
            if index <= depth:
                module = block.ports["mlp.mid"].module
                stack.callback(module.register_forward_pre_hook(partial(activations.add, index)).remove)
        session = stack.enter_context(reading(model, body, [], lambda *_: None))
        for batch, mask in zip(batches, outliers[depth], strict=True):
            activations.mask = mask
            session.run(batch)
    return TestTimeRegisters(activations.largest(neurons))


class _Activations:
    """Sums, over images, the mean absolute activation of each neuron at the outliers (`mask`) of the image."""

    def __init__(self) -> None:
        self.mask = torch.empty(0)
        self.sums: dict[int, Any] = defaultdict(int)

    def add(self, depth: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A pre-hook of the second layer of an MLP, whose input is (B, N, neurons)."""
        patches = args[0][:, args[0].shape[1] - self.mask.shape[1] :].abs().float()
        at = self.mask.to(patches).unsqueeze(-1)
        mean = (patches * at).sum(dim=1) / at.sum(dim=1).clamp_min(1)  # an image without outliers adds nothing
        self.sums[depth] = self.sums[depth] + mean.sum(dim=0)

    def largest(self, count: int) -> list[tuple[int, int]]:
        """The neurons with the largest sums, in descending order."""
        found = [(float(v), depth, n) for depth, sums in self.sums.items() for n, v in enumerate(sums.tolist())]
        if not 1 <= count <= min(len(found), MOST_NEURONS):
            raise VitfocusError(f"find_registers takes 1 to {min(len(found), MOST_NEURONS)} neurons, not {count}.")
        return [(depth, n) for _, depth, n in sorted(found, key=lambda one: -one[0])[:count]]
