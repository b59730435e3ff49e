"""Recipes: TOML that says everything about a run, checked key by key.

A recipe may stand on another (`extends = "deit_s"`); every value can be overridden as key=value, the key dotted
("data.batch") or just its last part where that is unambiguous ("batch"); `unused.py` says which would do nothing. What
results is one frozen record.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.tasks import TASKS
from vitfocus.train.recipe_sections import (
    Answer,
    Augment,
    Data,
    Detect,
    Distill,
    Engine,
    Loss,
    Model,
    Optimiser,
    Schedule,
    Segment,
)
from vitfocus.train.unused import refuse_unused


@dataclass(frozen=True)
class Recipe:
    """A whole run, resolved. `to_toml` writes it so that `load_recipe` reads the same record again."""

    name: str = "recipe"
    about: str = ""
    task: str = "classify"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    loss: Loss = field(default_factory=Loss)
    optimiser: Optimiser = field(default_factory=Optimiser)
    schedule: Schedule = field(default_factory=Schedule)
    distill: Distill = field(default_factory=Distill)
    engine: Engine = field(default_factory=Engine)
    segment: Segment = field(default_factory=Segment)
    detect: Detect = field(default_factory=Detect)
    answer: Answer = field(default_factory=Answer)

    def to_toml(self) -> str:
        """The recipe as TOML, every key spelled out."""
        top = [f"{key} = {_toml(getattr(self, key))}" for key in _TOP]
        for section in _SECTIONS:
            if section in TASKS and section != self.task:
                continue
            top += ["", f"[{section}]"]
            record = getattr(self, section)
            top += [f"{entry.name} = {_toml(getattr(record, entry.name))}" for entry in dataclasses.fields(record)]
        return "\n".join(top) + "\n"


_SECTIONS: dict[str, type[Any]] = {
    "model": Model,
    "data": Data,
    "augment": Augment,
    "loss": Loss,
    "optimiser": Optimiser,
    "schedule": Schedule,
    "distill": Distill,
    "engine": Engine,
    "segment": Segment,
    "detect": Detect,
    "answer": Answer,
}
_TOP = ("name", "about", "task")
_KEYS = {f"{section}.{entry.name}": entry for section, cls in _SECTIONS.items() for entry in dataclasses.fields(cls)}
#: Lengths in epochs, and those that say them in steps.
_IN_STEPS = {
    "schedule.epochs": "schedule.steps",
    "schedule.warmup_epochs": "schedule.warmup_steps",
    "engine.evaluate_every": "engine.evaluate_steps",
}
_TYPES = {f"{section}.{name}": kind for section, cls in _SECTIONS.items() for name, kind in get_type_hints(cls).items()}


def shipped_recipes() -> dict[str, str]:
    """The recipes that come with vitfocus, and what each says about itself.

    >>> "shapes" in shipped_recipes()
    True
    """
    folder = resources.files("vitfocus") / "recipes"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): _parse(file.read_text(), file.name).get("about", "") for file in files}


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by its shipped name or a .toml file, with overrides such as "batch=64" applied.

    An override that would change nothing, beside what the recipe says otherwise, is refused.

    >>> recipe = load_recipe("shapes", ["batch=32", "model.arguments.depth=2", "spec=vit_tiny_patch16_224+cb"])
    >>> recipe.data.batch, recipe.model.arguments["depth"], recipe.model.spec
    (32, 2, 'vit_tiny_patch16_224+cb')
    """
    recipe, changed = apply_overrides(source, overrides)
    refuse_unused(recipe, changed)
    return recipe


def apply_overrides(source: str | Path, overrides: Sequence[str]) -> tuple[Recipe, set[str]]:
    """The recipe with the overrides, and the full names of the keys they set, whether or not these do anything."""
    tree = _resolve(str(source), ())
    changed: set[str] = set()
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise VitfocusError(f"{text!r} overrides nothing: write key=value, such as batch=64.")
        if key.strip() == "task":
            tree["task"] = value.strip().strip("\"'")
            continue
        path = full_key(key.strip(), str(tree.get("task", "classify")))
        section, _, rest = path.partition(".")
        target = tree.setdefault(section, {})
        *inner, last = rest.split(".")
        for part in inner:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise VitfocusError(f"{key} has nothing below it: {part} is a value.")
        target[last] = _read_value(value.strip(), _TYPES.get(path))
        changed.add(path)
    _settle_lengths(changed, tree)
    recipe = build_recipe(tree, Path(source).stem)
    if str(source).endswith(".toml"):
        refuse_downloads(recipe, str(source), typed=changed)
    return recipe, changed


def refuse_downloads(
    recipe: Recipe, source: str, typed: Set[str] = frozenset(), sections: Sequence[str] = ("model", "distill", "data")
) -> None:
    """Refuse what a recipe file would fetch, unless whoever runs it typed that key as well.

    Shipped recipes are ours, and may say it themselves.
    """
    teacher = "" if Path(recipe.distill.teacher).is_dir() else recipe.distill.teacher
    library, name = _base(recipe.model.spec)
    asked = {
        "model.spec": _elsewhere(library, name),
        "model.pretrained": recipe.model.pretrained and not (library == "transformers" and Path(name).is_dir()),
        "distill.teacher": _elsewhere(*_base(teacher)),
        "distill.pretrained": recipe.distill.pretrained and bool(teacher),
        "data.source": recipe.data.source.startswith("timm:") and "/" in recipe.data.source,
        "data.download": recipe.data.download,
    }
    for key, fetches in asked.items():
        if fetches and key not in typed and key.partition(".")[0] in sections:
            value = _toml(_get(recipe, key))
            raise VitfocusError(
                f"{source} says {key} = {value}, and a recipe file fetches nothing by itself: add "
                f"{key}={value.strip(chr(34))} to the command if you want that."
            )


def _base(spec: str) -> tuple[str, str]:
    """The library and the model's name in a spec."""
    from vitfocus.treatments.origin import split_library
    from vitfocus.treatments.spec import split_spec

    return split_library(split_spec(spec)[0]) if spec.strip() else ("", "")


def _elsewhere(library: str, name: str) -> bool:
    """Whether a name is fetched: neither a library's own model nor a folder that transformers reads."""
    from vitfocus.treatments.arguments import is_elsewhere

    return bool(name) and not (library == "transformers" and Path(name).is_dir()) and is_elsewhere(library, name)


def build_recipe(tree: Mapping[str, Any], name: str = "recipe") -> Recipe:
    """Check a tree of sections and make the record of it."""
    task = tree.get("task", "classify")
    for key in _TOP:
        if not isinstance(tree.get(key, ""), str):
            raise VitfocusError(f"{key} wants a word, not {tree[key]!r}.")
    if task not in TASKS:
        raise VitfocusError(f"There is no task {task!r}: {nearest(str(task), TASKS)}")
    parts: dict[str, Any] = {"name": tree.get("name", name), "about": tree.get("about", ""), "task": task}
    if not (parts["name"].strip(".") and parts["name"] == Path(parts["name"]).name):
        raise VitfocusError(f"A recipe's name is also its run's folder, which {parts['name']!r} cannot be.")
    for section, content in tree.items():
        if section in (*_TOP, "extends"):
            continue
        if section not in _SECTIONS:
            raise VitfocusError(f"A recipe has no section {section!r}: {nearest(section, _SECTIONS)}")
        if not isinstance(content, Mapping):
            raise VitfocusError(f"{section} is a section of a recipe: write [{section}] and keys below it.")
        for key in content:
            if f"{section}.{key}" not in _KEYS:
                known = [entry.name for entry in dataclasses.fields(_SECTIONS[section])]
                raise VitfocusError(f"[{section}] has no key {key!r}: {nearest(key, known)}")
        values = {key: _checked(f"{section}.{key}", value) for key, value in content.items()}
        parts[section] = _SECTIONS[section](**values)
    recipe = Recipe(**parts)
    by_epochs = not (recipe.schedule.steps or recipe.schedule.warmup_steps)
    if by_epochs and recipe.schedule.warmup_epochs > recipe.schedule.epochs:
        raise VitfocusError(
            f"warmup_epochs={recipe.schedule.warmup_epochs:g} is more than epochs={recipe.schedule.epochs:g}."
        )
    return recipe


def difference(old: Recipe, new: Recipe) -> list[str]:
    """The keys that differ in a way that would change the run, each as "key: old -> new"."""
    task = [f"task: {old.task} -> {new.task}"] if old.task != new.task else []
    return task + [
        f"{path}: {_toml(before)} -> {_toml(after)}"
        for path, entry in _KEYS.items()
        if not entry.metadata.get("harmless") and (before := _get(old, path)) != (after := _get(new, path))
    ]


def _get(recipe: Recipe, path: str) -> Any:
    section, key = path.split(".")
    return getattr(getattr(recipe, section), key)


def _resolve(source: str, seen: tuple[str, ...]) -> dict[str, Any]:
    if source in seen:
        raise VitfocusError(f"Recipes extend each other in a circle: {' -> '.join([*seen, source])}.")
    tree = _parse(_text(source), source)
    base = tree.pop("extends", None)
    if base is None:
        return tree
    local = Path(source).parent / str(base)
    below = _resolve(str(local) if source.endswith(".toml") and local.is_file() else str(base), (*seen, source))
    below.pop("about", None)
    merged = _merge(below, tree)
    _settle_lengths({f"{name}.{key}" for name, part in tree.items() if isinstance(part, dict) for key in part}, merged)
    return merged


def _settle_lengths(changed: Set[str], tree: dict[str, Any]) -> None:
    """A length in epochs takes the place of one in steps that it was written over; one that counts not is refused."""
    for path, other in _IN_STEPS.items():
        if path not in changed:
            continue
        section, instead = other.split(".")
        lengths, name = tree.setdefault(section, {}), path.split(".")[1]
        if other not in changed:
            lengths[instead] = 0
        for key in (instead, "steps") if name == "warmup_epochs" else (instead,):
            if lengths.get(key):
                raise VitfocusError(
                    f"This recipe counts steps ({key}={lengths[key]}), so {name} would change nothing: give "
                    f"{instead}=... instead, or {key}=0 beside it."
                )


def _text(source: str) -> str:
    if source.endswith(".toml"):
        path = Path(source)
        if not path.is_file():
            raise VitfocusError(f"There is no recipe file {source}.")
        try:
            return path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise VitfocusError(f"{source} is not written in UTF-8, as TOML is.") from None
    if Path(source, "config.toml").is_file():
        raise VitfocusError(f"{source} is a run's folder, and its recipe is {source}/config.toml.")
    file = resources.files("vitfocus") / "recipes" / f"{source}.toml"
    if not file.is_file():
        raise VitfocusError(f"There is no recipe {source!r}: {nearest(source, shipped_recipes())}")
    return file.read_text(encoding="utf-8")


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise VitfocusError(f"{source} is not valid TOML: {error}.") from None


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merge(result[key], value) if both else value
    return result


def full_key(key: str, task: str) -> str:
    """The full name of a key that an override may have shortened; what other tasks have is not meant.

    >>> full_key("batch", "classify"), full_key("longest", "detect")
    ('data.batch', 'detect.longest')
    """
    section, _, rest = key.partition(".")
    if f"{section}.{rest.partition('.')[0]}" in _KEYS and (key in _KEYS or key.startswith("model.arguments.")):
        return key
    foreign = set(TASKS) - {task} | ({"distill"} if task != "classify" else set())
    matches = [path for path in _KEYS if path.split(".")[1] == key and path.split(".")[0] not in foreign]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise VitfocusError(f"{key} could be {' or '.join(matches)}: write the one that is meant.")
    raise VitfocusError(f"A recipe has no key {key!r}: {nearest(key, [*_KEYS, *(p.split('.')[1] for p in _KEYS)])}")


def _read_value(text: str, kind: Any) -> Any:
    """A value from the command line: TOML where it is TOML, otherwise the words as they stand."""
    if kind is str:
        return text.strip("\"'")
    for attempt in (text, text.lower()):
        try:
            return tomllib.loads(f"value = {attempt}")["value"]
        except tomllib.TOMLDecodeError:
            continue
    return text


def _checked(path: str, value: Any) -> Any:
    kind, entry = _TYPES[path], _KEYS[path]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    pair = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(v, int | float) for v in value)
    if kind is float and number:
        value = float(value)
    elif kind not in (str, bool, int, float) and kind is not dict and pair:
        value = (float(value[0]), float(value[1]))
    elif not (type(value) is kind or (path == "model.arguments" and isinstance(value, dict))):
        named = {float: "a number", int: "a whole number", bool: "true or false", str: "a word"}
        wanted = "a table of keys and values" if path == "model.arguments" else named.get(kind, "two numbers")
        raise VitfocusError(f"{path} wants {wanted}, not {value!r}.")
    choices, bounds = entry.metadata.get("choices"), entry.metadata.get("bounds")
    if choices and value not in choices:
        raise VitfocusError(f"{path} has no value {value!r}: {nearest(str(value), choices)}")
    numbers = value if isinstance(value, tuple) else (value,)
    if bounds and not all(bounds[0] <= one <= bounds[1] and one != math.inf for one in numbers):
        given = ", ".join(f"{one:g}" for one in numbers)
        raise VitfocusError(f"{path} lies between {bounds[0]:g} and {bounds[1]:g}, and {given} was given.")
    if entry.metadata.get("rising") and numbers[0] > numbers[1]:
        raise VitfocusError(f"{path} goes from less to more, and {numbers[0]:g}, {numbers[1]:g} was given.")
    return value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(_pairs(value)) + "}"
    return "[" + ", ".join(_toml(one) for one in value) + "]"


def _pairs(value: Mapping[str, Any]) -> Iterator[str]:
    for key, one in value.items():
        yield f"{key if re.fullmatch('[A-Za-z0-9_-]+', key) else _quoted(key)} = {_toml(one)}"


def _quoted(text: str) -> str:
    """A TOML string: JSON's escapes are TOML's too, but for the one control character that JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
