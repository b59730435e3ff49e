"""Names that a lower room looks up and a higher room provides, so that imports keep to one direction.

A higher room registers where an object lives, as text; it is imported when it is first asked for. This module and the
rooms' `__init__` that fill it import nothing heavy.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any


class LazyRegistry(Mapping[str, Any]):
    """A mapping from names to objects that are imported on first use.

    >>> shapes = LazyRegistry()
    >>> shapes.register("circle", "math:pi")
    >>> list(shapes), round(shapes["circle"], 2)
    (['circle'], 3.14)
    """

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}

    def register(self, name: str, target: str) -> None:
        """Make an object known by a name; `target` is "module:attribute"."""
        self._targets[name] = target

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = self._targets[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


#: Models built on a vision transformer: the prefix of a spec ("upernet:vit_tiny_patch16_224") and the function
#: `(name, pretrained, arguments)` that builds the model. `name` is what follows the colon, usually a timm model;
#: arguments that the head does not take go to that backbone.
COMPOSED_MODELS = LazyRegistry()
