"""Fixtures that several test files share."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: "in_the_interpreter" not in item.name)


@pytest.fixture(scope="session", autouse=True)
def quick_costs() -> None:
    """Commands that end with a report time the steps of a model; here one step of each kind is enough."""
    importlib.import_module("vitfocus.report.model_card")._REPEATS = 1  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden outputs and sample data: $VITFOCUS_TEST_DATA, or `shared` beside the checkout."""
    folder = Path(os.environ.get("VITFOCUS_TEST_DATA") or Path(__file__).parents[2] / "shared")
    if not (folder / "golden").is_dir():
        pytest.skip(f"no golden data in {folder}: set VITFOCUS_TEST_DATA to the folder that holds golden/ and data/")
    return folder
