"""The long study: treatments against plain at the recipe's full length, in tiers, as plan.toml fixed it beforehand.

    python studies/cifar100/tiers.py plan                                  # the runs and comparisons
    python studies/cifar100/tiers.py run --data DIR --tier 1 [--limit 4]   # unfinished runs, seed by seed
    python studies/cifar100/tiers.py run --data DIR vit-s/plain collapse   # those whose names begin like this, in order
    python studies/cifar100/tiers.py cost --data DIR vit-s                 # a training step of each arm, times plain's
    python studies/cifar100/tiers.py table                                 # the analysis of what is finished
    python studies/cifar100/tiers.py report                                # tables, figures and texts that quote them
    python studies/cifar100/tiers.py rehearse --data DIR [NAME ...]        # one toy run of each group, first of all

A run is one process: it trains by its group's recipe, measures the final model on the test images and writes
results/long/GROUP/ARM/seedK.json. An interrupted run resumes from its checkpoint in --work. DIR holds CIFAR-100; the
folders camvid and frost and the weights of DeiT-Ti are looked for beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "long"
sys.path[:0] = [] if str(HERE) in sys.path else [str(HERE)]

from reporting.intervals import additive, holm, quantile, within  # noqa: E402

#: Settings in which a step's cost is measured: keys over those of the run. "recorded" is a CUDA graph on a GPU.
SETTINGS: dict[str, tuple[str, ...]] = {
    "recorded": (),
    "compiled": ("record=no",),
    "eager": ("record=no", "compile=no"),
}


@dataclass(frozen=True)
class LongRun:
    """One arm with one seed."""

    tier: int
    group: str
    arm: str
    spec: str
    seed: int
    keys: tuple[str, ...] = ()
    recipe: str = "cifar100"
    weights: str = ""
    as_long_as: str = ""  # the arm whose training time this one gets
    readings_only: bool = False

    @property
    def place(self) -> str:
        """The result file below the results, without its ending."""
        return f"{self.group}/{self.arm}/seed{self.seed}"


def read_plan() -> dict[str, Any]:
    """plan.toml."""
    return tomllib.loads((HERE / "plan.toml").read_text(encoding="utf-8"))


def planned_runs(plan: Mapping[str, Any], tier: int | None = None) -> Iterator[LongRun]:
    """The runs of a tier (default: of all), one seed of every arm before the next.

    >>> runs = list(planned_runs(read_plan(), 1))
    >>> len(runs), runs[0].place, runs[2].spec
    (15, 'vit-s/plain/seed0', 'deit_small_patch16_224+tap(branches=4)+adl')
    """
    for entry in plan["tiers"]:
        if tier is not None and entry["tier"] != tier:
            continue
        group = plan["groups"][entry["group"]]
        same = {key: group[key] for key in ("recipe", "weights", "readings_only") if key in group}
        for seed in entry["seeds"]:
            for arm, treatments in entry["arms"].items():
                spec = "+".join(filter(None, [group["base"], treatments]))
                keys = (*group["keys"], *entry.get("arm_keys", {}).get(arm, ()))
                longer = entry.get("as_long_as", {}).get(arm, "")
                yield LongRun(entry["tier"], entry["group"], arm, spec, seed, keys, as_long_as=longer, **same)


def named_runs(runs: Sequence[LongRun], names: Sequence[str]) -> list[LongRun]:
    """The runs whose places begin with one of the names, name by name; all without names.

    >>> [run.place for run in named_runs(list(planned_runs(read_plan())), ["collapse/gate", "vit-ti/plain/seed2"])]
    ['collapse/gate/seed0', 'collapse/gate/seed1', 'vit-ti/plain/seed2']
    """
    if not names:
        return list(runs)
    chosen = []
    for name in names:
        begin = [run for run in runs if f"{run.place}/".startswith(f"{name.rstrip('/')}/")]
        if not begin:
            sys.exit(f"No run is called {name!r} or begins with it: `tiers.py plan` lists them.")
        chosen += [run for run in begin if run not in chosen]
    return chosen


def matched_epochs(run: LongRun, epochs: float, results: Path) -> int:
    """The epochs in which plain takes as long as the arm `run.as_long_as` does in `epochs`, by `tiers.py cost`."""
    content = read_costs(results)
    try:
        return round(epochs * content[run.group][run.as_long_as]["ratio"])
    except KeyError:
        sys.exit(f"{run.place} is trained for as long as {run.as_long_as}: measure `tiers.py cost {run.group}` first.")


def recipe_epochs(recipe: str) -> float:
    """The epochs of a built-in recipe."""
    from vitfocus.train import load_recipe

    return load_recipe(recipe).schedule.epochs


def measure_cost(runs: Sequence[LongRun], data: Path, work: Path, results: Path = RESULTS) -> Path:
    """Measure the training step of every arm of the runs alone on this machine; plain takes turns with the others.

    Training times in the results are no measure of it, because several runs share the GPU. The step is measured as the
    study trains (recorded), and as it is in a loop of one's own, with compiled blocks and eager.
    """
    from datetime import UTC, datetime

    from cost import measure_steps

    from vitfocus.core.environment import default_device, device_name, versions
    from vitfocus.core.files import write_text
    from vitfocus.train import load_recipe

    path, content = results / "cost.json", read_costs(results)
    for group in dict.fromkeys(run.group for run in runs):
        own = [run for run in runs if run.group == group and not run.as_long_as]
        arms = {name: next(run for run in own if run.arm == name) for name in dict.fromkeys(run.arm for run in own)}
        if "plain" not in arms:
            sys.exit(f"The cost of a step is a multiple of plain's: name {group}/plain as well, or {group} alone.")
        names = sorted(arms, key=lambda arm: arm != "plain")
        settings = SETTINGS if arms[names[0]].recipe == "cifar100" else {"recorded": ()}
        for setting, keys in settings.items():
            recipes = {
                arm: load_recipe(arms[arm].recipe, [*overrides(arms[arm], data, work, results), *keys]) for arm in names
            }
            place = group if setting == "recorded" else f"{group}, {setting}"
            content[place] = content.get(place, {}) | measure_steps(place, recipes, seconds=0.5, rounds=7)
    content |= {
        "device": device_name(default_device()),
        "versions": versions("accelerate", "python"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_text(path, json.dumps(content, indent=1) + "\n")
    return path


def overrides(run: LongRun, data: Path, work: Path, results: Path = RESULTS) -> list[str]:
    """The keys of a run over its recipe."""
    import mosaics

    keys = [f"spec={run.spec}", f"seed={run.seed}", "checkpoint_minutes=1", "keep=1"]
    if run.as_long_as:
        keys.append(f"epochs={matched_epochs(run, recipe_epochs(run.recipe), results)}")
    if run.weights:
        keys.append(f"model.weights={data.parent / run.weights}")
    if run.recipe == "camvid":
        return [*keys, f"root={data.parent / 'camvid'}", "evaluate_steps=0", *run.keys]
    every = "evaluate_every=2" if run.weights else "evaluate_every=10"
    return [*keys, "compile=blocks", every, *run.keys, *mosaics.data_keys(data, work)]


def toy_keys(run: LongRun) -> list[str]:
    """Keys that make a rehearsal of a run: a few steps on a few images, compiled only on a GPU."""
    import torch

    small = ["steps=2", "warmup_steps=0", "batch=2", "size=96", "short_side=128", "window=96", "stride=96"]
    keys = small if run.recipe == "camvid" else ["epochs=1", "warmup_epochs=0", "batch=8"]
    keys = [*keys, "train_length=32", "val_length=4", "workers=0"]
    if run.recipe != "camvid":
        keys += ["evaluate_every=1", *(() if torch.cuda.is_available() else ("compile=no",))]
        keys += ["adl_warmup_epochs=0.5"] if any("adl_warmup_epochs" in key for key in run.keys) else []
    return keys


def rehearse(runs: Sequence[LongRun], data: Path) -> None:
    """Carry out the last arm of each group of the runs at toy length, and check that the report can show it."""
    import tempfile
    import time

    from reporting.long import write_report

    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.mkdir()
        ratios = {run.group: {run.as_long_as: {"ratio": 1.0}} for run in runs if run.as_long_as}
        (results / "cost.json").write_text(json.dumps(ratios))
        for run in {run.group: run for run in runs if run.seed == runs[0].seed}.values():
            began = time.monotonic()
            carry_out(run, data, Path(folder) / "work", results, toy=True)
            print(f"{run.place} runs: {time.monotonic() - began:.0f} s", flush=True)
        write_report(results, runs, finished(results), analyse(read_plan(), finished(results)))


def carry_out(run: LongRun, data: Path, work: Path, results: Path = RESULTS, toy: bool = False) -> None:
    """Train and measure one run in this process, and write its JSON."""
    from one_run import recipe_record

    import vitfocus as vf
    from vitfocus.core.files import write_text
    from vitfocus.train import load_recipe, train

    recipe = load_recipe(run.recipe, overrides(run, data, work, results) + (toy_keys(run) if toy else []))
    folder = work / run.place
    trained = train(recipe, folder, resume="auto")
    if not trained["finished"]:
        sys.exit(f"{run.place} stopped at step {trained['steps']}; run the command again to resume it.")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    score = "miou" if recipe.task == "segment" else "top1"
    content = {
        "tier": run.tier,
        "group": run.group,
        "arm": run.arm,
        "spec": run.spec,
        "seed": run.seed,
        "epochs": trained["epochs"],
        "recipe": recipe_record(recipe),
        "curve": [{"epoch": row["epoch"], score: 100 * row[score]} for row in rows if row["kind"] == "eval"],
        "attention": [
            {key: row[key] for key in ("epoch", "layer", "entropy_share", "overfocus")}
            for row in rows
            if row["kind"] == "attention"
        ],
        "seconds_of_training": trained["seconds"],
        "images_per_second": trained["images_per_second"],
        **measured(run, vf.load(folder / "model"), recipe, data, 1 if toy else None),
        "device": trained["device"],
        "versions": trained["versions"],
    }
    write_text(results / f"{run.place}.json", json.dumps(content, indent=1) + "\n")


def measured(run: LongRun, model: Any, recipe: Any, data: Path, limit: int | None = None) -> dict[str, Any]:
    """What is measured of a finished model: clean, corrupted, and the share kept under corruption, in percent.

    `limit` is the number of images with masks in a rehearsal; of others it takes as many as the recipe's validation.
    """
    import measure
    from finetune import clean_accuracy
    from setting import evenly

    import vitfocus as vf
    from vitfocus.core.environment import default_device
    from vitfocus.corruptions import CORRUPTIONS
    from vitfocus.data.classification.dataset import open_images

    frost = data.parent / "frost" if (data.parent / "frost").is_dir() else None
    model.to(default_device()).eval()
    if recipe.task == "segment":
        options: dict[str, Any] = {"data": data.parent / "camvid", "source": "camvid", "progress": False, "seed": 0}
        options |= {} if limit is None else {"limit": limit}
        severities = {} if limit is None else {"severities": [5]}
        clean = vf.evaluate(model, "segmentation", **options)
        corrupted = vf.evaluate(model, "cityscapes-c", frost=frost, **severities, **options)
        found = {
            "clean": {key: clean[key] for key in ("miou", "macc", "aacc")},
            "corruption": {"miou": corrupted["miou_corrupted"], "fingerprint": corrupted.fingerprint["protocol"]},
        }
        return {**found, "kept": _share(corrupted["miou_corrupted"], clean["miou"])}
    test: Any = open_images(recipe.data, "val")
    if run.readings_only:
        return {
            "clean": clean_accuracy(model, test.pixels, test.labels),
            "reading": measure.reading(model, test.pixels[:1_000].to(default_device())),
        }
    if recipe.data.enlarge:
        some, their = evenly(test.pixels, test.labels, 2_500)
        found = {
            "clean": clean_accuracy(model, test.pixels, test.labels),
            "corruption": measure.corruption(model, some, their, CORRUPTIONS, (1, 3, 5), frost, batch=500),
        }
    else:
        found = measure.measure(
            model,
            test.pixels,
            test.labels,
            corruptions=CORRUPTIONS,
            severities=(1, 2, 3, 4, 5),
            frost=frost,
            corrupted_images=5_000,
            reading_images=1_000,
        )
    return {**found, "kept": _share(100 - found["corruption"]["mean_error"], found["clean"]["accuracy"])}


def _share(part: float, whole: float) -> float:
    """In percent; a model that is never right keeps nothing."""
    return 100 * part / whole if whole else 0.0


def finished(results: Path = RESULTS) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Every result, by group, arm and seed."""
    found = (json.loads(path.read_text()) for path in sorted(results.glob("*/*/seed*.json")))
    return {(one["group"], one["arm"], one["seed"]): one for one in found}


def value_of(result: Mapping[str, Any], metric: str) -> float:
    """A metric by its dotted name.

    >>> value_of({"clean": {"accuracy": 75.9}}, "clean.accuracy")
    75.9
    """
    value: Any = result
    for part in metric.split("."):
        value = value[part]
    return float(value)


def analyse(plan: Mapping[str, Any], found: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every comparison: difference, intervals, p-value and what may be said, if there are two common seeds or more.

    Holm's correction counts every comparison of the plan, run or not, so a later run can never take a claim back. With
    one common seed the row has the two values and neither a difference nor a claim. Equivalence, "within ±0.5 points",
    waits for all seeds of the plan, because with few of them an interval may be narrow by chance.
    """
    bound = f"within ±{plan['equivalence_points']:g} points"
    rows = []
    for comparison in plan["comparisons"]:
        group, arm, metric = comparison["group"], comparison["arm"], comparison["metric"]
        seeds = sorted(_seeds(found, group, arm) & _seeds(found, group, "plain"))
        row: dict[str, Any] = {
            **comparison,
            "seeds": len(seeds),
            "planned": _planned_seeds(plan, group, arm),
            "outcome": "one seed: no claim"
            if seeds
            else ("no common seed" if _seeds(found, group, arm) else "not run"),
        }
        rows.append(row)
        names = {a for g, a, _ in found if g == group and set(seeds) <= _seeds(found, group, a)} | {"plain", arm}
        if seeds:
            arms = {name: [value_of(found[group, name, seed], metric) for seed in seeds] for name in sorted(names)}
            row |= {"plain": fmean(arms["plain"]), "value": fmean(arms[arm])}
        if len(seeds) > 1:
            effects, error, freedom = additive(arms, "plain")
            effect = effects[arm]
            wide, narrow = quantile(freedom) * error, quantile(freedom, 0.90) * error
            row |= {
                "difference": effect,
                "interval": (effect - wide, effect + wide),
                "equivalent": len(seeds) >= row["planned"]
                and max(abs(effect - narrow), abs(effect + narrow)) <= plan["equivalence_points"],
                "degrees_of_freedom": freedom,
                "p_value": 1 - within(abs(effect) / error, freedom) if error else float(effect == 0),
            }
    for row, rejected in zip(rows, holm([row.get("p_value", 1.0) for row in rows]), strict=True):
        if "difference" in row:
            up = "higher" if row["difference"] > 0 else "lower"
            row["outcome"] = up if rejected else bound if row["equivalent"] else "undecided"
    return rows


def _planned_seeds(plan: Mapping[str, Any], group: str, arm: str) -> int:
    return next(len(tier["seeds"]) for tier in plan["tiers"] if tier["group"] == group and arm in tier["arms"])


def _seeds(found: Mapping[tuple[str, str, int], Any], group: str, arm: str) -> set[int]:
    return {seed for g, a, seed in found if (g, a) == (group, arm)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The comparisons as lines of text."""
    lines = []
    for row in rows:
        text = f"{row['claim']} [{row['group']}, {row['arm']}, {row['metric']}]: {row['outcome']}"
        if "difference" in row:
            low, high = row["interval"]
            text += (
                f"; {row['difference']:+.2f} [{low:+.2f}, {high:+.2f}] beside plain's {row['plain']:.2f}, "
                f"{row['seeds']} of {row['planned']} seeds, {row['degrees_of_freedom']} degrees of freedom, "
                f"p = {row['p_value']:.3f}"
            )
        lines.append(text)
    return "\n".join(lines)


def write_everything(plan: Mapping[str, Any], runs: Sequence[LongRun]) -> Path:
    """Write the page, its figures, and the texts about the study in the repository (reporting/texts.py)."""
    from reporting.long import write_report
    from reporting.texts import outdated

    from vitfocus.core.files import write_text

    found, costs = finished(), read_costs()
    rows, root = analyse(plan, found), HERE.parents[1]
    page = write_report(RESULTS, runs, found, rows, costs)
    if (picture := RESULTS / "collapse-attention.svg").is_file():
        shutil.copyfile(picture, root / "docs" / "images" / "collapse.svg")
    for path, text in outdated(root, count_runs(runs, found), found, rows, costs).items():
        write_text(path, text)
        print(f"updated: {path.relative_to(root)}")
    return page


def read_costs(results: Path = RESULTS) -> dict[str, Any]:
    """cost.json, if it was measured."""
    path = results / "cost.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content


def count_runs(runs: Sequence[LongRun], found: Mapping[tuple[str, str, int], Any]) -> dict[str, tuple[int, int]]:
    """For each tier, the finished and the planned runs.

    >>> count_runs(list(planned_runs(read_plan(), 1)), {("vit-s", "plain", 0): {}})
    {'tier 1': (1, 15)}
    """
    tiers = {tier: [run for run in runs if run.tier == tier] for tier in sorted({run.tier for run in runs})}
    return {
        "collapse" if tier == 4 else f"tier {tier}": (sum((r.group, r.arm, r.seed) in found for r in some), len(some))
        for tier, some in tiers.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("plan", "run", "cost", "table", "report", "rehearse", "one"))
    parser.add_argument(
        "names", nargs="*", help="beginnings of GROUP/ARM/seedK; of `one`: a whole one, in this process"
    )
    parser.add_argument("--data", type=Path, default=Path("data/cifar100"))
    parser.add_argument("--work", type=Path, default=Path("runs/cifar100-long"))
    parser.add_argument("--tier", type=int)
    parser.add_argument("--limit", type=int, help="so many runs at most")
    parser.add_argument("--at-once", type=int, default=2, help="processes at a time")
    parser.add_argument("--cache-in", type=Path, help="run: an archive that --cache-out wrote, unpacked first if there")
    parser.add_argument("--cache-out", type=Path, help="run: keep what was compiled in this archive, for a new machine")
    args = parser.parse_intermixed_args(arguments)  # names may follow options
    plan = read_plan()
    runs = named_runs(list(planned_runs(plan, args.tier)), args.names)
    missing = [run for run in runs if not (RESULTS / f"{run.place}.json").is_file()]
    if args.command == "plan":
        for run in runs:
            print(f"tier {run.tier}  {run.place:<28}{'' if run in missing else 'finished  '}{run.spec}")
    elif args.command == "cost":
        print(measure_cost(runs, args.data.resolve(), args.work))
    elif args.command == "table":
        print(table(analyse(plan, finished())))
    elif args.command == "report":
        if args.names or args.tier:
            parser.error("`report` is about the whole study: it takes neither names nor a tier")
        print(write_everything(plan, runs))
    elif args.command == "rehearse":
        rehearse(runs, args.data.resolve())
    elif args.command == "one":
        if len(runs) != 1:
            parser.error("`one` takes the whole name of one run; `tiers.py plan` lists them")
        carry_out(runs[0], args.data.resolve(), args.work)
    else:
        common = ["--data", str(args.data.resolve()), "--work", str(args.work.resolve())]
        run_jobs([["one", run.place, *common] for run in missing[: args.limit]], args)


def run_jobs(jobs: Sequence[Sequence[str]], args: argparse.Namespace) -> None:
    """Run jobs as processes that share the GPU and what they compile, which --cache-out keeps for another machine."""
    from caches import compiled, pack, share, unpack
    from gate import run_many
    from mps import shared_gpu

    share(args.work.resolve(), args.at_once)
    if args.cache_in is not None and args.cache_in.is_file():
        print(unpack(args.cache_in, compiled()))
    try:
        with shared_gpu(args.at_once > 1):
            run_many(__file__, jobs, args.at_once, args.work / "logs")
    finally:
        if args.cache_out is not None:
            print(pack(compiled(), args.cache_out, 60_000_000))


if __name__ == "__main__":
    main()
