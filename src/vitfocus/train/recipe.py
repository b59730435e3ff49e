"""Loads recipes by name or from TOML files, with overrides, and refuses keys without effect and hidden downloads.

A recipe may extend another (`extends = "deit_s"`). Every value can be overridden as key=value, where the key is dotted
("data.batch") or its last part alone if that is unambiguous ("batch"). The keys are in `recipes/__init__.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from importlib import resources
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from vitfocus.core.errors import VitfocusError, nearest
from vitfocus.core.files import home_path, is_file, is_folder
from vitfocus.core.records import convert, parse_toml, read_text
from vitfocus.recipes import CONDITIONS, KEYS, SECTIONS, Recipe, changed, is_changeable, value_of
from vitfocus.tasks import TASKS, find_task

#: Lengths in epochs, and the keys that give them in steps instead.
_IN_STEPS = {
    "schedule.epochs": "schedule.steps",
    "schedule.warmup_epochs": "schedule.warmup_steps",
    "engine.evaluate_every": "engine.evaluate_steps",
}


def shipped_recipes() -> dict[str, str]:
    """List the recipes that come with vitfocus.

    Returns:
        Their descriptions by name.

    Example:
        >>> "shapes" in shipped_recipes()
        True
    """
    folder = resources.files("vitfocus") / "recipes"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): parse_toml(file.read_text(), file.name).get("about", "") for file in files}


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe.

    Args:
        source: The name of a shipped recipe, or a .toml file.
        overrides: Changes such as "batch=64" or "model.arguments.depth=2".

    Returns:
        The recipe with the overrides applied.

    Raises:
        VitfocusError: A key or value is not valid, an override would have no effect in this recipe, or a file would
            download something that was not requested on the command line.

    Example:
        >>> recipe = load_recipe("shapes", ["batch=32", "model.arguments.depth=2", "spec=vit_tiny_patch16_224+cb"])
        >>> recipe.data.batch, recipe.model.arguments["depth"], recipe.model.spec
        (32, 2, 'vit_tiny_patch16_224+cb')
    """
    recipe, keys = apply_overrides(source, overrides)
    for key in sorted(keys):
        if why := why_unused(recipe, key):
            raise VitfocusError(why)
    return recipe


def apply_overrides(source: str | Path, overrides: Sequence[str]) -> tuple[Recipe, set[str]]:
    """The recipe with the overrides, and the full names of the keys they set, whether or not these have an effect."""
    tree = _resolve(str(source), ())
    keys: set[str] = set()
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise VitfocusError(f"{text!r} overrides nothing: write key=value, such as batch=64.")
        if key.strip() == "task":
            tree["task"] = value.strip().strip("\"'")
            continue
        path = full_key(key.strip(), str(tree.get("task", "classify")))
        *tables, last = path.split(".")
        target = tree
        for table in tables:
            target = target.setdefault(table, {})
            if not isinstance(target, dict):
                raise VitfocusError(f"{key} has nothing below it: {table} is a value.")
        kind = KEYS.get(path)
        target[last] = _read_value(value.strip(), is_text=getattr(kind, "__origin__", kind) is str)
        keys.add(path)
    _resolve_lengths(keys, tree)
    recipe = build_recipe(tree, Path(source).stem)
    if str(source).endswith(".toml"):
        refuse_downloads(recipe, str(source), typed=keys)
    return recipe, keys


def build_recipe(tree: Mapping[str, Any], name: str = "recipe") -> Recipe:
    """Make a recipe from nested sections, as read from TOML."""
    recipe = convert({"name": name, **{key: value for key, value in tree.items() if key != "extends"}}, Recipe)
    if recipe.task not in TASKS:
        raise VitfocusError(f"There is no task {recipe.task!r}: {nearest(recipe.task, TASKS)}")
    if not (recipe.name.strip(".") and recipe.name == Path(recipe.name).name and recipe.name.isprintable()):
        raise VitfocusError(f"A recipe's name is also its run's folder, which {recipe.name!r} cannot be.")
    if recipe.data.root:
        recipe = replace(recipe, data=replace(recipe.data, root=str(home_path(recipe.data.root))))
    schedule = recipe.schedule
    if not (schedule.steps or schedule.warmup_steps) and schedule.warmup_epochs > schedule.epochs:
        raise VitfocusError(f"warmup_epochs={schedule.warmup_epochs:g} is more than epochs={schedule.epochs:g}.")
    return recipe


def why_unused(recipe: Recipe, key: str) -> str:
    """Why a key, by its full name, has no effect in this recipe; "" if it has one or is switched off.

    A recipe may contain such a key, because an override can still make the choice that it depends on. A key that is
    itself set by an override is expected to have an effect.

    >>> why_unused(load_recipe("shapes"), "schedule.power")
    'schedule.power only has an effect with schedule.decay=polynomial: set that, or leave schedule.power out.'
    >>> why_unused(load_recipe("shapes", ["decay=polynomial"]), "schedule.power")
    ''
    """
    section, name = key.split(".")[:2]
    condition = CONDITIONS.get(key)
    if not value_of(recipe, key) and not (condition and condition.zero_counts):
        return ""
    if not find_task(recipe.task).uses(section, name):
        return f"task={recipe.task} does not use {key}: leave it out of the recipe."
    return condition.refusal(key, recipe) if condition else ""


def refuse_unused_keys(recipe: Recipe) -> None:
    """Refuse a recipe with keys that its task would ignore, or with settings of a teacher but no teacher."""
    task = find_task(recipe.task)
    for section in SECTIONS:
        for name in changed(getattr(recipe, section)):
            if not task.uses(section, name):
                raise VitfocusError(f"task={recipe.task} does not use {section}.{name}: leave it out of the recipe.")
            if section == "distill" and not recipe.distill.teacher:
                raise VitfocusError(CONDITIONS["distill.kind"].refusal(f"distill.{name}", recipe))


def difference(old: Recipe, new: Recipe) -> list[str]:
    """The differences that would change the run, each as "key: old -> new"."""
    task = [f"task: {old.task} -> {new.task}"] if old.task != new.task else []
    return task + [
        f"{key}: {_shown(before)} -> {_shown(after)}"
        for key in KEYS
        if not is_changeable(key) and (before := value_of(old, key)) != (after := value_of(new, key))
    ]


def refuse_downloads(
    recipe: Recipe,
    source: str,
    typed: Set[str] = frozenset(),
    sections: Iterable[str] = ("model", "distill", "data", "engine"),
) -> None:
    """Refuse a recipe file that would use the network, unless the same key was given on the command line as well.

    This does not apply to shipped recipes.
    """
    teacher = "" if is_folder(recipe.distill.teacher) else recipe.distill.teacher
    library, name = _base(recipe.model.spec)
    reader = recipe.data.source.startswith("timm:")
    asked = {
        "model.spec": _is_remote(library, name),
        "model.pretrained": recipe.model.pretrained and not (library == "transformers" and is_folder(name)),
        "distill.teacher": _is_remote(*_base(teacher)),
        "distill.pretrained": recipe.distill.pretrained and bool(teacher),
        "data.source": reader,
        "data.root": reader and bool(recipe.data.root),  # which such a reader may interpret as an address or a command
        "data.download": recipe.data.download,
        "engine.track": recipe.engine.track != "no",
    }
    for key, downloads in asked.items():
        if downloads and key not in typed and key.partition(".")[0] in sections:
            value = _shown(value_of(recipe, key))
            raise VitfocusError(
                f"{source} says {key} = {value}, and a recipe file neither uses the network nor starts a loader by "
                f"itself: add {key}={value.strip(chr(34))} to the command if you want that."
            )


def _base(spec: str) -> tuple[str, str]:
    """The library and the model's name in a spec."""
    from vitfocus.treatments.builder import split_library
    from vitfocus.treatments.spec import split_spec

    return split_library(split_spec(spec)[0]) if spec.strip() else ("", "")


def _is_remote(library: str, name: str) -> bool:
    """Whether a name is downloaded: neither a library's own model nor a folder that transformers reads."""
    from vitfocus.treatments.safe_arguments import is_elsewhere

    return bool(name) and not (library == "transformers" and is_folder(name)) and is_elsewhere(library, name)


def _resolve(source: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """The sections of a recipe, merged with those of the recipes it extends."""
    if source in seen:
        raise VitfocusError(f"Recipes extend each other in a circle: {' -> '.join([*seen, source])}.")
    tree = parse_toml(_text(source), source)
    base = tree.pop("extends", None)
    if base is None:
        return tree
    local = Path(source).parent / str(base)
    below = _resolve(str(local) if source.endswith(".toml") and is_file(local) else str(base), (*seen, source))
    below.pop("about", None)
    merged = _merge(below, tree)
    _resolve_lengths({f"{name}.{key}" for name, part in tree.items() if isinstance(part, dict) for key in part}, merged)
    return merged


def _resolve_lengths(given: Set[str], tree: dict[str, Any]) -> None:
    """Let a length in epochs replace an inherited one in steps; refuse a length that would be ignored."""
    for path, other in _IN_STEPS.items():
        if path not in given:
            continue
        section, instead = other.split(".")
        lengths, name = tree.setdefault(section, {}), path.split(".")[1]
        if other not in given:
            lengths[instead] = 0
        for key in (instead, "steps") if name == "warmup_epochs" else (instead,):
            if lengths.get(key):
                raise VitfocusError(
                    f"This recipe counts steps ({key}={lengths[key]}), so {name} would have no effect: give "
                    f"{instead}=... instead, or {key}=0 beside it."
                )


def _text(source: str) -> str:
    if source.endswith(".toml"):
        return read_text(source, missing="expected a recipe")
    if is_file(Path(source, "config.toml")):
        raise VitfocusError(f"{source} is a run's folder, and its recipe is {source}/config.toml.")
    folder = resources.files("vitfocus") / "recipes"
    shipped = {file.name for file in folder.iterdir()}
    if f"{source}.toml" not in shipped:  # a path such as "/tmp/x" would leave the folder
        there = f"; for the file, write {source}.toml" if is_file(f"{source}.toml") else ""
        raise VitfocusError(f"There is no recipe {source!r}{there}: {nearest(source, shipped_recipes())}")
    return (folder / f"{source}.toml").read_text(encoding="utf-8")


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merge(result[key], value) if both else value
    return result


def full_key(key: str, task: str) -> str:
    """The full name of a key that an override may have shortened; keys of other tasks are ignored.

    >>> full_key("batch", "classify"), full_key("longest", "detect")
    ('data.batch', 'detect.longest')
    """
    if key in KEYS or key.startswith("model.arguments."):
        return key
    foreign = set(TASKS) - {task} | ({"distill"} if task != "classify" else set())
    matches = [path for path in KEYS if path.split(".")[1] == key and path.split(".")[0] not in foreign]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise VitfocusError(f"{key} could be {' or '.join(matches)}: write the full name.")
    raise VitfocusError(f"A recipe has no key {key!r}: {nearest(key, [*KEYS, *(p.split('.')[1] for p in KEYS)])}")


def _read_value(text: str, is_text: bool) -> Any:
    """A value from the command line: parsed as TOML if possible, otherwise as text."""
    if is_text:
        return text.strip("\"'")
    for attempt in (text, text.lower()):
        try:
            return parse_toml(f"value = {attempt}", text)["value"]
        except VitfocusError:
            continue
    return text


def _shown(value: Any) -> str:
    """A value in a message."""
    return json.dumps(value, ensure_ascii=False, default=str)
