"""Models as commands open them: by name or folder, and with a word about weights that are none."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def add_pretrained(parser: argparse.ArgumentParser) -> None:
    """Declare --pretrained."""
    parser.add_argument(
        "--pretrained", action="store_true", help="start named models from their library's weights, which it may fetch"
    )


def open_called(
    name: str, weights: str | None = None, treat: str | None = None, *, pretrained: bool = False, quiet: bool = False
) -> nn.Module:
    """The model of that name or folder, in eval mode; without weights it says that it is untrained, unless `quiet`."""
    from vitfocus.core.errors import VitfocusError
    from vitfocus.treatments.save_load import is_pushed, open_model

    if pretrained and weights is not None:
        raise VitfocusError("--weights names a file and --pretrained the library's own weights: give one of them.")
    saved = Path(name).is_dir() or is_pushed(name)
    if pretrained and saved:
        raise VitfocusError(f"{name} is a folder, which holds its weights: leave --pretrained out.")
    model = open_model(name, weights=weights, treat=treat, **({"pretrained": True} if pretrained else {}))
    if weights is None and not (pretrained or quiet or saved):
        print(
            f"Neither --weights nor --pretrained: {name} starts from random weights, an untrained model.",
            file=sys.stderr,
        )
    return model
