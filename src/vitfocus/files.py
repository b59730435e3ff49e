"""Writing files so that a crash leaves the old one or the new one, never half of either."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(target: str | Path) -> Iterator[Path]:
    """A temporary path beside the target that takes its place when the block ends well, and vanishes when it does not.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_path(folder / "a.txt") as path:
    ...     _ = path.write_text("whole")
    >>> [file.name for file in folder.iterdir()], (folder / "a.txt").read_text()
    (['a.txt'], 'whole')
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(target: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(target) as path:
        path.write_text(text, encoding="utf-8")


def write_bytes(target: str | Path, content: bytes) -> None:
    """Write a binary file atomically."""
    with atomic_path(target) as path:
        path.write_bytes(content)


def digest(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
