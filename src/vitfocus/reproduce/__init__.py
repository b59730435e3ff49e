"""Reproduction of every table and figure of the two papers: the rows, what is measured, and the papers' numbers."""

from __future__ import annotations

from typing import Any

from vitfocus.reproduce.items import SCALES, Item, TableRow, item_names, load_item

__all__ = ["SCALES", "Item", "TableRow", "item_names", "load_item", "reproduce"]


def __getattr__(name: str) -> Any:
    if name == "reproduce":  # torch is imported when an item is run, not when items are listed
        from vitfocus.reproduce.run import reproduce

        return reproduce
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
