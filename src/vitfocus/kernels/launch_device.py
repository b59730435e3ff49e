"""Launching where the tensors are: Triton itself launches on the current device, wherever its arguments lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def on_its_device(launch: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function with its first tensor's GPU as the current one, as torch's own operators have it.

    The first argument is that tensor, or a tuple that begins with it. On a CPU, for the interpreter, nothing changes.
    """

    @wraps(launch)
    def there(*args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        first = args[0][0] if isinstance(args[0], tuple) else args[0]
        assert isinstance(first, Tensor)
        with torch.cuda.device_of(first):
            return launch(*args, **keywords)

    return there
