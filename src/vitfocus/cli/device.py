"""Which device a command runs on: the one named, or a GPU if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_called(name: str | None) -> torch.device:
    """The device named, or a GPU if there is one; a name that does not work here is refused."""
    import torch

    from vitfocus.errors import VitfocusError

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise VitfocusError(f"There is no device {name!r} here: {str(error).splitlines()[0]}") from None
    if torch.device(name).type == "meta":
        raise VitfocusError("The device 'meta' holds no numbers to measure: name another, such as cpu.")
    return torch.device(name)
