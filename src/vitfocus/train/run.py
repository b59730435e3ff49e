"""`train`: from a recipe to a run folder with config.toml, metrics.jsonl, checkpoints, the model and results.json."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, TorchDynamoPlugin, gather_object
from timm.utils import ModelEmaV3
from torch import nn

from vitfocus.anatomy import mark_inserted
from vitfocus.core.contents import check_contents
from vitfocus.core.environment import device_name, usable_device
from vitfocus.core.errors import VitfocusError, VitfocusWarning
from vitfocus.core.files import write_text
from vitfocus.core.progress import Progress
from vitfocus.data.classification.loader import Share
from vitfocus.recipes.settings import Recipe
from vitfocus.tasks import find_task
from vitfocus.tasks.base import Setting, Task
from vitfocus.train.checkpoint import Checkpoints, State, read_checkpoint, replace_folder
from vitfocus.train.compile_blocks import compile_blocks
from vitfocus.train.engine import Engine, run_folder
from vitfocus.train.metrics import Metrics
from vitfocus.train.model import choose_trained
from vitfocus.train.optimiser import create_optimiser
from vitfocus.train.recipe import build_recipe, difference, load_recipe, refuse_foreign
from vitfocus.train.results import SHAPE, describe
from vitfocus.train.schedule import Plan
from vitfocus.train.state import model_tensors
from vitfocus.treatments.save_load import remember_task, save
from vitfocus.treatments.spec import split_spec


def train(
    recipe: Recipe | str | Path,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    overrides: Sequence[str] = (),
    before_step: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Carry a recipe out and return what is also written to results.json.

    `recipe` is a shipped name, a .toml file or a record; `out` is the run's folder (default: runs/NAME). `resume` is
    None for a new run, "auto" to go on where the folder's newest sound checkpoint is (or begin), or a checkpoint's
    path. `before_step` is called before each step with its number, and may wait: its time is not counted. The result's
    "finished" is False where SIGTERM or Ctrl-C ended the run early, with a checkpoint.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise VitfocusError("Overrides go with a recipe's name or file; change a Recipe with msgspec.structs.replace.")
    refuse_foreign(recipe)
    folder = run_folder(out, recipe)
    checkpoints = Checkpoints(folder / "checkpoints", recipe.engine.keep)
    accelerator = _accelerator(recipe)
    progress = Progress("training", every=10.0, transient=False, show=accelerator.is_main_process)
    state = _start_state(recipe, folder, checkpoints, resume, progress)
    if resume is not None and (done := _finished(folder, state)):
        progress.say(f"{folder} is finished; nothing is left to do.")
        return done
    if state is not None:
        progress.say(f"Going on from step {state.step}.")
    engine, facts = _assemble(recipe, folder, checkpoints, accelerator, progress, state)
    if accelerator.is_main_process:
        write_text(folder / "config.toml", recipe.to_toml())
    engine.before_step = before_step
    cuda = [accelerator.device] if accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda):  # every step seeds torch's generators; the caller's stay as they were
            finished = engine.run()
    finally:
        progress.close()
        if engine.metrics is not None:
            engine.metrics.catch_up()
    results = {"finished": finished, "signal": engine.signal, **facts, **describe(engine)}
    if accelerator.num_processes > 1:  # each process met its own
        found: list[dict[str, dict[str, str]]] = gather_object([results["broken_images"]])
        results["broken_images"] = {s: {k: v for one in found for k, v in one[s].items()} for s in ("train", "val")}
    if finished:
        _export(engine, folder / "model")
        if accelerator.is_main_process:
            results["data_sha256"] = engine.task.digests()
            results["model_sha256"] = json.loads((folder / "model" / "config.json").read_text())["sha256"]
            write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    accelerator.wait_for_everyone()
    return results


def assemble_run(recipe: Recipe, folder: str | Path) -> Engine:
    """A run that is ready to take its first step, for those who would rather take the steps themselves."""
    accelerator = _accelerator(recipe)
    checkpoints = Checkpoints(Path(folder) / "checkpoints", recipe.engine.keep)
    return _assemble(recipe, Path(folder), checkpoints, accelerator, Progress("training", show=False), None)[0]


def _accelerator(recipe: Recipe) -> Accelerator:
    engine = recipe.engine
    cuda = engine.device != "cpu" and torch.cuda.is_available()
    if engine.device == "cuda" and not cuda:
        usable_device("cuda")  # which says why there is none
    precision = {"auto": "bf16" if cuda else "no", "fp32": "no"}.get(engine.precision, engine.precision)
    if precision == "fp16" and not cuda:
        raise VitfocusError("engine.precision=fp16 needs a CUDA device; bf16 works on the CPU as well.")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    AcceleratorState._reset_state(reset_partial_state=not distributed)  # a run before this one may have differed
    mode = compile_mode(recipe, cuda)
    return Accelerator(
        mixed_precision=precision,
        cpu=not cuda,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode=mode) if mode not in (None, "blocks") else None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )


def compile_mode(recipe: Recipe, cuda: bool) -> str | None:
    """How the model is compiled: a mode of torch's for all of it, "blocks" for each block alone, None for not at all.

    A small model's step on a GPU waits for the host to launch kernels. Where the images lie on the device the whole
    step is recorded instead (train/recording.py); elsewhere a model that is a single piece on a single process is
    replayed as CUDA graphs ("reduce-overhead").
    """
    engine = recipe.engine
    if engine.compile == "no" or (engine.compile == "auto" and not (cuda and find_task(recipe.task).compiles)):
        return None
    if engine.compile == "blocks":
        return "blocks"
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    whole = engine.record == "auto" and recipe.task == "classify" and recipe.data.resident != "no"
    return "reduce-overhead" if cuda and alone and engine.accumulate == 1 and not whole else "default"


def _start_state(
    recipe: Recipe, folder: Path, checkpoints: Checkpoints, resume: str | Path | None, progress: Progress
) -> State | None:
    """The checkpoint to begin with, after checking that it belongs to this recipe."""
    if resume is None:
        if checkpoints.steps() or (folder / "results.json").exists():
            raise VitfocusError(
                f"{folder} holds a run already: continue it with resume='auto' (--resume auto), or give another out."
            )
        return None
    state = checkpoints.newest(progress.say) if str(resume) == "auto" else read_checkpoint(resume)
    if state is None and checkpoints.steps():
        raise VitfocusError(f"No checkpoint in {checkpoints.folder} can be read; remove that folder to start anew.")
    if state is None and not _finished(folder, None):
        return None
    import tomllib

    began = (folder / "config.toml").read_text(encoding="utf-8") if state is None else state.rest["recipe"]
    try:
        known = tomllib.loads(began)
    except ValueError as error:
        raise VitfocusError(f"The recipe that {folder} began with cannot be read: {error}.") from None
    changed = difference(build_recipe(known), recipe)
    if changed:
        raise VitfocusError(
            f"The recipe is not the one this run began with, so it cannot go on: {'; '.join(changed)}. "
            "Undo the change, or train into another folder."
        )
    return state


def _finished(folder: Path, state: State | None) -> dict[str, Any] | None:
    """The results of a run that reached its end; its checkpoints may have been removed to make room."""
    path = folder / "results.json"
    try:
        results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:  # damaged: what is left to do is to write it again
        results = {}
    check_contents(path, results, SHAPE, "vitfocus train")
    if state is None:
        whole = (folder / "config.toml").is_file() and (folder / "model" / "config.json").is_file()
        return results if whole and results.get("finished") else None
    return results if results.get("steps") == state.step else None


def _assemble(
    recipe: Recipe,
    folder: Path,
    checkpoints: Checkpoints,
    accelerator: Accelerator,
    progress: Progress,
    state: State | None,
) -> tuple[Engine, dict[str, Any]]:
    device, data = accelerator.device, recipe.data
    task = find_task(recipe.task)(recipe)
    with accelerator.main_process_first():  # what is fetched or indexed, is so once
        task.open_data()
    model: Any = _build(task, begun=state is not None)
    heads = task.head_names(model)
    resting = choose_trained(model, recipe.optimiser.train, heads)
    compiled = compile_mode(recipe, device.type == "cuda")
    fsdp = getattr(accelerator, "is_fsdp2", False) or str(accelerator.distributed_type).endswith("FSDP")
    if fsdp and recipe.engine.ema:
        raise VitfocusError("engine.ema keeps whole weights on every process, which FSDP is there to avoid: set ema=0.")
    model.to(device)
    ema = ModelEmaV3(model, recipe.engine.ema) if recipe.engine.ema else None
    optimiser = create_optimiser(model, recipe.optimiser, device, heads)
    if compiled == "blocks":
        compile_blocks(model)
    prepared, prepared_optimiser = accelerator.prepare(model, optimiser)
    share = Share(data.batch, accelerator.process_index, accelerator.num_processes, recipe.engine.accumulate)
    task.start(model, Setting(device, share, compiled is not None, progress.say))
    plan = Plan.of(recipe, task.train_images)
    progress.total = plan.steps
    progress.say(
        f"{recipe.name}: {recipe.model.spec}, {task.train_images} training and {task.val_images} validation images, "
        f"{plan.steps} steps of {data.batch} on {device_name(device)}."
    )
    step = state.step if state else 0
    metrics = Metrics(folder, step, recipe.engine.tensorboard) if accelerator.is_main_process else None
    engine = Engine(
        recipe=recipe,
        plan=plan,
        accelerator=accelerator,
        raw=model,
        model=prepared,
        optimiser=prepared_optimiser,
        task=task,
        checkpoints=checkpoints,
        metrics=metrics,
        progress=progress,
        save_best=lambda: _export(engine, folder / "best", must=False),
        ema=ema,
        resting=resting,
    )
    if state is not None:
        engine.resume(state)
    facts = {
        "task": task.name,
        "train_images": task.train_images,
        "val_images": task.val_images,
        "broken_images": {split: log.found for split, log in task.broken.items()},
        "compiled": compiled is not None,
        **task.facts(),
    }
    return engine, facts


def _build(task: Task, begun: bool) -> nn.Module:
    """The task's model, which remembers what it was trained for; warnings were given when the run began."""
    with warnings.catch_warnings():
        if begun:
            warnings.simplefilter("ignore", VitfocusWarning)
        model = task.build_model()
    remember_task(model, task.card())
    return model


def _export(engine: Engine, folder: Path, must: bool = True) -> None:
    """Save the weights that count (the moving average's where there is one) as vitfocus.save does, in one stroke.

    Where it need not be, a full disk is reported, and what was saved before stays.
    """
    model: nn.Module = engine.ema.module if engine.ema is not None else engine.raw
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        tensors = model_tensors(model)
        if engine.accelerator.is_main_process:
            model = _build(engine.task, begun=True)
            model.load_state_dict(tensors)
    if engine.step:
        mark_inserted(model, ())
    if engine.accelerator.is_main_process:
        base, arguments = split_spec(engine.recipe.model.spec)[0], engine.task.arguments()
        try:
            replace_folder(folder, lambda place: _save(model, place, base, arguments))
        except (OSError, VitfocusError) as error:
            if must:
                raise
            engine.progress.say(f"The best model so far cannot be saved ({str(error).rstrip('.')}). The run goes on.")
    engine.accelerator.wait_for_everyone()


def _save(model: nn.Module, folder: Path, base: str, arguments: dict[str, Any]) -> None:
    save(model, folder, base=base, arguments=arguments)
