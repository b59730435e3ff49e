"""Figure 5 of the Context Broadcasting paper: where softmax is steep, by automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from vitfocus.reproduce.measuring import Value

EXTENT, POINTS = 5.0, 81


def softmax_surface(extent: float = EXTENT, points: int = POINTS) -> tuple[Tensor, Tensor, Tensor]:
    """The axis (P,), softmax's first output (P, P) and the nuclear norm of its Jacobian (P, P) over (x1, x2).

    >>> axis, output, steepness = softmax_surface(points=5)
    >>> axis.tolist(), output[2, 2].item(), steepness.argmax(0).tolist()
    ([-5.0, -2.5, 0.0, 2.5, 5.0], 0.5, [0, 1, 2, 3, 4])
    """
    axis = torch.linspace(-extent, extent, points, dtype=torch.float64)
    inputs = torch.cartesian_prod(axis, axis)
    jacobians = vmap(jacrev(lambda x: x.softmax(0)))(inputs)
    steepness = torch.linalg.matrix_norm(jacobians, "nuc")
    output = inputs.softmax(1)[:, 0]
    return axis, output.unflatten(0, (points, points)), steepness.unflatten(0, (points, points))


def _softmax() -> dict[str, Value]:
    axis, _, steepness = softmax_surface()
    first, second = (int(place) for place in torch.unravel_index(steepness.argmax(), steepness.shape))
    middle = len(axis) // 2
    return {
        "steepest_at": Value(abs(float(axis[first] - axis[second]))),
        "gradient_uniform": Value(float(steepness[middle, middle])),
    }


#: Computations that need no model, by the name in an item's TOML.
COMPUTED: dict[str, Callable[[], dict[str, Value]]] = {"softmax": _softmax}
