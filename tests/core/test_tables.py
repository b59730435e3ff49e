"""Tables and sentences follow the width of a terminal, and stay whole when piped."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from vitfocus.core.tables import Table, bullet

WIDE = Table("A title", ["layer", *(f"column {index}" for index in range(8))], [["0", *"12345678"], ["1", *"abcdefgh"]])


def test_a_wide_table_continues_below_with_its_first_column() -> None:
    whole, narrow = WIDE.text(), WIDE.text(width=50)
    assert max(map(len, whole.splitlines())) > 80 and max(map(len, narrow.splitlines())) <= 50
    assert narrow.count("layer") == 3 and all(narrow.count(f"column {index}") == 1 for index in range(8))
    cells = " ".join(narrow.split())
    assert all(one in cells for one in "12345678abcdefgh")
    assert WIDE.text(width=5).count("column 7") == 1, "one column beside the first, however narrow"


def test_captions_and_paragraphs_are_wrapped() -> None:
    caption = Table("", ["a"], [["1"]], "word " * 40).text(width=40)
    assert max(map(len, caption.splitlines())) <= 40
    assert max(map(len, bullet("word " * 40, 40).splitlines())) <= 40
    assert bullet("word " * 40).count("\n") == 0


def test_a_terminal_is_asked_for_its_width() -> None:
    code = "from vitfocus.core.tables import *; print(Table('', ['a'] + ['column'] * 9, [['1'] * 10]))"
    code += "; print(bullet('w ' * 99))"
    main, side = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=side, env=os.environ | {"COLUMNS": "50", "TERM": "dumb", "NO_COLOR": "1"}
    )
    assert run.wait(60) == 0
    os.close(side)
    text = b""
    try:
        while part := os.read(main, 4096):
            text += part
    except OSError:  # the end of a pseudo-terminal
        pass
    os.close(main)
    lines = text.decode().splitlines()
    assert len(lines) > 8 and max(map(len, lines)) <= 50


def test_names_from_files_do_not_command_the_terminal() -> None:
    evil = "a\x1b[2J\x9b\u202e"
    shown = str(Table(evil, [evil, "b"], [[evil, evil]], caption=evil)) + bullet(evil)
    assert shown.count("a\\x1b[2J\\x9b\\u202e") == 6 and "\x1b" not in shown
