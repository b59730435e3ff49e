"""A registry of lazily imported objects, and the connection to timm, transformers and peft.

A lower package looks up by name what a higher package registers, so that imports go in one direction. A target is text
and is imported on first use; this module imports nothing heavy.

`connect` registers vitfocus with timm, transformers and peft when they are imported, so that they can open what
vitfocus saved, or say what is missing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from vitfocus.core.errors import VitfocusError


class LazyRegistry(Mapping[str, Any]):
    """A mapping from names to objects that are imported on first use.

    >>> shapes = LazyRegistry()
    >>> shapes.register("circle", "math:pi")
    >>> list(shapes), round(shapes["circle"], 2)
    (['circle'], 3.14)
    """

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}

    def register(self, name: str, target: str) -> None:
        """Register an object by name; `target` is "module:attribute"."""
        self._targets[name] = target

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = self._targets[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


#: Models built on a vision transformer: the prefix of a spec ("upernet:vit_tiny_patch16_224") and the function
#: `(name, pretrained, arguments)` that builds the model. `name` is what follows the colon, usually a timm model;
#: arguments that the head does not take go to that backbone.
COMPOSED_MODELS = LazyRegistry()


#: The architecture (timm) or model type (transformers) of a saved treated model. Without vitfocus, the messages of
#: these libraries about an unknown name then say what is missing.
NEEDS_VITFOCUS = "import_vitfocus_first"

#: The key in config.json of transformers for the real model type, and that of the treatments.
TYPE_KEY, TREATMENTS_KEY = "vitfocus_treatments_in", "vitfocus_treatments"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function with a module as soon as the module has been imported."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec from the other finders, with a loader that calls the function after the import."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(fullname)
        loader: Any = found.loader if found is not None else None
        if loader is not None:
            execute = loader.exec_module

            def executed(module: ModuleType) -> None:
                del loader.exec_module
                execute(module)
                self.then(module)

            loader.exec_module = executed
        return found


def _after_import(name: str, then: Callable[[Any], None]) -> None:
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _AfterImport(name, then))
    elif not getattr(module.__spec__, "_initializing", False):
        then(module)


def connect() -> None:
    """Register vitfocus with timm, transformers and peft, now or when they are imported."""
    _after_import("timm.models", _connect_timm)
    _after_import("transformers.configuration_utils", _connect_configs)
    _after_import("transformers.modeling_utils", _connect_models)
    _after_import("peft.peft_model", _connect_peft)


def _hub() -> Any:
    return importlib.import_module("vitfocus.treatments.hub")


def _connect_timm(models: Any) -> None:
    def build(pretrained: bool = False, **arguments: Any) -> Any:
        return _hub().build_treated(pretrained, **arguments)

    build.__name__ = NEEDS_VITFOCUS
    models.register_model(build)


def _connect_configs(configurations: Any) -> None:
    """Write and read the model type of a treated model, which only vitfocus resolves."""
    cls = configurations.PretrainedConfig
    write, read = cls.to_json_file, cls.get_config_dict.__func__

    @wraps(write)
    def written(self: Any, json_file_path: Any, *args: Any, **options: Any) -> None:
        write(self, json_file_path, *args, **options)
        if any(TREATMENTS_KEY in vars(one) for one in nested_configs(self)):
            content = json.loads((file := Path(json_file_path)).read_text(encoding="utf-8"))
            content |= {"model_type": NEEDS_VITFOCUS, TYPE_KEY: self.model_type}
            file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @wraps(read)
    def found(cls: Any, *args: Any, **options: Any) -> Any:
        content, rest = read(cls, *args, **options)
        kind = content.pop(TYPE_KEY, None)
        return content | ({"model_type": kind} if content.get("model_type") == NEEDS_VITFOCUS else {}), rest

    cls.to_json_file, cls.get_config_dict = written, classmethod(found)


def _connect_models(modeling: Any) -> None:
    cls = modeling.PreTrainedModel
    post_init, load = cls.post_init, cls.from_pretrained.__func__

    @wraps(post_init)
    def treated(self: Any, *args: Any, **options: Any) -> Any:
        result = post_init(self, *args, **options)
        if any(key.startswith("vitfocus") for one in nested_configs(self.config) for key in vars(one)):
            _hub().treat_built(self)
        return result

    @wraps(load)
    def loaded(cls: Any, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        try:
            model, report = load(cls, *args, output_loading_info=True, **options)
        except AttributeError as error:
            if "is neither a parameter" not in str(error):
                raise
            raise VitfocusError(
                "This version of transformers cannot load weights that a treatment rescales (sigma): use transformers "
                "5, or vitfocus.load for a folder that vitfocus.save wrote."
            ) from None
        if any(TREATMENTS_KEY in vars(one) for one in nested_configs(model.config)):
            _hub().check_loaded(model, report["missing_keys"])
        return (model, report) if output_loading_info else model

    cls.post_init, cls.from_pretrained = treated, classmethod(loaded)


def nested_configs(config: Any) -> list[Any]:
    """A config of transformers and those of the model's parts."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [config, *(one for part in parts if hasattr(part, "model_type") for one in nested_configs(part))]


def _connect_peft(peft: Any) -> None:
    cls = peft.PeftModel
    save, load = cls.save_pretrained, cls.load_adapter

    @wraps(save)
    def saved(self: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
        result = save(self, save_directory, *args, **options)
        _hub().describe_adapter(self, save_directory)
        return result

    @wraps(load)
    def loaded(self: Any, model_id: Any, *args: Any, **options: Any) -> Any:
        _hub().check_adapter(self, model_id)
        return load(self, model_id, *args, **options)

    cls.save_pretrained, cls.load_adapter = saved, loaded
    tuners = sys.modules["peft.tuners"]
    for owner in (tuners.tuners_utils.BaseTuner, tuners.LoraModel):  # older versions merge in LoraModel
        for name in {"merge_and_unload", "merge_adapter"} & set(vars(owner)):
            setattr(owner, name, _checked_merge(getattr(owner, name)))


def _checked_merge(merge: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(merge)
    def merged(self: Any, *args: Any, **options: Any) -> Any:
        _hub().check_merge(self.model)
        return merge(self, *args, **options)

    return merged
