"""Attacks by what lies where a file should be (a FIFO, a device, a link), and by requests to the live page."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adversarial.files import EVIL, _read_all, _targets
from adversarial.harness import Tally, damaged
from adversarial.words import NUMBERS, ODD, SMALL, tiny_folder, tiny_images
from PIL import Image

import vitfocus as vf
from vitfocus.data.classification.dataset import array_images, open_images
from vitfocus.data.segmentation.dataset import open_masks
from vitfocus.recipes import Data
from vitfocus.robustness.results import load_scores


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[Path], Any]] = {
    "a FIFO": _fifo,
    "a socket": _socket,
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
    "an empty file": lambda path: path.touch(),
    "an endless file": lambda path: path.symlink_to("/dev/zero"),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a link to memory": lambda path: path.symlink_to("/proc/self/mem"),
    "a folder's link": lambda path: path.symlink_to("."),
}


def _more_targets(folder: Path) -> Iterator[tuple[Path, Callable[[], Any], float]]:
    """Files that are not JSON or TOML: weights, images, masks, arrays and samples."""
    model = tiny_folder(folder / "weights")
    plain = vf.create_model("vit_tiny_patch16_224", **SMALL).eval()
    yield model / "model.safetensors", lambda: vf.load(model), 1
    torch.save(plain.state_dict(), folder / "weights.pt")
    yield folder / "weights.pt", lambda: vf.load_weights(plain, folder / "weights.pt"), 1
    images = tiny_images(folder / "photographs" / "train")
    one = images / "0" / "a.png"
    data = Data(source="folder", root=str(folder / "photographs"), size=16)
    yield one, lambda: _read_all(open_images(data, "train")), 1
    yield one, lambda: vf.diagnose(plain, images), 1
    yield one, lambda: vf.evaluate(plain, "clean", images, device="cpu", workers=0, progress=False), 1
    yield one, lambda: vf.diagnose(plain, [one]), 1
    masks = folder / "masks"
    for name in ("images", "masks"):
        (masks / name / "train").mkdir(parents=True)
        Image.new("L", (16, 16)).save(masks / name / "train" / "x.png")
        yield (
            masks / name / "train" / "x.png",
            lambda: _read_all(open_masks(Data(source="masks", root=str(masks), size=16), "train")),
            1,
        )
    np.savez(folder / "arrays.npz", images=np.zeros((2, 8, 8, 3), np.uint8), labels=np.array([0, 1]))
    yield folder / "arrays.npz", lambda: array_images(folder / "arrays.npz", 8), 1
    run = folder / "measured"
    vf.evaluate(plain, "clean", images, out=run, device="cpu", workers=0, progress=False)
    yield run / "samples.npz", lambda: load_scores(run), 1


def places(tally: Tally, tries: int, folder: Path) -> None:
    """Every file that is read, replaced by something else that a folder may hold."""
    draw = random.Random(tally.seed)
    targets = [*_targets(folder), *_more_targets(folder)]
    pairs = [(target, kind) for target in targets for kind in KINDS]
    draw.shuffle(pairs)
    for (file, read, _), kind in (pairs * (-(-tries // len(pairs))))[:tries]:
        aside = file.rename(file.with_name("aside"))
        try:
            KINDS[kind](file)
            tally.attempt("special files", f"{kind} as {file.relative_to(folder)}", read)
        finally:
            if file.is_dir() and not file.is_symlink():
                for left in file.iterdir():
                    left.unlink()
                file.rmdir()
            file.unlink(missing_ok=True)
            aside.rename(file)


def requests(tally: Tally, tries: int, folder: Path) -> None:
    """Requests to the live page, as anybody who can reach it may send them; none ends in an error of the server."""
    from starlette.testclient import TestClient

    from vitfocus.report.serve import create_app

    draw = random.Random(tally.seed)
    model = vf.create_model("vit_tiny_patch16_224+cb", **SMALL).eval()
    client = TestClient(create_app(model, hosts=["*"]), raise_server_exceptions=True)
    picture = folder / "a.png"
    Image.new("RGB", (20, 30), (200, 3, 4)).save(picture)
    sound = picture.read_bytes()
    known = client.post("/pictures", content=sound).json()["id"]
    words = [*NUMBERS, *ODD, *map(str, EVIL), known, "0", "1", "fog/1", "gaussian_noise/3", "fog/²", "fog/0", "fog/9"]
    words = [word for word in words if len(word) < 6000]

    def ask() -> None:
        kind = draw.randrange(4)
        word = lambda: draw.choice(words).encode("utf-8", "surrogatepass").decode("utf-8", "replace")  # noqa: E731
        headers = {"x-token": draw.choice([b"", b"x", "²".encode()])} if draw.random() < 0.2 else {}
        if kind == 0:
            name = {"name": word()} if draw.random() < 0.5 else {}
            answer = client.post("/pictures", content=damaged(sound, draw), params=name, headers=headers)
        elif kind == 1:
            keys = {"picture": draw.choice([known, word()]), "against": word()}
            answer = client.get("/look", params=keys, headers=headers)
        elif kind == 2:
            keys = {"picture": draw.choice([known, known, word()]), "against": draw.choice(["", "fog/1", word()])}
            keys |= {"model": draw.choice(["0", word()]), "layer": draw.choice(["0", "1", word()])}
            answer = client.get("/maps", params=keys, headers=headers)
        else:
            path = draw.choice(["/", "/maps", "/look", "/pictures", "/nothing", "//", "/../etc/passwd", "/%00"])
            answer = client.request(draw.choice(["GET", "POST", "PUT", "HEAD", "OPTIONS"]), path, headers=headers)
        assert answer.status_code < 500, f"status {answer.status_code}"
        if answer.status_code == 400 and answer.content and answer.headers["content-type"] == "application/json":
            assert "\n" not in answer.json()["error"].strip()

    for number in range(tries):
        tally.attempt("requests", f"no. {number}", ask)
