"""The training loop.

Everything random in a step follows from the seed and the step's number, so a run that stops at any step goes on from
its checkpoint as if it had not, whatever the number of processes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import nn

from vitfocus.core.errors import VitfocusError
from vitfocus.core.progress import Progress
from vitfocus.data.sample_order import STEP, seed_for
from vitfocus.recipes.settings import Recipe
from vitfocus.tasks.base import Task
from vitfocus.train.checkpoint import Checkpoints, State
from vitfocus.train.cuda_graph import RecordedStep
from vitfocus.train.metrics import Metrics, row_text
from vitfocus.train.schedule import Plan, set_rate
from vitfocus.train.signals import StopWish
from vitfocus.train.state import all_finite, gather, restore


@dataclass
class Record:
    """What a run remembers besides its tensors; it is kept in every checkpoint."""

    best: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    window: list[float] = field(default_factory=list)  # sums of the loss terms since the last row of metrics
    window_steps: int = 0


@dataclass
class Engine:
    """One run: `model` is `raw` as accelerate prepared it; `resting` are frozen normalisations."""

    recipe: Recipe
    plan: Plan
    accelerator: Accelerator
    raw: nn.Module
    model: nn.Module
    optimiser: Any
    task: Task
    checkpoints: Checkpoints
    metrics: Metrics | None
    progress: Progress
    save_best: Callable[[], None]
    ema: ModelEmaV3 | None = None
    resting: list[nn.Module] = field(default_factory=list)
    record: Record = field(default_factory=Record)
    step: int = 0
    signal: int = 0  # the one that ended the run early
    before_step: Callable[[int], None] | None = None
    score: str = ""  # the last evaluation's, for the progress line

    def resume(self, state: State) -> None:
        """Go back to a checkpoint."""
        if state.rest["images"] != self.plan.images:
            raise VitfocusError(
                f"The run began with {state.rest['images']} training images and there are {self.plan.images} now, so "
                "it cannot go on: restore the data, or train into another folder."
            )
        restore(state, self.raw, self.optimiser.optimizer, self.ema and self.ema.module)
        if self.accelerator.scaler is not None and state.rest["scaler"]:
            self.accelerator.scaler.load_state_dict(state.rest["scaler"])
        self.record, self.step = Record(**state.rest["record"]), state.step

    def run(self) -> bool:
        """Train to the end; False where a signal stopped it before, with a checkpoint written."""
        with closing(self.begin(self.plan.steps)) as parts, StopWish() as wish:
            while self.step < self.plan.steps:
                epoch = self.plan.ends_epoch(self.step)
                self._call_before_step()
                self.one_step(parts)
                if self.after_step(epoch, wish):
                    self.signal = wish.signal or signal.SIGTERM
                    self.progress.say(f"Stopped at step {self.step} by a signal; --resume auto continues from there.")
                    return False
        return True

    def begin(self, stop: int) -> Generator[Any, None, None]:
        """Start the clocks, and the batches of the steps up to `stop`."""
        self._train_mode()
        self._sums = self._window()
        self._since, self._saved, self._rated = (time.perf_counter(),) * 3
        self._rated_step = self.step
        self._recorded = RecordedStep.of(self)
        self.progress.done = self.step
        self.progress.start()
        return self.task.iterate(self.step, stop)

    def _call_before_step(self) -> None:
        """Let the caller know, who may make the run wait: such time is not counted as the run's."""
        if self.before_step is None:
            return
        began = time.perf_counter()
        self.before_step(self.step)
        waited = time.perf_counter() - began
        self._since += waited
        self._saved += waited
        self._rated += waited

    def one_step(self, parts: Iterator[Any]) -> None:
        """Forward, backward and update, over the parts of one batch."""
        step, accelerator = self.step, self.accelerator
        if accelerator.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # what the step before left in a graph's memory may be reused
        torch.manual_seed(seed_for(self.recipe.engine.seed, STEP, step, accelerator.process_index))
        set_rate(self.optimiser, self.plan.rate(step))
        self._sums += self._recorded(step) if self._recorded is not None else self._parts_of_step(parts)
        if self.ema is not None:
            self.ema.update(self.raw)
        self.step += 1
        self.record.window_steps += 1

    def _parts_of_step(self, parts: Iterator[Any]) -> torch.Tensor:
        accelerator, count = self.accelerator, self.recipe.engine.accumulate
        sums = torch.zeros_like(self._sums)
        for part in range(count):
            batch = next(parts)
            with accelerator.no_sync(self.model) if part < count - 1 else nullcontext():
                terms = torch.stack(self.task.terms(self.model, batch, self.plan.epoch(self.step)))
                accelerator.backward(terms.sum() / count)
            sums += terms.detach() / count
        if self.recipe.optimiser.clip:
            accelerator.clip_grad_norm_(self.raw.parameters(), self.recipe.optimiser.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return sums

    def after_step(self, epoch: int, wish: StopWish) -> bool:
        """Log, evaluate, checkpoint, as is due; whether to stop."""
        engine, last = self.recipe.engine, self.step == self.plan.steps
        log = self.step % engine.log_every == 0 or last
        if log:
            self._log()
        else:
            self.progress.update(self.step)
        stop, late = self._agree(wish, log)
        if last or self._evaluation_is_due(epoch):
            self._evaluate()
        by_steps = bool(engine.checkpoint_steps) and self.step % engine.checkpoint_steps == 0
        if last or stop or late or by_steps:
            self._checkpoint(must=last or stop)
        return stop and not last

    def _evaluation_is_due(self, epoch: int) -> bool:
        engine = self.recipe.engine
        if engine.evaluate_steps:
            return self.step % engine.evaluate_steps == 0
        return bool(epoch and engine.evaluate_every and epoch % engine.evaluate_every == 0)

    def _agree(self, wish: StopWish, log: bool) -> tuple[bool, bool]:
        """Whether any process was asked to stop, and whether the last checkpoint is old; many agree when they log."""
        minutes = self.recipe.engine.checkpoint_minutes
        mine = [bool(wish.signal), bool(minutes) and time.perf_counter() - self._saved > 60 * minutes]
        if self.accelerator.num_processes == 1:
            return mine[0], mine[1]
        if not log:
            return False, False
        flags = self.accelerator.reduce(torch.tensor(mine, dtype=torch.float32, device=self.accelerator.device))
        return bool(flags[0] > 0), bool(flags[1] > 0)

    def _log(self) -> None:
        """One row of metrics: means over the steps since the last one; a loss that is not finite ends the run."""
        sums = self.accelerator.reduce(self._sums, "mean").tolist()
        terms = {name: total / self.record.window_steps for name, total in zip(self.task.names, sums, strict=True)}
        loss = sum(terms.values())
        if loss - loss != 0.0:
            raise self._diverged(", ".join(f"{name}={value:g}" for name, value in terms.items()))
        now = time.perf_counter()
        speed = (self.step - self._rated_step) * self.recipe.data.batch / max(1e-9, now - self._rated)
        row = {"kind": "train", "step": self.step, "epoch": self.plan.epoch(self.step), "loss": loss, **terms}
        row |= {"lr": self.plan.rate(self.step - 1), "images_per_second": speed}
        self.progress.update(self.step, row_text(row, self.score))
        if self.metrics is not None:
            self.metrics.add(row)
        self._rated, self._rated_step = now, self.step
        self.record.window, self.record.window_steps = [], 0
        self._sums = self._window()

    def _evaluate(self) -> None:
        """Evaluate the model, and its moving average where there is one: the average is what counts then."""
        began, engine = time.perf_counter(), self.recipe.engine
        # A model is compiled anew for evaluation, which takes longer than a single evaluation does as it is.
        once = not (engine.evaluate_every or engine.evaluate_steps) and self.accelerator.num_processes == 1
        with torch.compiler.set_stance("force_eager") if once else nullcontext():
            scores = self.task.evaluate(self.raw if once else self.model, self.accelerator)
        if self.ema is not None:
            plain = {f"{name}_raw": value for name, value in scores.items()}
            scores = {**self.task.evaluate(self.ema.module, self.accelerator), **plain}
        self._train_mode()
        row = {"kind": "eval", "step": self.step, "epoch": self.plan.epoch(self.step), **scores}
        self.record.last = row
        self.score = f"{self.task.best} {scores[self.task.best]:.4f}"
        self.progress.say(f"epoch {row['epoch']:.4g}: {self.task.headline(scores)}")
        if self.metrics is not None:
            self.metrics.add(row)
        if scores[self.task.best] > self.record.best.get(self.task.best, -1.0):
            self.record.best = row
            self.save_best()
        self._rated += time.perf_counter() - began

    def _checkpoint(self, must: bool) -> None:
        """Write one, provided that the run is sound. A full disk is reported; it is fatal at the end only."""
        accelerator = self.accelerator
        sound = all_finite(self.raw) and bool(self._sums.isfinite().all())
        votes = accelerator.reduce(torch.tensor(float(sound), device=accelerator.device))
        if votes < accelerator.num_processes:
            raise self._diverged("weights that are not finite")
        self._sums = accelerator.reduce(self._sums, "mean")
        self.record.window = self._sums.tolist()
        now = time.perf_counter()
        self.record.seconds += now - self._since
        self._since = self._saved = now
        scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else {}
        rest = {
            "recipe": self.recipe.to_toml(),
            "images": self.plan.images,
            "record": vars(self.record),
            "scaler": scaler,
        }
        state = gather(self.step, self.raw, self.optimiser.optimizer, self.ema and self.ema.module, rest)
        if self.metrics is not None:
            self.metrics.catch_up()  # who goes on from this checkpoint does not write earlier rows again
        if accelerator.is_main_process:
            try:
                self.checkpoints.write(state)
            except VitfocusError as error:
                if must:
                    raise
                self.progress.say(f"{error} The run goes on.")
        accelerator.wait_for_everyone()
        self._rated += time.perf_counter() - now

    def _diverged(self, what: str) -> VitfocusError:
        steps = self.checkpoints.steps()
        where = (
            f"the last good checkpoint is {self.checkpoints.folder / f'{steps[0]:08d}'}"
            if steps
            else "no checkpoint was written yet"
        )
        return VitfocusError(
            f"The run broke down by step {self.step} ({what}); {where}. A lower optimiser.lr, more warm-up or "
            "optimiser.clip=1 may help."
        )

    def _window(self) -> torch.Tensor:
        start = self.record.window or [0.0] * len(self.task.names)
        return torch.tensor(start, dtype=torch.float64, device=self.accelerator.device)

    def _train_mode(self) -> None:
        self.model.train()
        for module in self.resting:
            module.eval()


def run_folder(out: str | Path | None, recipe: Recipe) -> Path:
    """Where a run's files go."""
    return Path(out) if out else Path("runs") / recipe.name
