"""The CIFAR-100 study, in one command; what is finished is skipped, so that it can be repeated until all is done.

    python studies/cifar100/study.py --data DATA              # everything that is unfinished, then the report
    python studies/cifar100/study.py --smoke                  # at toy scale on the CPU, into runs/cifar100-smoke
    python studies/cifar100/study.py train --data DATA --workers 4 --minutes 8.5
    python studies/cifar100/study.py keep vit-ti plain 0 --data DATA      # one model for the repository

Steps: select (the recipe, on a validation split), train (every arm from scratch), finetune (from the trained DeiT-Ti),
diagnose (that model on photographs), cost (of a training step), report. DATA holds CIFAR-100 in torchvision's layout
or as mosaics. Beside it, unless named, are looked for: `frost` (the published overlays), `imagenet1k-sample` (the
photographs) and `deit_tiny_patch16_224.safetensors`; the whole leaves out a step whose files are missing, and says so.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [] if str(HERE) in sys.path else [str(HERE)]

from arms import ARMS, CANDIDATES, finetune_runs, study_runs  # noqa: E402
from estimates import expected_seconds  # noqa: E402
from pool import Job, carry_out  # noqa: E402
from setting import FULL, SMOKE, Setting  # noqa: E402

from vitfocus.errors import VitfocusError  # noqa: E402
from vitfocus.train import Recipe  # noqa: E402

STEPS = ("all", "select", "train", "finetune", "diagnose", "cost", "report", "keep")


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one step, or all; 0 where nothing failed."""
    args = parse(arguments)
    began = time.monotonic()
    limit = 60 * args.minutes if args.minutes else float("inf")
    try:
        setting = setting_of(args)
        prepare(setting)
        study = Study(setting, lambda: limit - (time.monotonic() - began), args.mps)
        return study.run(args.step, args.rest)
    except VitfocusError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2


class Study:
    """The steps of one study in one place, within one time limit."""

    def __init__(self, setting: Setting, seconds_left: Callable[[], float], mps: bool = False) -> None:
        self.setting, self.seconds_left, self.mps = setting, seconds_left, mps

    def run(self, step: str, rest: Sequence[str]) -> int:
        """One step by name; `all` goes through them and leaves out those whose files are missing."""
        if step == "keep":
            return self.keep(rest)
        if step != "all":
            done: int = getattr(self, step)()
            return done
        code = 0
        for name in ("select", "train", "finetune", "diagnose", "cost"):
            if missing := self.missing(name):
                say(f"{name} is left out: {missing}")
                continue
            code = max(code, getattr(self, name)())
            if self.seconds_left() < 30 or (name == "select" and self.unselected()):
                say("the study is not finished: run the command again to go on")
                break
        return max(code, self.report())

    def missing(self, step: str) -> str:
        """What a step would need and does not have."""
        setting = self.setting
        if setting.scale.name != "full":
            return ""
        if step in ("finetune", "diagnose") and setting.weights is None:
            return "it needs the trained DeiT-Ti (--weights)"
        return "it needs photographs (--photos)" if step == "diagnose" and setting.photos is None else ""

    def select(self) -> int:
        """Try the candidates on the plain model."""
        from one_run import candidate_recipe, run_candidate

        names = list(CANDIDATES)[: self.setting.scale.candidates]
        jobs = [Job(f"selection/{name}", run_candidate, (name, self.setting)) for name in names]
        return self._pool(jobs, [candidate_recipe(name, self.setting) for name in names])

    def unselected(self) -> list[str]:
        """Candidates that have no result yet."""
        names = list(CANDIDATES)[: self.setting.scale.candidates]
        return [name for name in names if not self.setting.result(f"selection/{name}").is_file()]

    def train(self) -> int:
        """Every arm from scratch, by the selected recipe."""
        from one_run import recipe_of, run_from_scratch, selected

        chosen = selected(self.setting)
        say(f"the selected recipe: {', '.join(chosen)}")
        if left := self.unselected():
            say(f"candidates that were not tried: {', '.join(left)}")
        runs = list(study_runs(self.setting.scale.seeds))
        jobs = [Job(run.place, run_from_scratch, (run, self.setting)) for run in runs]
        return self._pool(jobs, [recipe_of(run, self.setting, chosen) for run in runs])

    def finetune(self) -> int:
        """Every arm from the trained DeiT-Ti."""
        from finetune import recipe_of, run_finetuning

        runs = list(finetune_runs(self.setting.scale.seeds))
        jobs = [Job(run.place, run_finetuning, (run, self.setting)) for run in runs]
        return self._pool(jobs, [recipe_of(run, self.setting) for run in runs])

    def diagnose(self) -> int:
        """The trained DeiT-Ti on photographs."""
        if (self.setting.results / "diagnosis.json").is_file():
            say("diagnosis.json is there already")
            return 0
        from diagnosis import run_diagnosis

        say(f"diagnosis: {run_diagnosis(self.setting)}")
        return 0

    def cost(self) -> int:
        """The training step of each arm; several workers compile ahead, then one measures alone."""
        from cost import GROUPS, compile_ahead, is_complete, run_cost
        from measure import device_at_hand

        if is_complete(self.setting):
            say("cost.json is complete")
            return 0
        if self.setting.workers > 1 and device_at_hand().type == "cuda":
            places = [(group, name) for group in GROUPS for name in ARMS[group]]
            jobs = [
                Job(f"compile/{group}/{name}", compile_ahead, (group, name, self.setting)) for group, name in places
            ]
            self._carry_out(jobs, lambda job: 100.0)
        say(f"cost: {run_cost(self.setting, self.seconds_left, say)}")
        return 0

    def report(self) -> int:
        """Tables and page from what is finished."""
        import report

        say(f"report: {report.write(self.setting.results)}")
        return 0

    def keep(self, rest: Sequence[str]) -> int:
        """Keep one model."""
        if len(rest) != 3 or not rest[2].isdigit():
            raise VitfocusError("keep wants a group, an arm and a seed: `study.py keep vit-ti plain 0`.")
        from keep import keep

        say(keep(self.setting, rest[0], rest[1], int(rest[2])))
        return 0

    def _pool(self, jobs: Sequence[Job], recipes: Sequence[Recipe]) -> int:
        """Carry out what is unfinished, side by side; 1 where something failed."""
        from one_run import is_finished

        pairs = zip(jobs, recipes, strict=True)
        todo = [job for job, recipe in pairs if not is_finished(job.name, recipe, self.setting)]
        say(f"{len(jobs) - len(todo)} of {len(jobs)} are finished")
        if not todo:
            return 0
        return self._carry_out(todo, lambda job: expected_seconds(job.name, self.setting))

    def _carry_out(self, jobs: Sequence[Job], estimate: Callable[[Job], float]) -> int:
        from mps import shared_gpu

        with shared_gpu(self.mps, say):
            outcome = carry_out(
                jobs,
                workers=self.setting.workers,
                work=self.setting.work,
                seconds_left=self.seconds_left,
                estimate=estimate,
                say=say,
            )
        left = len(outcome.left) + len(outcome.stopped)
        if outcome.left and self.seconds_left() < float("inf"):
            say(f"the next run, {outcome.left[0]}, would not have ended in time")
        say(f"{len(outcome.done)} done, {len(outcome.failed)} failed, {left} left")
        return 1 if outcome.failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", default="all", choices=STEPS)
    parser.add_argument("rest", nargs="*", help="of keep: GROUP ARM SEED")
    parser.add_argument("--data", type=Path, help="the folder of CIFAR-100")
    parser.add_argument("--results", type=Path, help="default: the study's own results")
    parser.add_argument("--work", type=Path, help="checkpoints, logs, models (default: runs/cifar100)")
    parser.add_argument("--frost", type=Path, help="the folder of frost overlays")
    parser.add_argument("--weights", type=Path, help="the trained DeiT-Ti, safetensors")
    parser.add_argument("--photos", type=Path, help="ImageNet photographs in class folders")
    parser.add_argument("--limit", type=int, help="photographs that the diagnosis looks at (default: all)")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side on one device")
    parser.add_argument("--minutes", type=float, default=0, help="end within so many minutes (default: no limit)")
    parser.add_argument("--mps", action="store_true", help="share the GPU by NVIDIA's Multi-Process Service")
    parser.add_argument("--smoke", action="store_true", help="toy scale on the CPU, without data if none is named")
    return parser.parse_intermixed_args(arguments)


def setting_of(args: argparse.Namespace) -> Setting:
    """Folders as named, or found beside the data; the smoke scale writes elsewhere."""
    scale = SMOKE if args.smoke else FULL
    if args.data is None and not args.smoke and args.step in ("all", "select", "train", "finetune", "cost", "keep"):
        raise VitfocusError(f"{args.step} needs CIFAR-100: name its folder with --data.")
    for option in ("data", "frost", "weights", "photos"):
        if (path := getattr(args, option)) is not None and not path.exists():
            raise VitfocusError(f"There is no {path} (--{option}).")

    def beside(given: Path | None, name: str) -> Path | None:
        found = args.data.resolve().parent / name if args.data is not None else None
        return given if given is not None or found is None or not found.exists() else found

    work = args.work or Path("runs") / ("cifar100-smoke" if args.smoke else "cifar100")
    setting = Setting(
        data=args.data.resolve() if args.data is not None else None,
        results=args.results or (work / "results" if args.smoke else HERE / "results"),
        work=work.resolve(),
        frost=beside(args.frost, "frost"),
        weights=beside(args.weights, "deit_tiny_patch16_224.safetensors"),
        photos=beside(args.photos, "imagenet1k-sample"),
        scale=scale,
        workers=max(1, args.workers),
        limit=args.limit,
    )
    setting.data_keys()
    return setting


def prepare(setting: Setting) -> None:
    """Compilers share their caches and do not crowd each other out; processes that are started inherit this."""
    setting.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(setting.work / "compiled"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(setting.work / "compiled" / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")


def say(text: str) -> None:
    """One line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running jobs are asked to stop as well
    sys.exit(main())
