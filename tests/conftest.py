"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden outputs and sample data: $VITFOCUS_TEST_DATA, or `shared` beside the checkout."""
    folder = Path(os.environ.get("VITFOCUS_TEST_DATA") or Path(__file__).parents[2] / "shared")
    if not (folder / "golden").is_dir():
        pytest.skip(f"no golden data in {folder}: set VITFOCUS_TEST_DATA to the folder that holds golden/ and data/")
    return folder
