"""Attacks by files: JSON and TOML of every reader, archives, weights, images and shards, damaged or made to deceive."""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import os
import pickle
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adversarial.harness import Tally, damaged
from adversarial.words import SMALL, tiny_folder, tiny_images
from PIL import Image
from safetensors.torch import load_file, save_file

import vitfocus as vf
from vitfocus.core.files import digest
from vitfocus.data.classification.dataset import array_images, open_images
from vitfocus.data.detection.dataset import open_detections
from vitfocus.data.image_files import read_rgb
from vitfocus.data.loader import read_or_broken
from vitfocus.data.segmentation.dataset import open_masks
from vitfocus.data.shapes.layouts import write_layout
from vitfocus.data.vqa.dataset import open_questions
from vitfocus.recipes import Data
from vitfocus.report.model_card import read_cards
from vitfocus.report.runs import find_runs
from vitfocus.robustness.classification import read_index
from vitfocus.robustness.results import compare, load_scores
from vitfocus.train.checkpoint import Checkpoint, Checkpoints, OptimiserState, RunRecord, RunState, read_checkpoint
from vitfocus.train.recipe import load_recipe

EVIL: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        1.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "²",
        "\0",
        "\ud800",
    ),
    *("../../../x", "/dev/zero", "nan", "1", "-1", "x" * 10_000, [], {}, [[]], [None], {"": {}}, ["x"] * 1000, [0] * 3),
    *(
        {"__class__": "x"},
        {"$ref": "#"},
        "\x1b]0;evil\x07",
        "\x9b2J",
        "os.system",
        "hf-hub:someone/evil",
        "cb",
        "<script>alert(1)</script>",
    ),
]
#: Text in the place of a value of a JSON file, which `json.dumps` does not write.
RAW = [
    "1" * 5000,
    "[" * 3000,
    '{"a":' * 3000,
    "1e99999",
    "-",
    "01",
    "NaN",
    "Infinity",
    "'x'",
    "\\",
    '"\\ud800"',
    "1" * 30,
]


def changed(content: Any, draw: random.Random) -> Any:
    """A copy in which one place holds another value, is gone, is renamed, or holds too much."""
    content = copy.deepcopy(content)
    parent, key = None, None
    node = content
    while isinstance(node, dict | list) and node and (parent is None or draw.random() < 0.8):
        parent, key = node, draw.choice([*node]) if isinstance(node, dict) else draw.randrange(len(node))
        node = parent[key]
    if parent is None:
        return draw.choice(EVIL)
    kind = draw.randrange(6)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[draw.choice(["", "x", "²", "\0", f"{key}s", "trust_remote_code"])] = parent.pop(key)
    elif kind == 2:
        parent[key] = [parent[key]]
    elif kind == 3:
        parent[key] = {"x": parent[key]}
    else:
        parent[key] = draw.choice(EVIL)
    return content


def hostile_json(text: str, draw: random.Random) -> bytes:
    """JSON (or lines of it) with a changed structure, with text that is not JSON, or with damaged bytes."""
    kind = draw.random()
    if kind < 0.25:
        return damaged(text.encode(), draw)
    lines = text.strip().split("\n") if text.lstrip()[:1] != "[" and text.count("\n{") else [text]
    place = draw.randrange(len(lines))
    content = json.loads(lines[place])
    for _ in range(draw.choice((1, 1, 2))):
        content = changed(content, draw)
    made = json.dumps(content)
    if kind > 0.9:
        marks = [index for index, character in enumerate(made) if character in ":,["] or [0]
        at = draw.choice(marks) + 1
        made = made[:at] + draw.choice(RAW) + made[at:]
    lines[place] = made
    return "\n".join(lines).encode("utf-8", errors="surrogatepass")


def records(tally: Tally, tries: int, folder: Path) -> None:
    """Every JSON and TOML file that a command reads, through its reader."""
    draw = random.Random(tally.seed)
    targets = [*_targets(folder)]
    for number in range(tries):
        file, read, cost = draw.choice(targets)
        if draw.random() > cost:
            file, read, cost = draw.choice([one for one in targets if one[2] == 1])
        sound = file.read_bytes()
        text = sound.decode()
        made = hostile_toml(text, draw) if file.suffix == ".toml" else hostile_json(text, draw)
        file.write_bytes(made)
        try:
            tally.attempt("JSON and TOML", f"{file.relative_to(folder)} no. {number}: {made[:80]!r}", read)
        finally:
            file.write_bytes(sound)


def hostile_toml(text: str, draw: random.Random) -> bytes:
    """TOML in which a line has another value or key, is doubled, or in which bytes are damaged."""
    if draw.random() < 0.3:
        return damaged(text.encode(), draw)
    lines = text.split("\n")
    place = draw.randrange(len(lines))
    key = lines[place].partition("=")[0]
    values = [json.dumps(one) for one in EVIL if not isinstance(one, float) or one == one] + RAW
    values += ["1979-05-27", "0x10", "[1, [2]]", "{a = 1}", "'''x", "inf", "nan", "-nan", "[" * 500 + "]" * 500]
    kind = draw.randrange(4)
    if kind == 0:
        lines[place] = f"{key}= {draw.choice(values)}"
    elif kind == 1:
        lines.insert(
            place, draw.choice(["[data]", "[[data]]", "extends = 3", 'extends = "x"', "x.y.z = 1", "= 1", "[a.b.c]"])
        )
    elif kind == 2:
        lines.insert(place, lines[place])
    else:
        lines[place] = lines[place].replace(
            *draw.choice([('"', ""), ("=", ""), ("1", "²"), ("[", "[["), ("true", "yes")])
        )
    return "\n".join(lines).encode("utf-8", errors="surrogatepass")


def _targets(folder: Path) -> Iterator[tuple[Path, Callable[[], Any], float]]:
    """File, reader, and how often a slow reader is chosen."""
    model = tiny_folder(folder / "model")
    yield model / "config.json", lambda: vf.load(model), 1
    recipe = folder / "recipe.toml"
    recipe.write_text(load_recipe("shapes").to_toml())
    yield recipe, lambda: load_recipe(recipe), 1
    images = tiny_images(folder / "images")
    plain = vf.create_model("vit_tiny_patch16_224", **SMALL).eval()
    runs = [folder / "evaluated-a", folder / "evaluated-b"]
    for run in runs:
        vf.evaluate(plain, "clean", images, out=run, device="cpu", workers=0, progress=False)
        yield run / "results.json", lambda run=run: str(load_scores(run).table()), 1
        yield run / "results.json", lambda: str(compare(*runs)), 1
        yield run / "results.json", lambda run=run: vf.report(run, out=folder / "page.html"), 0.1
        yield (
            run / "protocol.json",
            lambda run=run: vf.evaluate(
                plain, "clean", images, out=run, resume=True, device="cpu", workers=0, progress=False
            ),
            0.3,
        )
    found = vf.diagnose(plain, torch.rand(2, 3, 16, 16))
    found.save(folder / "diagnosed")
    yield folder / "diagnosed" / "diagnosis.json", lambda: str(vf.Diagnosis.load(folder / "diagnosed").table()), 1
    yield (
        folder / "diagnosed" / "diagnosis.json",
        lambda: vf.report(folder / "diagnosed", out=folder / "page.html"),
        0.1,
    )
    from vitfocus.report.model_card import write_cards

    write_cards(runs[0], {"vit": plain})
    yield runs[0] / "card.json", lambda: read_cards(runs[0]), 1
    yield runs[0] / "card.json", lambda: vf.report(runs[0], out=folder / "page.html"), 0.1
    trained = folder / "trained"
    trained.mkdir()
    (trained / "config.toml").write_text(load_recipe("shapes").to_toml())
    rows = [{"kind": "train", "step": step, "epoch": step / 2, "loss": 1.0, "lr": 0.1} for step in range(1, 5)]
    rows.append({"kind": "eval", "step": 4, "epoch": 2.0, "top1": 50.0, "loss": 1.0})
    (trained / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (trained / "results.json").write_text(
        json.dumps({"finished": True, "steps": 4, "best": rows[-1], "train_images": 8})
    )
    for name in ("config.toml", "metrics.jsonl", "results.json"):
        yield trained / name, lambda: find_runs(trained), 1
        yield trained / name, lambda: vf.report(trained, out=folder / "page.html"), 0.1
    index = folder / "index.json"
    index.write_text(json.dumps({"0": ["n01440764", "tench"], "1": ["n01443537", "goldfish"]}))
    yield index, lambda: read_index(index), 1
    coco = write_layout(folder / "coco", "coco", 3, val_count=2, size=32)
    for file in sorted(coco.rglob("*.json")):
        split = "train" if "train" in file.name else "val"
        yield file, lambda split=split: _read_all(open_detections(Data(source="coco", root=str(coco)), split)), 0.5
    vqa = write_layout(folder / "vqa", "vqav2", 3, val_count=2, size=32)
    for file in sorted(vqa.rglob("*.json")):
        split = "train" if "train" in file.name else "val"
        yield file, lambda split=split: open_questions(Data(source="vqav2", root=str(vqa)), split).questions, 0.5
    yield _state(folder / "checkpoints"), lambda: read_checkpoint(folder / "checkpoints" / "00000001"), 1


def _state(folder: Path) -> Path:
    state = RunState(1, "[engine]\nseed = 1\n", 88, RunRecord(), {}, OptimiserState([{"params": ["a"]}], {}))
    Checkpoints(folder).write(Checkpoint(state, {"model/a": torch.zeros(3)}))
    return folder / "00000001" / "state.json"


def _read_all(dataset: Any) -> None:
    for index in range(len(dataset)):
        read_or_broken(dataset, index)


def archives(tally: Tally, tries: int, folder: Path) -> None:
    """Weights and arrays: damaged, pickled, of other types, and with names that do not belong there."""
    draw = random.Random(tally.seed)
    model = tiny_folder(folder / "model")
    plain = vf.create_model("vit_tiny_patch16_224", **SMALL).eval()
    marker = folder / "marker"
    tally.marker = marker
    weights, torch_file, arrays = model / "model.safetensors", folder / "weights.pt", folder / "arrays.npz"
    torch.save(plain.state_dict(), torch_file)
    np.savez(arrays, images=np.zeros((2, 8, 8, 3), np.uint8), labels=np.array([0, 1]))
    config = json.loads((model / "config.json").read_text())
    tensors = load_file(weights)
    evaluated = folder / "evaluated"
    vf.evaluate(plain, "clean", tiny_images(folder / "images"), out=evaluated, device="cpu", workers=0, progress=False)
    samples = evaluated / "samples.npz"

    def reread() -> None:
        """With the right checksum: the attacker can compute it too."""
        (model / "config.json").write_text(json.dumps({**config, "sha256": digest(weights)}))
        vf.load(model)

    for number in range(tries):
        kind = draw.randrange(7)
        what = f"no. {number}, kind {kind}"
        if kind == 0:
            weights.write_bytes(damaged(weights.read_bytes(), draw))
            tally.attempt("archives", f"model.safetensors {what}", reread)
        elif kind == 1:
            other = dict(tensors)
            name = draw.choice([*other])
            other[name] = draw.choice(
                [
                    *(other[name].to(dtype) for dtype in (torch.int32, torch.bool, torch.float64, torch.bfloat16)),
                    *(
                        torch.zeros(0),
                        torch.zeros(1),
                        torch.full_like(other[name].float(), float("nan")),
                        other[name][None],
                    ),
                ]
            )
            if draw.random() < 0.3:
                other[draw.choice(["x", "", "blocks.99.x", "../x"])] = other.pop(name)
            save_file(other, weights)
            tally.attempt("archives", f"tensors {what}", reread)
        elif kind == 2:
            sound = torch_file.read_bytes()
            torch_file.write_bytes(damaged(sound, draw))
            tally.attempt("archives", f"weights.pt {what}", lambda: vf.load_weights(plain, torch_file))
            torch_file.write_bytes(sound)
        elif kind == 3:
            torch_file.write_bytes(_payload(marker, draw))
            tally.attempt("archives", f"pickle {what}", lambda: vf.load_weights(plain, torch_file))
            torch.save(plain.state_dict(), torch_file)
        elif kind == 4:
            sound = arrays.read_bytes()
            arrays.write_bytes(damaged(sound, draw))
            tally.attempt("archives", f"arrays {what}", lambda: array_images(arrays, 8))
            arrays.write_bytes(sound)
        elif kind == 5:
            sound = samples.read_bytes()
            if draw.random() < 0.5:
                samples.write_bytes(damaged(sound, draw))
            else:
                names = ["|||", "²"]
                names += [
                    f"{one}|vit_tiny_patch16_224|{key}" for one in ("clean", "x") for key in ("top1", "flip", "x")
                ]
                with samples.open("wb") as file:
                    np.savez(file, **{draw.choice(names): one for one in _odd_arrays(draw).values()}, allow_pickle=True)
            tally.attempt("archives", f"samples.npz {what}", lambda: str(compare(evaluated, evaluated)))
            samples.write_bytes(sound)
        else:
            path = folder / "odd.npz"
            with path.open("wb") as file:
                np.savez(file, **_odd_arrays(draw), allow_pickle=True)
            tally.attempt("archives", f"odd arrays {what}", lambda path=path: array_images(path, 8))
        save_file(tensors, weights)
        (model / "config.json").write_text(json.dumps(config))
    tally.marker = None


class _Evil:
    def __init__(self, call: Any, argument: str) -> None:
        self.call, self.argument = call, argument

    def __reduce__(self) -> Any:
        return self.call, (self.argument,)


def _payload(marker: Path, draw: random.Random) -> bytes:
    call, argument = draw.choice(
        [(os.system, f"touch {marker}"), (eval, f"open({str(marker)!r}, 'w')"), (exec, f"open({str(marker)!r}, 'w')")]
    )
    content: Any = draw.choice([_Evil(call, argument), {"a": _Evil(call, argument)}, [_Evil(call, argument)], {}])
    if content == {}:
        content["model"] = content  # without end
    stream = io.BytesIO()
    kind = draw.randrange(3)
    if kind == 0:
        torch.save(content, stream)
    elif kind == 1:
        torch.save(content, stream, _use_new_zipfile_serialization=False)
    else:
        pickle.dump(content, stream, protocol=draw.randrange(5))
    return stream.getvalue()


def _odd_arrays(draw: random.Random) -> dict[str, Any]:
    images = [
        np.zeros((2, 8, 8, 3), np.uint8),
        *(np.zeros(shape) for shape in ((), (0,), (2,), (0, 8, 8, 3), (2, 8, 8, 4), (2, 0, 0, 3), (2, 8, 8, 3))),
        np.array([object()]),
        np.array(["x"]),
        np.zeros((2, 8, 8, 3), complex),
    ]
    labels = [
        np.array(one)
        for one in ([0, 1], [0], [], [-1, 5], [0.5, 1], ["a", "b"], [2**62, 0], [[0], [1]], 3, [np.nan, 0])
    ]
    made = {"images": draw.choice(images), "labels": draw.choice(labels)}
    if draw.random() < 0.3:
        made["classes"] = draw.choice([np.array(["a", "b"]), np.array([1]), np.array([]), np.array(["a\0"])])
    if draw.random() < 0.2:
        del made[draw.choice([*made])]
    return made


FORMATS = {
    "png": "PNG",
    "jpg": "JPEG",
    "gif": "GIF",
    "webp": "WEBP",
    "bmp": "BMP",
    "tif": "TIFF",
    "ppm": "PPM",
    "jpeg": "AVIF",
}


def images(tally: Tally, tries: int, folder: Path) -> None:
    """Images in every format, damaged, cut off, of odd modes and sizes, or of another format than the name says."""
    draw = random.Random(tally.seed)
    place = folder / "images" / "train" / "a"
    place.mkdir(parents=True)
    masks = folder / "masks"
    for name in ("images", "masks"):
        (masks / name / "train").mkdir(parents=True)
    model = vf.create_model("vit_tiny_patch16_224", **SMALL).eval()
    noise = np.random.default_rng(0).integers(0, 255, (24, 20, 4), np.uint8)
    modes = {
        mode: Image.fromarray(noise, "RGBA").convert(mode)
        for mode in ("RGB", "L", "RGBA", "P", "1", "CMYK", "LA", "F", "I")
    }
    modes |= {"I;16": Image.fromarray(noise[..., 0].astype(np.uint16) * 257), "tiny": Image.new("RGB", (1, 1))}
    modes |= {"long": Image.new("RGB", (3000, 1)), "none": Image.new("RGB", (20, 24))}
    encoded = []
    for suffix, kind in FORMATS.items():
        for name, image in modes.items():
            stream = io.BytesIO()
            try:
                image.save(stream, kind)
            except (OSError, KeyError, ValueError):
                continue
            encoded.append((suffix, name, stream.getvalue()))
    bomb = (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (2**31 - 1).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00" + bytes(4)
    )
    encoded.append(("png", "bomb", bomb))
    for number in range(tries):
        suffix, name, content = draw.choice(encoded)
        if draw.random() < 0.2:
            suffix = draw.choice([*FORMATS])
        made = content if draw.random() < 0.1 else damaged(content, draw)
        file = place / f"x.{suffix}"
        what = f"{name}.{suffix} no. {number}"
        kind = draw.random()
        if kind < 0.5:
            file.write_bytes(made)
            data = Data(source="folder", root=str(folder / "images"), size=16)
            tally.attempt("images", what, lambda data=data: _read_all(open_images(data, "train")))
        elif kind < 0.8:
            file.write_bytes(made)
            root = folder / "images" / "train"
            tally.attempt(
                "images",
                f"evaluate {what}",
                lambda root=root: vf.evaluate(model, "clean", root, device="cpu", workers=0, progress=False),
            )
        elif kind < 0.85:
            file.write_bytes(made)
            tally.command("images", ["models", str(file)])
        else:
            (masks / "images" / "train" / "x.png").write_bytes(encoded[0][2])
            mask = masks / "masks" / "train" / "x.png"
            mask.write_bytes(made)
            data = Data(source="masks", root=str(masks), size=16)
            tally.attempt("images", f"mask {what}", lambda data=data: _read_all(open_masks(data, "train")))
            mask.unlink()
        file.unlink(missing_ok=True)
        if number % 10 == 0:
            (folder / "one.png").write_bytes(made)
            tally.attempt("images", f"frost {what}", lambda: _is_unreadable(folder / "one.png"))


def _is_unreadable(path: Path) -> None:
    from vitfocus.data.image_files import UNREADABLE

    with contextlib.suppress(UNREADABLE):
        read_rgb(path)


def shards(tally: Tally, tries: int, folder: Path) -> None:
    """Shards: damaged and compressed archives, wrong labels, odd names, damaged indexes and class files."""
    draw = random.Random(tally.seed)
    folder = folder / "shards"
    folder.mkdir(exist_ok=True)
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    picture = stream.getvalue()
    labels = [
        "0",
        "1",
        "-1",
        "-100",
        "1.9",
        "",
        "²",
        "9" * 5000,
        "x",
        "\0",
        "None",
        "99999",
        " 1\n",
        "0x1",
        "1e3",
        "true",
    ]
    objects = [
        '{"label": 1}',
        '{"label": -1}',
        '{"label": 1.9}',
        '{"label": "1"}',
        "{}",
        "[]",
        "[" * 3000,
        '{"label": true}',
    ]
    names = ["0001", "a/b", "..", "../x", "/x", "", ".hidden", "²", "x" * 90, "a.b", "\ud800"]
    for number in range(tries):
        members = []
        for sample in range(draw.randrange(1, 4)):
            name = draw.choice(names) if draw.random() < 0.3 else f"{sample:04d}"
            label = (
                (draw.choice(["cls", "CLS"]), draw.choice(labels))
                if draw.random() < 0.6
                else ("json", draw.choice(objects))
            )
            label = label if draw.random() < 0.6 else ("cls", "1")
            members += [
                (f"{name}.{draw.choice(['png', 'png', 'jpg'])}", picture),
                (f"{name}.{label[0]}", label[1].encode()),
            ]
        if draw.random() < 0.1:
            members.pop(draw.randrange(len(members)))
        content = _tar(members, draw)
        kind = draw.random()
        if kind < 0.4:
            content = damaged(content, draw)
        elif kind < 0.5:
            content = gzip.compress(content)
            content = content if draw.random() < 0.5 else content[: draw.randrange(len(content))]
        for old in folder.iterdir():
            old.unlink()
        (folder / "train-0000.tar").write_bytes(content)
        if draw.random() < 0.2:
            (folder / "classes.txt").write_bytes(
                draw.choice([b"a\nb\n", b"", b"\xff\n", b"a", b"\0\n" * 5, b"x" * 10**6])
            )
        pattern = draw.choice(
            ["", "", "", "", "train-{0000..0001}.tar", "train-{0..99999999999}.tar", "train-{²..3}.tar", "{", "["]
        )
        pattern = (
            pattern
            if draw.random() < 0.9
            else draw.choice(["{0..9}" * 9, "**/*", "/x", "..", "\0", "{9..0}", "{" + "1" * 5000 + "..2}"])
        )

        def read(pattern: str = pattern) -> None:
            found = open_images(Data(source="shards", root=str(folder), train_split=pattern), "train")
            _read_all(found)
            found.digest()

        tally.attempt("shards", f"no. {number} {pattern[:40]!r}", read)
        index = folder / "train-0000.index.json"
        if index.is_file() and draw.random() < 0.5:
            index.write_bytes(hostile_json(index.read_text(), draw))
            tally.attempt("shards", f"index no. {number}", read)


def _tar(members: list[tuple[str, bytes]], draw: random.Random) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=draw.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if draw.random() < 0.05:
                info.type, info.linkname, info.size = draw.choice((tarfile.SYMTYPE, tarfile.LNKTYPE)), "/etc/passwd", 0
            try:
                tar.addfile(info, io.BytesIO(content))
            except (UnicodeEncodeError, ValueError):
                continue
    return stream.getvalue()
