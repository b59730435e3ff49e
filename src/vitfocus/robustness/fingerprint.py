"""The protocol fingerprint: everything besides the model that a number depends on, and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from PIL import features

#: Parts that two comparable runs may differ in: what is being compared, and where it ran.
FREE = ("models", "environment")


def codec() -> str:
    """What decodes image files."""
    turbo = features.version("libjpeg_turbo")
    return f"Pillow, libjpeg-turbo {turbo}" if turbo else f"Pillow, libjpeg {features.version('jpg')}"


def differences(first: Mapping[str, Any], second: Mapping[str, Any], free: tuple[str, ...] = ()) -> list[str]:
    """Where two fingerprints disagree, one short phrase each.

    >>> differences({"seed": 0, "data": {"digest": "a"}}, {"seed": 1, "data": {"digest": "a"}, "limit": 5})
    ['limit (absent | 5)', 'seed (0 | 1)']
    """
    one, two = dict(_flat(first, free)), dict(_flat(second, free))
    absent = "absent"
    return [
        f"{key} ({_short(one.get(key, absent))} | {_short(two.get(key, absent))})"
        for key in sorted(one.keys() | two.keys())
        if one.get(key, absent) != two.get(key, absent)
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flat(content: Mapping[str, Any], free: tuple[str, ...], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if not prefix and key in free:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, (), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value
