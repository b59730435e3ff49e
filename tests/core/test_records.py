"""Reading JSON of unknown origin: each wrong file is one sentence that names file and field, never a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

import vitfocus as vf
from vitfocus.core.records import Count, convert, read_json, write_json


class Inner(msgspec.Struct):
    c: Count


class Outer(msgspec.Struct):
    a: float = 0.0
    b: str | None = None
    inner: dict[str, list[Inner]] = {}
    pair: tuple[float, float] | None = None
    by_number: dict[int, float] = {}
    share: Annotated[float, msgspec.Meta(ge=0)] = 0.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": 1, "more": {}}, None),
        ({"a": float("nan")}, None),
        ({"by_number": {"1": 2}}, None),
        ({"a": True}, "a is True; expected a number"),
        ({"a": "1"}, "a is '1'; expected a number"),
        ({"b": 1}, "b is 1; expected text or null"),
        ({"inner": {"x": [], "y": [{"c": 1}, {}]}}, "inner.y[1] lacks the key 'c'"),
        ({"inner": {"x": [], "y": [0]}}, "inner.y[0] is 0; expected a table of keys and values"),
        (
            {"inner": {"x": [{"c": -1}]}},
            "inner.x[0].c is -1; expected a whole number from 0 to 9,223,372,036,854,775,807",
        ),
        ({"pair": [1]}, "pair is [1]; expected 2 values, each a number or null"),
        ({"by_number": {"two": 2}}, "by_number has a key that is not a whole number"),
        ([], "It is []; expected a table of keys and values"),
    ],
)
def test_the_wrong_field_is_named(content: Any, said: str | None) -> None:
    if said is None:
        assert isinstance(convert(content, Outer, "f.json", writer="someone"), Outer)
        return
    with pytest.raises(vf.VitfocusError) as caught:
        convert(content, Outer, "f.json", writer="someone")
    assert str(caught.value) == f"f.json was not written by someone, or was changed since: {said}."


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "Expecting ',' delimiter"),
        (b'{"b": "\xff"}', "not UTF-8"),
        ('{"b": "x"}'.encode("utf-16"), "not UTF-8"),
        (b'{"b": "\0"}', "Invalid control character"),
        (b"[" * 100_000, "nested more than 64 levels"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "nested more than 64 levels"),
        (b'{"a": ' + b"1" * 5000 + b"}", "5,000 digits"),
        (b'{"a": ' + b"1" * 21 + b"}", "21 digits"),
        (b'{"a": 1' + b" " * 2000 + b"}", "expected at most 1,024"),
    ],
)
def test_what_is_not_json_or_too_much_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "f.json"
    file.write_bytes(content)
    most = 1024 if "at most" in said else 1 << 20
    with pytest.raises(vf.VitfocusError) as caught:
        read_json(file, Outer, max_bytes=most)
    assert said in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(vf.VitfocusError, match=r"There is no .*f\.json: train it first\."):
        read_json(tmp_path / "f.json", Outer, missing="train it first")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(vf.VitfocusError, match=r"not a regular file|Is a directory"):
            read_json(place, Outer)


def test_records_are_written_and_read_back(tmp_path: Path) -> None:
    record = Outer(2.5, "x", {"k": [Inner(3)]}, (0.0, 1.0), {7: 0.5})
    write_json(tmp_path / "f.json", record)
    assert read_json(tmp_path / "f.json", Outer) == record
    assert json.loads((tmp_path / "f.json").read_text())["by_number"] == {"7": 0.5}
