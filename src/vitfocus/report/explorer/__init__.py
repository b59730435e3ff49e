"""The attention explorer: point at a patch of a photograph and see what its token attends to."""

from vitfocus.report.explorer.data import (
    BUDGET,
    IMAGES,
    add_explorer,
    explore,
    explorer_data,
    size_of,
    stored,
    write_explorer,
)

__all__ = ["BUDGET", "IMAGES", "add_explorer", "explore", "explorer_data", "size_of", "stored", "write_explorer"]
