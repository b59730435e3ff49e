"""The training loop.

The random numbers of a step depend on the seed and the number of the step only, so a run that was stopped at any step
continues from its checkpoint exactly as an uninterrupted run, with any number of processes.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import nn

from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import running_eagerly
from vitfocus.core.progress import Progress
from vitfocus.data.classification.batches import ResidentBatches
from vitfocus.data.loader import STEP, seed_for
from vitfocus.recipes import Recipe
from vitfocus.tasks.base import Task
from vitfocus.train.checkpoint import (
    Checkpoint,
    Checkpoints,
    RunRecord,
    RunState,
    all_finite,
    gather_tensors,
    restore,
)
from vitfocus.train.cuda_graph import CapturedStep, can_capture
from vitfocus.train.log import AttentionLog, Metrics, row_text
from vitfocus.train.optimiser import TrainingSchedule, set_learning_rate

Batch = TypeVar("Batch")


class StopRequested(Exception):
    """Ends an evaluation when the run was asked to stop."""


class StopRequest:
    """A context in which SIGTERM and Ctrl-C ask the run to stop soon, with a checkpoint.

    A second signal has its usual effect. Signals are handled in the main thread only.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self._before[number])

    def any_process(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set in any process. All processes must call this."""
        if self.accelerator.num_processes == 1:
            return list(flags)
        summed = self.accelerator.reduce(torch.tensor(flags, dtype=torch.float32, device=self.accelerator.device))
        return [bool(value > 0) for value in summed.tolist()]

    def until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of an evaluation; raises `StopRequested` before the next one after any process got a signal.

        Processes may have different numbers of batches, so those that are done wait for the others.
        """
        iterator = iter(batches)
        while True:
            found = list(islice(iterator, 1))
            stop, left = self.any_process(bool(self.signal), bool(found))
            if stop:
                raise StopRequested
            if not left:
                return
            yield from found


@dataclass
class Trainer:
    """One run.

    `model` is `unwrapped` as accelerate prepared it; `frozen_norms` are batch normalisations that stay in eval mode.
    """

    recipe: Recipe
    schedule: TrainingSchedule
    accelerator: Accelerator
    unwrapped: nn.Module
    model: nn.Module
    optimiser: Any
    task: Task
    checkpoints: Checkpoints
    metrics: Metrics | None
    progress: Progress
    save_best: Callable[[], None]
    stop: StopRequest
    ema: ModelEmaV3 | None = None
    frozen_norms: list[nn.Module] = field(default_factory=list)
    record: RunRecord = field(default_factory=RunRecord)
    step: int = 0
    signal: int = 0  # that ended the run early
    before_step: Callable[[int], None] | None = None
    score: str = ""  # of the last evaluation, for the progress line

    def __post_init__(self) -> None:
        self.attention = AttentionLog(self.task, self.unwrapped)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint."""
        state = checkpoint.state
        if state.images != self.schedule.images:
            raise VitfocusError(
                f"The run began with {state.images} training {self.task.items} and there are {self.schedule.images} "
                "now, so it cannot be resumed: restore the data, or train into another folder."
            )
        restore(checkpoint, self.unwrapped, self.optimiser.optimizer, self.ema and self.ema.module)
        if self.accelerator.scaler is not None and state.scaler:
            self.accelerator.scaler.load_state_dict(state.scaler)
        self.record, self.step = state.record, state.step

    def run(self) -> bool:
        """Train to the end; returns False if a signal stopped the run early, after a checkpoint was written."""
        with closing(self.start(self.schedule.steps)) as batches, self.stop:
            if self.record.evaluation_due:  # the run was stopped before or during the evaluation of this step
                if not self._evaluate():
                    return self._stopped()
                self._checkpoint(must=False)
            while self.step < self.schedule.steps:
                epoch = self.schedule.ends_epoch(self.step)
                self._call_before_step()
                self.train_step(batches)
                if self.after_step(epoch):
                    return self._stopped()
        return True

    def _stopped(self) -> bool:
        self.signal = self.stop.signal or signal.SIGTERM
        self.progress.say(f"Stopped at step {self.step} by a signal; --resume auto continues from there.")
        return False

    def start(self, stop: int) -> Generator[Any, None, None]:
        """Start the clocks, and the batches of the steps up to `stop`."""
        self._train_mode()
        self._loss_sums = self._new_window()
        self._counted_until, self._saved_at, self._logged_at = (time.perf_counter(),) * 3
        self._logged_step = self.step
        self._device_batches, self._captured = self._capture()
        self.progress.done = self.step
        self.progress.start()
        return self.task.iterate(self.step, stop)

    def _call_before_step(self) -> None:
        """Call the user's function, which may wait: its time is not counted as the run's."""
        if self.before_step is None:
            return
        began = time.perf_counter()
        self.before_step(self.step)
        waited = time.perf_counter() - began
        self._counted_until += waited
        self._saved_at += waited
        self._logged_at += waited

    def train_step(self, batches: Iterator[Any]) -> None:
        """Forward, backward and update, over the parts of one batch."""
        step, accelerator = self.step, self.accelerator
        if accelerator.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # memory of the last step's CUDA graph may be reused
        torch.manual_seed(seed_for(self.recipe.engine.seed, STEP, step, accelerator.process_index))
        set_learning_rate(self.optimiser, self.schedule.learning_rate(step))
        if self._captured is not None and self._device_batches is not None:
            epoch = self.schedule.epoch(step)
            settled = epoch >= self.recipe.loss.adl_warmup_epochs  # a graph would freeze a rising weight
            self._loss_sums += self._captured(self._device_batches.inputs(step), epoch, settled)
        else:
            self._loss_sums += self._eager_step(batches)
        if self.ema is not None:
            self.ema.update(self.unwrapped)
        self.step += 1
        self.record.window_steps += 1

    def _capture(self) -> tuple[ResidentBatches | None, CapturedStep | None]:
        """A step to be captured as a CUDA graph: on one process and one CUDA device, in one part, without a scaler."""
        engine, accelerator, optimiser = self.recipe.engine, self.accelerator, self.optimiser.optimizer
        batches = self.task.capturable_batches()
        if (
            batches is None
            or engine.record == "no"
            or engine.accumulate > 1
            or accelerator.device.type != "cuda"
            or accelerator.num_processes > 1
            or accelerator.scaler is not None
            or not can_capture(optimiser)
        ):
            return None, None
        return batches, CapturedStep(self._step_on_device, self.unwrapped, optimiser, accelerator.device)

    def _step_on_device(self, inputs: tuple[torch.Tensor, ...], epoch: float) -> torch.Tensor:
        assert self._device_batches is not None
        optimiser, clip = self.optimiser.optimizer, self.recipe.optimiser.clip
        batch = self._device_batches.make(*inputs)
        if (first := self.task.first_pass(self.model, batch)) is not None:
            first.backward()
        terms = self._terms(batch, epoch, first)
        terms.sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(self.unwrapped.parameters(), clip)
        optimiser.step()
        optimiser.zero_grad()
        return terms.detach()

    def _eager_step(self, batches: Iterator[Any]) -> torch.Tensor:
        accelerator, parts = self.accelerator, self.recipe.engine.accumulate
        sums = torch.zeros_like(self._loss_sums)
        for part in range(parts):
            batch = next(batches)
            with accelerator.no_sync(self.model):
                if (first := self.task.first_pass(self.model, batch)) is not None:
                    accelerator.backward(first / parts)
            with accelerator.no_sync(self.model) if part < parts - 1 else nullcontext():
                terms = self._terms(batch, self.schedule.epoch(self.step), first)
                accelerator.backward(terms.sum() / parts)
            sums += terms.detach() / parts
        if self.recipe.optimiser.clip:
            accelerator.clip_grad_norm_(self.unwrapped.parameters(), self.recipe.optimiser.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return sums

    def _terms(self, batch: Any, epoch: float, first: torch.Tensor | None) -> torch.Tensor:
        """The loss terms of a part; that of an additional pass is listed last, without its gradient."""
        return torch.stack([*self.task.terms(self.model, batch, epoch), *([] if first is None else [first.detach()])])

    def after_step(self, epoch: int) -> bool:
        """Log, evaluate and write a checkpoint, as is due; returns whether to stop early."""
        engine, last = self.recipe.engine, self.step == self.schedule.steps
        log = self.step % engine.log_every == 0 or last
        if log:
            self._log()
        else:
            self.progress.update(self.step)
        stop, late = self._stop_or_late(log)
        self.record.evaluation_due = last or self._evaluation_is_due(epoch)
        if self.record.evaluation_due and not stop:
            try:
                stop = not self._evaluate()
            except VitfocusError:  # such as a damaged validation image; the steps since the last checkpoint are kept
                if self.accelerator.num_processes == 1:  # others may wait for this one in the evaluation
                    self._checkpoint(must=False)
                raise
        by_steps = bool(engine.checkpoint_steps) and self.step % engine.checkpoint_steps == 0
        if last or stop or late or by_steps:
            self._checkpoint(must=last or stop)
        return stop

    def _evaluation_is_due(self, epoch: int) -> bool:
        engine = self.recipe.engine
        if engine.evaluate_steps:
            return self.step % engine.evaluate_steps == 0
        return bool(epoch and engine.evaluate_every and epoch % engine.evaluate_every == 0)

    def _stop_or_late(self, log: bool) -> tuple[bool, bool]:
        """Whether to stop, and whether the last checkpoint is old. Several processes agree only when they log."""
        minutes = self.recipe.engine.checkpoint_minutes
        late = bool(minutes) and time.perf_counter() - self._saved_at > 60 * minutes
        if self.accelerator.num_processes > 1 and not log:
            return False, False
        stop, late = self.stop.any_process(bool(self.stop.signal), late)
        return stop, late

    def _log(self) -> None:
        """Write one row of metrics: means over the steps since the last one. A loss that is not finite ends the run."""
        sums = self.accelerator.reduce(self._loss_sums, "mean").tolist()
        terms = {name: total / self.record.window_steps for name, total in zip(self.task.names, sums, strict=True)}
        loss = sum(terms.values())
        if loss - loss != 0.0:
            raise self._diverged(", ".join(f"{name}={value:g}" for name, value in terms.items()))
        now = time.perf_counter()
        speed = (self.step - self._logged_step) * self.recipe.data.batch / max(1e-9, now - self._logged_at)
        row = {"kind": "train", "step": self.step, "epoch": self.schedule.epoch(self.step), "loss": loss, **terms}
        row |= {"lr": self.schedule.learning_rate(self.step - 1), "images_per_second": speed}
        self.progress.update(self.step, row_text(row, self.score, self.task.items))
        if self.metrics is not None:
            self.metrics.add(row)
        self._logged_at, self._logged_step = now, self.step
        self.record.window, self.record.window_steps = [], 0
        self._loss_sums = self._new_window()

    def _evaluate(self) -> bool:
        """Evaluate the model, and its moving average, whose scores count if there is one; False if it was stopped."""
        try:
            with self._clock_stopped():
                scores = self._scores()
        except StopRequested:
            return False
        finally:
            self._train_mode()
        row = {"kind": "eval", "step": self.step, "epoch": self.schedule.epoch(self.step), **scores}
        self.record.last, self.record.evaluation_due = row, False
        self.score = f"{self.task.best} {scores[self.task.best]:.4f}"
        self.progress.say(f"epoch {row['epoch']:.4g}: {self.task.headline(scores)}")
        if self.metrics is not None:
            self.metrics.add(row)
        with self._clock_stopped():
            self._log_attention()
            if scores[self.task.best] > self.record.best.get(self.task.best, -1.0):
                self.record.best = row
                self.save_best()
        return True

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        """Leave time that is not spent on training out of the speed that is logged."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._logged_at += time.perf_counter() - began

    def _log_attention(self) -> None:
        """Write one row of readings by layer, and report a collapse or that they stopped changing."""
        if self.metrics is None:
            return
        model: nn.Module = self.unwrapped if self.ema is None else self.ema.module
        row = self.attention.row(model, self.step, self.schedule.epoch(self.step))
        if row is not None:
            self.metrics.add(row)
            peak = self.recipe.optimiser.lr
            if said := self.attention.sentence(row, self.schedule.learning_rate(self.step - 1) / peak if peak else 0):
                self.progress.say(said)

    def _scores(self) -> dict[str, float]:
        engine = self.recipe.engine
        # The model is compiled again for evaluation, which takes longer than a single evaluation without compiling.
        once = not (engine.evaluate_every or engine.evaluate_steps) and self.accelerator.num_processes == 1
        with running_eagerly() if once else nullcontext():
            scores = self.task.evaluate(self.unwrapped if once else self.model, self.accelerator)
        if self.ema is None:
            return scores
        plain = {f"{name}_raw": value for name, value in scores.items()}
        return {**self.task.evaluate(self.ema.module, self.accelerator), **plain}

    def _checkpoint(self, must: bool) -> None:
        """Write a checkpoint if all weights are finite. If it cannot be written, that is an error only if it `must`."""
        accelerator = self.accelerator
        finite = all_finite(self.unwrapped) and bool(self._loss_sums.isfinite().all())
        if self.stop.any_process(not finite)[0]:
            raise self._diverged("weights that are not finite")
        self._loss_sums = accelerator.reduce(self._loss_sums, "mean")
        self.record.window = self._loss_sums.tolist()
        now = time.perf_counter()
        self.record.seconds += now - self._counted_until
        self._counted_until = self._saved_at = now
        tensors, optimiser = gather_tensors(self.unwrapped, self.optimiser.optimizer, self.ema and self.ema.module)
        state = RunState(
            step=self.step,
            recipe=self.recipe.to_toml(),
            images=self.schedule.images,
            record=self.record,
            scaler=accelerator.scaler.state_dict() if accelerator.scaler is not None else {},
            optimiser=optimiser,
        )
        if self.metrics is not None:
            self.metrics.catch_up()  # a run resumed from this checkpoint does not write earlier rows again
        if accelerator.is_main_process:
            try:
                self.checkpoints.write(Checkpoint(state, tensors))
            except VitfocusError as error:
                if must:
                    raise
                self.progress.say(f"{error} Training continues.")
        accelerator.wait_for_everyone()
        self._logged_at += time.perf_counter() - now

    def _diverged(self, what: str) -> VitfocusError:
        steps = self.checkpoints.steps()
        where = (
            f"the last good checkpoint is {self.checkpoints.folder / f'{steps[0]:08d}'}"
            if steps
            else "no checkpoint was written yet"
        )
        return VitfocusError(
            f"The run diverged by step {self.step} ({what}); {where}. A lower optimiser.lr, a longer warm-up or "
            "optimiser.clip=1 may help."
        )

    def _new_window(self) -> torch.Tensor:
        start = self.record.window or [0.0] * len(self.task.names)
        return torch.tensor(start, dtype=torch.float64, device=self.accelerator.device)

    def _train_mode(self) -> None:
        self.model.train()
        for module in self.frozen_norms:
            module.eval()
