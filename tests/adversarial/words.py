"""Attacks by what a person or a file may say: specs, command lines, and calls with values of any type."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adversarial.harness import Tally, explore
from hypothesis import strategies as st
from PIL import Image
from torch import nn

import vitfocus as vf
from vitfocus.cli import COMMANDS, build_parser
from vitfocus.recipes import KEYS
from vitfocus.robustness.suites import SUITES
from vitfocus.train.recipe import load_recipe
from vitfocus.treatments.base import keywords
from vitfocus.treatments.spec import parse_treatments, split_spec, write_spec

SMALL = {"depth": 2, "img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "num_classes": 4}

#: Numbers as people and files should not write them.
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "99",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "²",
    "٣",
    "1_0",
    "0x1F",
    "1.5",
    "9" * 5000,
    "1" * 25,
)
NUMBERS += ("10**9", "1e-400", "00", "+1", "--1", " 3", "True", "None", "", "1e9", "2147483648", "999999999999")
WORDS = (
    "all",
    "upper",
    "upper:2",
    "upper:0",
    "upper:²",
    "upper:" + "9" * 30,
    "inner",
    "shallow",
    "deep",
    "mean",
    "mlp",
)
WORDS += (
    "scaled",
    "official",
    "paper",
    "patch",
    "image",
    "text",
    "near_identity",
    "dilation",
    "conv3",
    "each",
    "front",
)
ODD = ("", "\0", "a\0b", "\ud800", "²", "\n", "..", "/", "~", "$HOME", "*", "é" * 300, "%s", "{}", "'", '"', "[" * 2000)
ODD += ("(" * 3000, "[" * 500 + "]" * 500, "-", "--", "=", "a=b", "../../x", "con\x1b[31m", "x" * 5000, "\u202e", " ")


def specs(tally: Tally, tries: int, folder: Path) -> None:
    """Specs of models and treatments: what is accepted is written and read again as the same."""
    value = st.one_of(
        st.sampled_from([*NUMBERS, *WORDS, *ODD]),
        st.text(max_size=12),
        st.lists(st.sampled_from(NUMBERS), max_size=4).map(lambda some: f"[{','.join(some)}]"),
        st.lists(st.sampled_from(WORDS), min_size=2, max_size=3).map("&".join),
    )
    option_names = ["layers", "variant", "site", "position", "tokens", "mode", "branches", "init", "heads", "threshold"]
    option_names += ["weight", "rows", "kind", "reduction", "layer", "", "²"]
    option = st.tuples(st.sampled_from(option_names), value).map("=".join)
    part = st.one_of(
        st.sampled_from([*keywords()]),
        st.tuples(
            st.sampled_from([*keywords(), "cbb", "TAP", "", "x"]), st.lists(st.one_of(option, value), max_size=4)
        ).map(lambda named: f"{named[0]}({','.join(named[1])})"),
        st.text(max_size=20),
    )
    base = st.sampled_from(
        ["vit_tiny_patch16_224", "vit_tiny_patch16_224.augreg", "torchvision:vit_b_16", "", "nope", "²"]
    )
    spec = st.one_of(
        st.text(alphabet="cbtapdl+()[]=,&:' \0²0123456789.-", max_size=60),
        st.tuples(base, st.lists(part, max_size=4)).map(lambda both: "+".join([both[0], *both[1]])),
        st.sampled_from(ODD),
    )
    model = vf.create_model("vit_tiny_patch16_224", **SMALL)
    count = 0

    def check(text: str) -> None:
        nonlocal count
        count += 1

        def read() -> None:
            name, treatments = split_spec(text)
            assert split_spec(write_spec(name, treatments)) == (name, treatments), "another spec is written"
            if count % 4 == 0 and treatments:
                try:
                    vf.treat_(model, *treatments)
                finally:
                    vf.untreat_(model)

        tally.attempt("specs", repr(text)[:200], read)
        if count % 5 == 0:
            tally.attempt("specs", f"treatments {text!r}"[:200], lambda: parse_treatments(text))

    explore(spec, -(-tries * 5 // 6), tally.seed, check)


def command_lines(tally: Tally, tries: int, folder: Path) -> None:
    """Commands with options that exist and values that make no sense, on tiny models and images."""
    model, images = tiny_folder(folder / "model"), tiny_images(folder / "images")
    paths = [
        str(model),
        str(images),
        str(folder / "nothing"),
        "/dev/null",
        "/proc/self/mem",
        "\0",
        "",
        "x" * 300,
        "~nobody/x",
    ]
    flags = {
        name: [flag for action in build_parser(name)[0]._actions for flag in action.option_strings if flag != "-h"]
        for name in COMMANDS
    }
    values = st.one_of(
        st.sampled_from([*paths, *NUMBERS, *WORDS, *(odd for odd in ODD if odd != "/"), "cb", "tap", "adl", "clean"]),
        st.sampled_from([*SUITES, "list", "gaussian_noise/3", "gaussian_noise/99", "none", "cpu", "cuda:99", "meta"]),
        st.sampled_from(
            [f"{key}={value}" for key in (*KEYS, "nope", "") for value in ("", "-1", "²", "nan", "x", "[")]
        ),
        st.text(alphabet="abc=./,:²-", max_size=8).filter(lambda text: not text.startswith("/")),
    )
    small = {
        "diagnose": [[str(model), "--images", str(images)], [str(model), "--limit", "1"]],
        "evaluate": [
            [str(model), "--suite", "clean", "--data", str(images), "--limit", "2"],
            ["--suite", "list"],
            [str(model)],
        ],
        "report": [[str(model)], [str(images)]],
        "models": [["deit_tiny*"], [str(model)]],
        "train": [[], ["shapes", "nope=1", "--out", str(folder / "run")], ["nope"]],
        "reproduce": [["--list"], ["cb/table4a", "--count", "--rows", "1"], ["nope"]],
        "bench": [
            [str(model), "--rounds", "1", "--device", "cpu", "--batch-size", "1", "--treat", "cb", "--mode", "infer"]
        ],
        "demo": [["--epochs", "0"], ["--nope"]],
        "completion": [["bash"], ["csh"]],
        "serve": [[str(model), "--no-browser", "--limit", "1"], [str(model), "--no-browser", "--images", str(images)]],
    }

    @st.composite
    def command(draw: Any) -> list[str]:
        name = draw(st.sampled_from([*COMMANDS]))
        words = list(draw(st.sampled_from(small.get(name, [["--nope"]]))))
        for _ in range(draw(st.integers(0, 3))):
            extra = [draw(st.sampled_from(flags[name]))] if draw(st.booleans()) else []
            if "--compile" in extra or "--pretrained" in extra or "--help" in extra:
                continue
            if draw(st.booleans()) or not extra:
                extra.append(draw(values))
            place = draw(st.integers(0, len(words)))
            words[place:place] = extra
        if name in ("train", "demo") and not any(
            word.startswith("--nope") or word in ("nope", "nope=1", "0") for word in words
        ):
            words.append("--nope")  # these take long if they are right
        return [draw(st.sampled_from([name] * 30 + ["", "diagnos", "--", "\0"])), *words]

    from adversarial.folders import serve_nothing

    with pytest.MonkeyPatch.context() as monkeypatch:
        serve_nothing(monkeypatch)
        explore(command(), tries, tally.seed, lambda words: tally.command("command lines", words))


def overrides(tally: Tally, tries: int, folder: Path) -> None:
    """Recipes changed by key=value."""
    keys = st.one_of(
        st.sampled_from([*KEYS]), st.sampled_from([key.split(".")[1] for key in KEYS]), st.text(max_size=8)
    )
    values = st.one_of(
        st.sampled_from([*NUMBERS, *WORDS, *ODD, "[1,2]", "{a=1}", "[" * 300, "{a=" * 300, "'x", "true", "1979-05-27"]),
        st.text(max_size=10),
    )
    pairs = st.lists(st.tuples(keys, values).map("=".join), min_size=1, max_size=3)
    explore(
        st.tuples(st.sampled_from(["shapes", "deit_s", "finetune", "nope", ""]), pairs),
        tries,
        tally.seed,
        lambda one: tally.attempt("overrides", repr(one)[:200], lambda: load_recipe(one[0], one[1])),
    )


def things(folder: Path) -> list[Any]:
    """Values of many types, none of which fits everywhere."""
    image = torch.rand(2, 3, 16, 16)
    return [
        *(
            None,
            True,
            False,
            0,
            -1,
            1,
            3,
            2**63,
            10**400,
            1.5,
            float("nan"),
            float("inf"),
            2j,
            b"",
            b"x",
            object(),
            type,
            len,
        ),
        *(
            "",
            "x",
            "\0",
            "\ud800",
            "x" * 5000,
            "cb",
            "all",
            [],
            [None],
            [0],
            [-1],
            [99],
            [[0]],
            ["x"],
            (),
            {},
            {"a": 1},
            {1: 2},
            set(),
            range(3),
        ),
        *(
            image,
            image[0],
            image[:0],
            image.int(),
            image.to(torch.uint8),
            image.bool(),
            image.to(torch.complex64),
            -image,
        ),
        *(image.to("meta"), image.to_sparse(), image.double(), image.half(), image * float("nan"), image * 1e30),
        *(torch.nested.nested_tensor([image[0]]), image.to_mkldnn(), image.to(torch.float8_e4m3fn), image[None]),
        *(image[:, :1], image[..., :1], image[..., :5], torch.tensor(3), torch.zeros(0), image.requires_grad_()),
        torch.zeros(1).expand(2, 3, 3000, 3000),
        *(
            np.zeros((2, 16, 16, 3), np.uint8),
            np.zeros((16, 16, 3)),
            np.array("x"),
            np.array([object()]),
            np.float32(2),
        ),
        *(Image.new("RGB", (16, 16)), Image.new("L", (1, 1)), [Image.new("P", (3, 5))]),
        *(nn.Linear(2, 2), nn.Identity(), nn.Sequential(), nn.Module, nn.ModuleList()),
        *(
            folder,
            folder / "nothing",
            str(folder / "images"),
            Path("/dev/null"),
            slice(0, 1),
            iter([]),
            (one for one in [image]),
        ),
        *(torch.device("cpu"), torch.float16, [image], [(image, torch.tensor([0, 99]))], [(image, [0])], {"x": image}),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(image, torch.tensor([0, 1])), batch_size=1),
    ]


def calls(tally: Tally, tries: int, folder: Path) -> None:
    """The public functions with values of any type in the place of one or two of their arguments."""
    draw = random.Random(tally.seed)
    tiny_images(folder / "images")
    values = things(folder)
    image = torch.rand(2, 3, 16, 16)
    model = vf.create_model("vit_tiny_patch16_224+cb", **SMALL).eval()
    plain = vf.create_model("vit_tiny_patch16_224", **SMALL).eval()

    def treat(model: Any = plain, treatment: Any = "cb") -> None:
        try:
            vf.treat_(model, treatment)
        finally:
            vf.untreat_(plain)

    def untreat(model: Any = None) -> None:
        vf.untreat_(model if model is not None else plain)

    def untreated(model: Any = model) -> None:
        with vf.untreated(model):
            pass

    data = torch.utils.data.TensorDataset(image, torch.tensor([0, 1]))
    out = folder / "saved"
    functions: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "create_model": (vf.create_model, {"spec": "vit_tiny_patch16_224", **SMALL}),
        "treat_": (treat, {"model": plain, "treatment": "cb"}),
        "untreat_": (untreat, {"model": plain}),
        "untreated": (untreated, {"model": model}),
        "applied": (vf.applied, {"model": model}),
        "auxiliary_loss": (vf.auxiliary_loss, {"model": model}),
        "anatomy": (vf.anatomy, {"model": model}),
        "attention_maps": (
            vf.attention_maps,
            {
                "model": model,
                "images": image,
                "layers": [-1],
                "heads": None,
                "queries": None,
                "batch_size": 1,
                "limit": 2**20,
            },
        ),
        "diagnose": (
            vf.diagnose,
            {"model": model, "images": image, "against": None, "layers": None, "batch_size": 2, "seed": 0, "name": "x"},
        ),
        "corrupt": (
            vf.corrupt,
            {
                "images": image,
                "name": "fog",
                "severity": 1,
                "seed": 0,
                "ids": None,
                "flavour": "imagenet",
                "frost": None,
            },
        ),
        "evaluate": (
            vf.evaluate,
            {"model": model, "suite": "clean", "data": data, "device": "cpu", "batch_size": 2, "limit": 2, "seed": 0}
            | {"out": None, "resume": False, "workers": 0, "precision": "float32", "progress": False},
        ),
        "explore": (
            vf.explore,
            {"models": model, "images": image, "against": None, "out": folder / "page.html", "title": "x"},
        ),
        "save": (vf.save, {"model": model, "folder": out, "only": "all", "base": None, "arguments": None}),
        "load": (vf.load, {"folder": tiny_folder(folder / "model"), "onto": None}),
        "load_weights": (
            vf.load_weights,
            {"model": model, "source": model.state_dict(), "strict": True, "treat": False},
        ),
        "open_model": (vf.open_model, {"name": str(folder / "model"), "weights": None, "treat": None}),
        "report": (vf.report, {"out": folder / "report.html", "title": "x", "about": ""}),
        "Diagnosis": (vf.Diagnosis.load, {"folder": folder}),
    }
    for treatment in {kind for kind, _ in keywords().values()}:
        fields = {field.name: field.default for field in dataclasses.fields(treatment)}
        functions[treatment.__name__] = (treatment, fields)
    names = [*functions]
    for _ in range(tries):
        name = draw.choice(names)
        function, arguments = functions[name]
        given = dict(arguments)
        changed = draw.sample([*arguments], k=min(len(arguments), draw.choice((1, 1, 2))))
        for key in changed:
            given[key] = draw.choice(values)
        said = ", ".join(f"{key}={described(given[key])}" for key in changed)
        tally.attempt("calls", f"{name}({said})", lambda function=function, given=given: function(**given))


def described(value: Any) -> str:
    """A value in the name of an attempt."""
    if isinstance(value, torch.Tensor):
        shape = "nested" if value.is_nested else list(value.shape)
        return f"{value.dtype} {shape} {value.layout} {value.device}"
    try:
        return repr(value)[:80].replace("\n", " ")
    except Exception:
        return type(value).__name__


def tiny_folder(folder: Path) -> Path:
    """A saved model of four classes and images of 16 pixels."""
    if not folder.exists():
        vf.save(vf.create_model("vit_tiny_patch16_224+cb", **SMALL), folder)
    return folder


def tiny_images(folder: Path) -> Path:
    """Class folders with one image each."""
    for number in range(4):
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (60 * number, 0, 0)).save(folder / str(number) / "a.png")
    return folder
