"""Progress on stderr where there is no terminal: the first line, lines after some time, the final line, silence."""

from __future__ import annotations

import pytest

from vitfocus.core.progress import Progress


def test_lines_elsewhere_than_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("fog", 4, done=1, announcement="fog, 3 images.", every=0.0) as progress:
        progress.advance(1, "severity 1")
        progress.advance()
        progress.say("half way")
        progress.update(4, "severity 2")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fog, 3 images." and lines[3:] == ["half way", "fog: 4 of 4 (severity 2)"]
    assert lines[1].startswith("fog: 2 of 4, 0:00:0") and lines[1].endswith(" left (severity 1)")
    assert lines[2].startswith("fog: 3 of 4, ") and lines[2].endswith("(severity 1)")


def test_few_lines_and_none_where_it_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("fog", 4) as progress:
        for _ in range(4):
            progress.advance()
    with Progress("fog", 4, announcement="fog", every=0.0, show=False) as progress:
        progress.advance(4, "all")
        progress.say("done")
    assert capsys.readouterr().err == ""


def test_text_from_files_neither_commands_the_terminal_nor_is_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("fog", 4) as progress:
        progress.say("\x1b]0;evil\x07")
    assert capsys.readouterr().err == "\\x1b]0;evil\\x07\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress("[/evil]", 4) as progress:
        progress.advance(1, "[/note]")
    assert "[/evil]" in capsys.readouterr().err
