"""`train`: from a recipe to a run folder with config.toml, metrics.jsonl, checkpoints, the model and results.json."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, TorchDynamoPlugin, gather_object
from timm.utils import ModelEmaV3
from torch import nn

from vitfocus.core.arguments import checked
from vitfocus.core.environment import Processes, device_name, usable_device, versions
from vitfocus.core.errors import VitfocusError, VitfocusWarning
from vitfocus.core.files import not_written, require_run_folder, write_text
from vitfocus.core.modules import SharedBatchNorm2d, mark_inserted, share_batch_norms
from vitfocus.core.progress import Progress
from vitfocus.core.records import convert, parse_json, parse_toml, read_json, read_text
from vitfocus.data.loader import BatchPartition
from vitfocus.recipes import KEYS, Recipe, value_of
from vitfocus.tasks import find_task
from vitfocus.tasks.base import RunContext, Task
from vitfocus.train.checkpoint import Checkpoint, Checkpoints, model_tensors, read_checkpoint, replace_folder
from vitfocus.train.compile import compile_blocks, compile_mode
from vitfocus.train.log import ExperimentTracker, Metrics, TrainingResults, require_tracker
from vitfocus.train.optimiser import TrainingSchedule, create_optimiser, freeze_parameters, trained_batch_norms
from vitfocus.train.recipe import build_recipe, difference, load_recipe, refuse_unused_keys
from vitfocus.train.trainer import StopRequest, Trainer
from vitfocus.treatments.hub import SavedConfig
from vitfocus.treatments.save_load import remember_task, save
from vitfocus.treatments.spec import split_spec

#: What a run leaves in its folder at once, or within a step: one of these tells a run from other files.
MARKS = ("config.toml", "metrics.jsonl", "checkpoints", "results.json")


@checked
def train(
    recipe: Recipe | str | Path,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    overrides: Sequence[str] = (),
    before_step: Callable[[int], None] | None = None,
    wait: bool = False,
) -> dict[str, Any]:
    """Train a model by a recipe.

    Args:
        recipe: The name of a shipped recipe, a .toml file, or a `Recipe`.
        out: The run's folder (default: runs/NAME), for config.toml, metrics.jsonl, checkpoints/, best/, model/ and
            results.json; a folder that holds other files and no run is refused.
        resume: None for a new run, "auto" to continue from the newest readable checkpoint in the folder (or to start a
            new run if there is none), or the path of a checkpoint.
        overrides: Changes to a recipe given by name or file, such as "batch=64".
        before_step: Called before each step with its number. The time it takes is not counted as training time.
        wait: Whether to wait while another process uses the folder, instead of raising an error.

    Returns:
        The content of results.json: scores, time, data, versions. "finished" is False if SIGTERM or Ctrl-C ended the
        run early; it then stopped within a batch, with a checkpoint.

    Raises:
        VitfocusError: The recipe, data or checkpoint is not valid, another run uses the folder, or the loss is not
            finite.

    Example:
        >>> import tempfile
        >>> small = ["train_length=8", "val_length=4", "batch=4", "epochs=1", "warmup_epochs=0", "device=cpu"]
        >>> results = train("shapes", out=tempfile.mkdtemp(), overrides=small)
        >>> results["finished"], results["steps"]
        (True, 2)
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise VitfocusError("Overrides need a recipe's name or file; change a Recipe with msgspec.structs.replace.")
    refuse_unused_keys(recipe)
    folder = Path(out) if out else Path("runs") / recipe.name
    require_run_folder(folder, MARKS, "vitfocus train")
    accelerator = _accelerator(recipe)
    processes = Processes(accelerator.process_index, accelerator.num_processes, accelerator.device)
    with processes.lock(folder, wait):
        return _train(recipe, folder, resume, before_step, accelerator)


def assemble_run(recipe: Recipe, folder: str | Path) -> Trainer:
    """A trainer that is ready for its first step, for callers that run the steps themselves."""
    accelerator = _accelerator(recipe)
    checkpoints = Checkpoints(Path(folder) / "checkpoints", recipe.engine.keep)
    return _assemble(recipe, Path(folder), checkpoints, accelerator, Progress("training", show=False), None)


def _train(
    recipe: Recipe,
    folder: Path,
    resume: str | Path | None,
    before_step: Callable[[int], None] | None,
    accelerator: Accelerator,
) -> dict[str, Any]:
    checkpoints = Checkpoints(folder / "checkpoints", recipe.engine.keep)
    progress = Progress("training", every=10.0, transient=False, show=accelerator.is_main_process)
    checkpoint = _find_checkpoint(recipe, folder, checkpoints, resume, progress)
    if resume is not None and (done := _finished(folder, checkpoint)):
        progress.say(f"{folder} is finished; nothing is left to do.")
        return done
    if checkpoint is not None:
        progress.say(f"Resuming from step {checkpoint.state.step}.")
    trainer = _assemble(recipe, folder, checkpoints, accelerator, progress, checkpoint)
    if accelerator.is_main_process:
        write_text(folder / "config.toml", recipe.to_toml())
    if recipe.engine.track != "no" and trainer.metrics is not None:
        settings = {key: value_of(recipe, key) for key in KEYS if trainer.task.uses(*key.split("."))}
        trainer.metrics.track(ExperimentTracker(recipe.engine.track, accelerator, folder, settings, progress.say))
    trainer.before_step = before_step
    cuda = [accelerator.device] if accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda):  # every step seeds torch's generators; the caller's stay as they were
            finished = trainer.run()
    finally:
        progress.close()
        if trainer.metrics is not None:
            trainer.metrics.close()
    results = {"finished": finished, "signal": trainer.signal, **_describe(trainer)}
    if accelerator.num_processes > 1:  # each process has its own
        found: list[dict[str, dict[str, str]]] = gather_object([results["broken_images"]])
        results["broken_images"] = {s: {k: v for one in found for k, v in one[s].items()} for s in ("train", "val")}
    if finished:
        _export(trainer, folder / "model")
        if accelerator.is_main_process:
            results["data_sha256"] = trainer.task.digests()
            results["model_sha256"] = read_json(folder / "model" / "config.json", SavedConfig).sha256
            write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    accelerator.wait_for_everyone()
    return results


def _accelerator(recipe: Recipe) -> Accelerator:
    engine = recipe.engine
    cuda = engine.device != "cpu" and torch.cuda.is_available()
    if engine.device == "cuda" and not cuda:
        usable_device("cuda")  # raises, and says why
    precision = {"auto": "bf16" if cuda else "no", "fp32": "no"}.get(engine.precision, engine.precision)
    if precision == "fp16" and not cuda:
        raise VitfocusError("engine.precision=fp16 needs a CUDA device; bf16 works on the CPU as well.")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    AcceleratorState._reset_state(reset_partial_state=not distributed)  # an earlier run may have had other settings
    mode = compile_mode(recipe, cuda)
    if engine.track != "no":
        require_tracker(engine.track)
    return Accelerator(
        log_with=[engine.track] if engine.track != "no" else None,
        mixed_precision=precision,
        cpu=not cuda,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode=mode) if mode not in (None, "blocks") else None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )


def _find_checkpoint(
    recipe: Recipe, folder: Path, checkpoints: Checkpoints, resume: str | Path | None, progress: Progress
) -> Checkpoint | None:
    """The checkpoint to resume from, after checking that it belongs to this recipe."""
    if resume is None:
        if checkpoints.steps() or (folder / "results.json").exists():
            raise VitfocusError(
                f"{folder} holds a run already: resume it (--resume auto), or choose another folder (--out)."
            )
        return None
    checkpoint = checkpoints.newest(progress.say) if str(resume) == "auto" else read_checkpoint(resume)
    if checkpoint is None and checkpoints.steps():
        raise VitfocusError(f"No checkpoint in {checkpoints.folder} can be read: restore one, or name another folder.")
    if checkpoint is None and not _finished(folder, None):
        return None
    config = folder / "config.toml"
    text = read_text(config) if checkpoint is None else checkpoint.state.recipe
    began_with = build_recipe(parse_toml(text, config if checkpoint is None else "The recipe in the checkpoint"))
    if changes := difference(began_with, recipe):
        raise VitfocusError(
            f"The recipe is not the one this run began with, so it cannot be resumed: {'; '.join(changes)}. "
            "Undo the change, or train into another folder."
        )
    return checkpoint


def _finished(folder: Path, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """The results of a finished run, whose checkpoints may have been removed."""
    path = folder / "results.json"
    try:
        content = parse_json(read_text(path), path) if path.is_file() else {}
    except ValueError:  # damaged: it will be written again
        content = {}
    results = convert(content, TrainingResults, path, writer="vitfocus train")
    if checkpoint is None:
        whole = (folder / "config.toml").is_file() and (folder / "model" / "config.json").is_file()
        return results if whole and results.get("finished") else None
    return results if results.get("steps") == checkpoint.state.step else None


def _assemble(
    recipe: Recipe,
    folder: Path,
    checkpoints: Checkpoints,
    accelerator: Accelerator,
    progress: Progress,
    checkpoint: Checkpoint | None,
) -> Trainer:
    device, data = accelerator.device, recipe.data
    task = find_task(recipe.task)(recipe)
    with accelerator.main_process_first():  # downloads and indexes once
        task.open_data()
    model: Any = _build(task, quiet=checkpoint is not None)
    heads = task.head_names(model)
    frozen_norms = freeze_parameters(model, recipe.optimiser.train, heads)
    if accelerator.num_processes > 1:
        share_batch_norms(model)
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
    partition = BatchPartition(
        data.batch, accelerator.process_index, accelerator.num_processes, recipe.engine.accumulate
    )
    stop = StopRequest(accelerator)
    task.start(model, RunContext(device, partition, compiled is not None, progress.say, stop.until_stopped))
    schedule = TrainingSchedule.of(recipe, task.train_images)
    progress.total = schedule.steps
    progress.say(
        f"{recipe.name}: {recipe.model.spec}, {task.train_images} training and {task.val_images} validation "
        f"{task.items}, {schedule.steps} steps of {data.batch} on {device_name(device)}."
    )
    norms = trained_batch_norms(model, frozen_norms) if checkpoint is None else []
    if recipe.engine.accumulate > 1 and norms:
        progress.say(
            f"Batch normalisation uses the statistics of each of the {recipe.engine.accumulate} accumulated parts, not "
            "of the whole batch, so the run differs a little from one with accumulate=1."
        )
    apart = [type(norm).__name__ for norm in norms if not isinstance(norm, SharedBatchNorm2d)]
    if accelerator.num_processes > 1 and apart:
        progress.say(
            f"{apart[0]} uses the statistics of each of the {accelerator.num_processes} processes, not of the whole "
            "batch, so the run differs a little from one with a single process."
        )
    step = checkpoint.state.step if checkpoint else 0
    metrics = Metrics(folder, step, recipe.engine.tensorboard) if accelerator.is_main_process else None
    trainer = Trainer(
        recipe=recipe,
        schedule=schedule,
        accelerator=accelerator,
        unwrapped=model,
        model=prepared,
        optimiser=prepared_optimiser,
        task=task,
        checkpoints=checkpoints,
        metrics=metrics,
        progress=progress,
        save_best=lambda: _export(trainer, folder / "best", must=False),
        stop=stop,
        ema=ema,
        frozen_norms=frozen_norms,
    )
    if checkpoint is not None:
        trainer.resume(checkpoint)
    return trainer


def _build(task: Task, quiet: bool) -> nn.Module:
    """The task's model, with the card of its task; `quiet` hides warnings that were shown before."""
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore", VitfocusWarning)
        model = task.build_model()
    remember_task(model, task.card())
    return model


def _export(trainer: Trainer, folder: Path, must: bool = True) -> None:
    """Save the weights (those of the moving average if there is one) as `vitfocus.save` does, atomically.

    Unless it `must`, a full disk is only reported, and the model saved before is kept.
    """
    model: nn.Module = trainer.ema.module if trainer.ema is not None else trainer.unwrapped
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        tensors = model_tensors(model)
        if trainer.accelerator.is_main_process:
            model = _build(trainer.task, quiet=True)
            model.load_state_dict(tensors)
    if trainer.step:
        mark_inserted(model, ())
    if trainer.accelerator.is_main_process:
        base, arguments = split_spec(trainer.recipe.model.spec)[0], trainer.task.arguments()
        try:
            replace_folder(folder, partial(save, model, base=base, arguments=arguments))
        except (OSError, VitfocusError) as error:
            if must:
                raise error if isinstance(error, VitfocusError) else not_written(folder, error) from None
            trainer.progress.say(
                f"The best model so far cannot be saved ({str(error).rstrip('.')}). Training continues."
            )
    trainer.accelerator.wait_for_everyone()


def _describe(trainer: Trainer) -> dict[str, Any]:
    """Scores, duration and environment, for results.json."""
    task, record, accelerator = trainer.task, trainer.record, trainer.accelerator
    return {
        "task": task.name,
        "train_images": task.train_images,
        "val_images": task.val_images,
        "broken_images": {split: reader.broken for split, reader in task.readers.items()},
        "compiled": task.context.compiled,
        **task.facts(),
        "recipe": trainer.recipe.name,
        "spec": trainer.recipe.model.spec,
        "steps": trainer.step,
        "epochs": trainer.schedule.epoch(trainer.step),
        "seconds": round(record.seconds, 3),
        "images_per_second": round(trainer.step * trainer.recipe.data.batch / max(record.seconds, 1e-9), 1),
        "headline": task.headline(record.last) if record.last else "",
        "last": record.last,
        "best": record.best,
        "parameters": sum(p.numel() for p in trainer.unwrapped.parameters()),
        "processes": accelerator.num_processes,
        "precision": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "device": device_name(accelerator.device),
        "versions": versions("accelerate", "python"),
    }
