"""Which device work runs on: the one named, or a GPU if there is one."""

from __future__ import annotations

import torch

from vitfocus.core.errors import VitfocusError


def default_device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usable_device(name: str | torch.device | None = None) -> torch.device:
    """The device named, or `default_device`; one that does not work here is refused.

    >>> usable_device("cpu")
    device(type='cpu')
    >>> usable_device("gpu")
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: There is no device 'gpu' here: expected ...
    """
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise VitfocusError(f"There is no device {str(name)!r} here: expected {_present()}.") from None
    if device.type == "meta":
        raise VitfocusError(f"The device 'meta' holds no numbers: expected {_present()}.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        # torch's first sentence alone says why; what follows is advice for torch's own developers.
        reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        raise VitfocusError(f"There is no device {str(name)!r} here ({reason}): expected {_present()}.") from None
    return device


def _present() -> str:
    """The devices of this machine, in words."""
    found = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        found += [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
    return " or ".join(filter(None, [", ".join(found[:-1]), found[-1]]))
