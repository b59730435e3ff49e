"""The CIFAR-100 study, in one command; what is finished is skipped, so that it can be repeated until all is done.

    python studies/cifar100/study.py --data DATA              # everything that is unfinished, then the report
    python studies/cifar100/study.py --smoke                  # at toy scale on the CPU, into runs/cifar100-smoke
    python studies/cifar100/study.py --rehearse --data DATA   # some seconds of each kind of run: what would fail?
    python studies/cifar100/study.py select,train --data DATA --workers 4 --minutes 9
    python studies/cifar100/study.py keep vit-ti plain 0 --data DATA      # one model for the repository

Steps, one or several: select (the recipe, on a validation split), train (every arm from scratch), finetune (from the
trained DeiT-Ti; together with train where both are named), diagnose (that model on photographs), cost (of a training
step), report. DATA holds CIFAR-100 in torchvision's layout or as mosaics. Beside it, unless named, are looked for:
`frost` (the published overlays), `imagenet1k-sample` (the photographs) and `deit_tiny_patch16_224.safetensors`; the
whole leaves out a step whose files are missing, and says so.
On a machine that is gone afterwards, --cache-out keeps what was compiled in a file for --cache-in the next time.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
sys.path[:0] = [] if str(HERE) in sys.path else [str(HERE)]

from arms import ARMS, CANDIDATES, SCRATCH, TUNED, Run, study_runs  # noqa: E402
from caches import compiled, pack, share, unpack  # noqa: E402
from estimates import expected, remember  # noqa: E402
from pool import Expectation, Job, carry_out  # noqa: E402
from setting import FULL, REHEARSAL, SMOKE, Setting  # noqa: E402

from vitfocus.core.errors import VitfocusError, nearest  # noqa: E402
from vitfocus.train import Recipe  # noqa: E402

STEPS = ("select", "train", "finetune", "diagnose", "cost", "report", "keep")
#: Seconds that are left at the end for writing the compilers' cache, and that a diagnosis takes.
PACKING, DIAGNOSING = 12.0, 75.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one step, or all; 0 where nothing failed."""
    args = parse(arguments)
    began = time.monotonic()
    limit = 60 * args.minutes - (PACKING if args.cache_out else 0) if args.minutes else float("inf")
    try:
        setting = setting_of(args)
        prepare(setting)
        if args.cache_in is not None:
            recall(args.cache_in)
        try:
            study = Study(setting, lambda: limit - (time.monotonic() - began), args.mps)
            return study.run(args.step, args.rest)
        finally:
            if args.cache_out is not None:
                say(pack(compiled(), args.cache_out, round(1e6 * args.cache_megabytes)))
    except VitfocusError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2


class Study:
    """The steps of one study in one place, within one time limit."""

    def __init__(self, setting: Setting, seconds_left: Callable[[], float], mps: bool = False) -> None:
        self.setting, self.seconds_left, self.mps = setting, seconds_left, mps

    def run(self, step: str, rest: Sequence[str]) -> int:
        """Steps by name, as far as the time reaches; `all` leaves out those whose files are missing."""
        if step == "keep":
            return self.keep(rest)
        code, names = 0, list(self.setting.scale.steps) if step == "all" else step.split(",")
        if step == "all":
            for name, missing in [(name, missing) for name in names if (missing := self.missing(name))]:
                say(f"{name} is left out: {missing}")
                names.remove(name)
        both = {"train", "finetune"} <= set(names)
        for name in names:
            if both and name == "finetune":
                continue  # it was done together with train: a device is not left idle between them
            code = max(code, self.make((*SCRATCH, *TUNED)) if both and name == "train" else getattr(self, name)())
            more = name != names[-1]
            if more and (self.seconds_left() < 30 or (name == "select" and self.unselected())):
                say("the study is not finished: run the command again to go on")
                break
        whole = step == "all" and self.setting.scale.name != "rehearsal"
        return max(code, self.report()) if whole else code

    def missing(self, step: str) -> str:
        """What a step would need and does not have."""
        setting = self.setting
        if setting.scale.name == "smoke":
            return ""
        if step in ("finetune", "diagnose") and setting.weights is None:
            return "it needs the trained DeiT-Ti (--weights)"
        return "it needs photographs (--photos)" if step == "diagnose" and setting.photos is None else ""

    def select(self) -> int:
        """Try the candidates on the plain model."""
        from one_run import candidate_recipe, run_candidate

        if self.setting.result("vit-ti/plain/seed0").is_file() and self.unselected():
            say(f"arms are trained already, so the recipe stays; not tried: {', '.join(self.unselected())}")
            return 0
        names = list(CANDIDATES)[: self.setting.scale.candidates]
        jobs = [Job(f"selection/{name}", run_candidate, (name, self.setting)) for name in names]
        return self._pool(jobs, [candidate_recipe(name, self.setting) for name in names])

    def unselected(self) -> list[str]:
        """Candidates that have no result yet."""
        names = list(CANDIDATES)[: self.setting.scale.candidates]
        return [name for name in names if not self.setting.result(f"selection/{name}").is_file()]

    def train(self) -> int:
        """Every arm from scratch, by the selected recipe."""
        return self.make(SCRATCH)

    def finetune(self) -> int:
        """Every arm from the trained DeiT-Ti."""
        return self.make(TUNED)

    def make(self, groups: Sequence[str]) -> int:
        """The runs of some groups, side by side."""
        import finetune
        import one_run

        chosen: tuple[str, ...] = ()
        if set(groups) & set(SCRATCH):
            chosen = one_run.selected(self.setting)
            say(f"the selected recipe: {', '.join(chosen)}")
            if left := self.unselected():
                say(f"candidates that were not tried: {', '.join(left)}")
        jobs, recipes = [], []
        for run in self.chosen(study_runs(groups, self.setting.scale.seeds)):
            tuned = run.arm.group in TUNED
            jobs.append(
                Job(run.place, finetune.run_finetuning if tuned else one_run.run_from_scratch, (run, self.setting))
            )
            recipes.append(
                finetune.recipe_of(run, self.setting) if tuned else one_run.recipe_of(run, self.setting, chosen)
            )
        return self._pool(jobs, recipes)

    def chosen(self, runs: Iterable[Run]) -> list[Run]:
        """Those that the scale names, or all."""
        places = self.setting.scale.places
        return [run for run in runs if not places or f"{run.arm.group}/{run.arm.name}" in places]

    def diagnose(self) -> int:
        """The trained DeiT-Ti on photographs."""
        if (self.setting.results / "diagnosis.json").is_file():
            say("diagnosis.json is there already")
            return 0
        if self.seconds_left() < DIAGNOSING:
            say("no time is left for the diagnosis")
            return 0
        from diagnosis import run_diagnosis

        say(f"diagnosis: {run_diagnosis(self.setting)}")
        return 0

    def cost(self) -> int:
        """The training step of each arm; several workers compile ahead, then one measures alone."""
        from cost import GROUPS, compile_ahead, is_complete, run_cost

        from vitfocus.core.environment import default_device

        if is_complete(self.setting):
            say("cost.json is complete")
            return 0
        if self.setting.workers > 1 and default_device().type == "cuda":
            places = [(group, name) for group in GROUPS for name in ARMS[group]]
            jobs = [
                Job(f"compile/{group}/{name}", compile_ahead, (group, name, self.setting)) for group, name in places
            ]
            self._carry_out(jobs, lambda job: Expectation(100.0 / self.setting.workers, 100.0))
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
        return self._carry_out(
            todo,
            lambda job: expected(job.name, self.setting),
            lambda job, work, wall: remember(self.setting, job.name, work, wall),
        )

    def _carry_out(
        self,
        jobs: Sequence[Job],
        estimate: Callable[[Job], Expectation],
        done: Callable[[Job, float, float], None] = lambda job, work, wall: None,
    ) -> int:
        from mps import shared_gpu

        with shared_gpu(self.mps, say):
            outcome = carry_out(
                jobs,
                workers=self.setting.workers,
                work=self.setting.work,
                seconds_left=self.seconds_left,
                estimate=estimate,
                say=say,
                done=done,
            )
        left = len(outcome.left) + len(outcome.stopped)
        if outcome.left and self.seconds_left() < float("inf"):
            say(f"the next run, {outcome.left[0]}, would not have ended in time")
        say(f"{len(outcome.done)} done, {len(outcome.failed)} failed, {left} left")
        return 1 if outcome.failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", default="all", type=steps, help=f"all, or of: {', '.join(STEPS)}")
    parser.add_argument("rest", nargs="*", help="of keep: GROUP ARM SEED")
    parser.add_argument("--data", type=Path, help="the folder of CIFAR-100")
    parser.add_argument("--results", type=Path, help="default: the study's own results")
    parser.add_argument("--work", type=Path, help="checkpoints, logs, models (default: runs/cifar100)")
    parser.add_argument("--frost", type=Path, help="the folder of frost overlays")
    parser.add_argument("--weights", type=Path, help="the trained DeiT-Ti, safetensors")
    parser.add_argument("--photos", type=Path, help="ImageNet photographs in class folders")
    parser.add_argument("--limit", type=int, help="photographs that the diagnosis looks at (default: all)")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side on one device")
    parser.add_argument("--slots", type=int, default=2, help="of those, how many compute at once; the others prepare")
    parser.add_argument("--minutes", type=float, default=0, help="end within so many minutes (default: no limit)")
    parser.add_argument("--mps", action="store_true", help="share the GPU by NVIDIA's Multi-Process Service")
    parser.add_argument("--cache-in", type=Path, help="an archive that --cache-out wrote, unpacked first")
    parser.add_argument("--cache-out", type=Path, help="write what the compilers made to this archive at the end")
    parser.add_argument("--cache-megabytes", type=float, default=60, help="the largest that archive may become")
    parser.add_argument("--rehearse", action="store_true", help="some seconds of each kind of run, into runs/...")
    parser.add_argument("--smoke", action="store_true", help="toy scale on the CPU, without data if none is named")
    return parser.parse_intermixed_args(arguments)


def steps(text: str) -> str:
    """`all`, or names of steps with commas between them."""
    for name in text.split(","):
        if name not in (*STEPS, "all") or (name in ("all", "keep") and text != name):
            raise argparse.ArgumentTypeError(f"there is no step {name!r}: {nearest(name, ('all', *STEPS))}")
    return text


def setting_of(args: argparse.Namespace) -> Setting:
    """Folders as named, or found beside the data; the smoke scale writes elsewhere."""
    scale = SMOKE if args.smoke else REHEARSAL if args.rehearse else FULL
    without = {"diagnose", "report"}
    if args.data is None and not args.smoke and not set(args.step.split(",")) <= without:
        raise VitfocusError(f"{args.step} needs CIFAR-100: name its folder with --data.")
    for option in ("data", "frost", "weights", "photos"):
        if (path := getattr(args, option)) is not None and not path.exists():
            raise VitfocusError(f"There is no {path} (--{option}).")

    def beside(given: Path | None, name: str) -> Path | None:
        found = args.data.resolve().parent / name if args.data is not None else None
        return given if given is not None or found is None or not found.exists() else found

    work = args.work or Path("runs") / ("cifar100-smoke" if args.smoke else "cifar100")
    aside = work / "rehearsal" if args.rehearse else work
    setting = Setting(
        data=args.data.resolve() if args.data is not None else None,
        results=aside / "results" if args.rehearse else args.results or (work / "results" if args.smoke else RESULTS),
        work=aside.resolve(),
        frost=beside(args.frost, "frost"),
        weights=beside(args.weights, "deit_tiny_patch16_224.safetensors"),
        photos=beside(args.photos, "imagenet1k-sample"),
        scale=scale,
        workers=max(1, args.workers),
        slots=max(1, args.slots),
        limit=args.limit,
    )
    setting.data_keys()
    return setting


def prepare(setting: Setting) -> None:
    """Compilers share their caches; processes that are started inherit this."""
    setting.work.mkdir(parents=True, exist_ok=True)
    share(setting.work.parent if setting.scale.name == "rehearsal" else setting.work, setting.workers)


def recall(archive: Path) -> None:
    """Unpack a cache; without one everything is compiled anew, which is no reason to stop."""
    try:
        say(unpack(archive, compiled()))
    except VitfocusError as error:
        say(f"{error} Everything is compiled anew.")


def say(text: str) -> None:
    """One line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running jobs are asked to stop as well
    sys.exit(main())
