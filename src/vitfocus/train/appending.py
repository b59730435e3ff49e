"""Files that grow piece by piece, though the disk is full now and then."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class Appender:
    """Appends pieces to a file, whole or not at all; one that a full disk refuses is written with a later one.

    >>> import tempfile
    >>> file = Appender(Path(tempfile.mkdtemp()) / "log")
    >>> file.add(b"one ")
    >>> file.add(b"two")
    >>> file.path.read_bytes()
    b'one two'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._late: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """Append a piece, and those that are late before it."""
        self._late.append(piece)
        self.catch_up()

    def catch_up(self) -> None:
        """Append what is late, if the disk lets it."""
        with suppress(OSError):
            size = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("ab") as file:
                    file.writelines(self._late)
            except OSError:
                os.truncate(self.path, size)
                raise
            self._late.clear()
