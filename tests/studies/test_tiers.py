"""The long study: its plan, its analysis against least squares, and one run at toy scale."""

from __future__ import annotations

import doctest
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

STUDY = Path(__file__).parents[2] / "studies" / "cifar100"
sys.path.insert(0, str(STUDY))

import tiers  # noqa: E402
from reporting import intervals, long, texts  # noqa: E402
from reporting.intervals import additive  # noqa: E402


def result(group: str, arm: str, seed: int, accuracy: float, kept: float = 80.0) -> dict[str, object]:
    return {"group": group, "arm": arm, "seed": seed, "clean": {"accuracy": accuracy}, "kept": kept}


def results(effects: dict[str, float], noise: float, seeds: int = 5) -> dict[tuple[str, str, int], dict[str, object]]:
    draw = np.random.default_rng(0)
    shared = draw.normal(0, 0.5, seeds)
    return {
        ("vit-s", arm, seed): result("vit-s", arm, seed, 75 + effect + shared[seed] + draw.normal(0, noise))
        for arm, effect in effects.items()
        for seed in range(seeds)
    }


def test_every_comparison_names_a_planned_arm_and_every_spec_can_be_read() -> None:
    from vitfocus.treatments.spec import split_spec

    plan = tiers.read_plan()
    runs = list(tiers.planned_runs(plan))
    assert len({run.place for run in runs}) == len(runs)
    arms = {(run.group, run.arm) for run in runs}
    assert {(one["group"], one["arm"]) for one in plan["comparisons"]} <= arms
    assert {(group, "plain") for group, _ in arms} <= arms
    assert all(bool(split_spec(run.spec)[1]) == (not run.arm.startswith("plain")) for run in runs)


def test_examples() -> None:
    assert doctest.testmod(tiers).failed == 0
    for module in (intervals, long, texts):
        assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_names_may_stand_before_and_after_options(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for words in ("plan --tier 1 vit-s/plain", "plan vit-s/plain --tier 1", "--tier 1 plan vit-s/plain"):
        tiers.main(words.split())
        printed.append(capsys.readouterr().out)
    assert printed[0].count("vit-s/plain/seed") == 5 and len(set(printed)) == 1
    tiers.main(["plan", "--tier", "1", "vit-s/plain/seed0", "vit-s/tap-adl"])
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()][:2] == [
        "vit-s/plain/seed0",
        "vit-s/tap-adl/seed0",
    ]


def test_the_additive_model_is_least_squares() -> None:
    draw = np.random.default_rng(1)
    arms = {name: draw.normal(70, 1, 4).tolist() for name in ("plain", "a", "b")}
    effects, error, freedom = additive(arms, "plain")
    names = list(arms)
    design = np.array([[1, i == 1, i == 2, j == 1, j == 2, j == 3] for i in range(3) for j in range(4)], float)
    values = np.array([arms[name][j] for name in names for j in range(4)])
    solution, residual, *_ = np.linalg.lstsq(design, values, rcond=None)
    variance = residual[0] / (len(values) - design.shape[1])
    assert freedom == len(values) - design.shape[1]
    assert effects["a"] == pytest.approx(solution[1])
    assert error == pytest.approx(np.sqrt(variance * np.linalg.inv(design.T @ design)[1, 1]))


def test_effects_are_told_apart_from_none_and_from_noise() -> None:
    plan = tiers.read_plan()
    found = results({"plain": 0.0, "cb-upper": 0.0, "tap-adl": 2.0}, noise=0.1)
    by_claim = {(row["arm"], row["metric"]): row for row in tiers.analyse(plan, found) if row["group"] == "vit-s"}
    assert by_claim["tap-adl", "clean.accuracy"]["outcome"] == "higher"
    assert by_claim["cb-upper", "clean.accuracy"]["outcome"] == "within ±0.5 points"
    assert by_claim["adl", "clean.accuracy"]["outcome"] == "not run"
    early = results({"plain": 0.0, "cb-upper": 0.0, "tap-adl": 2.0}, noise=0.01, seeds=2)
    assert "within ±0.5 points" not in {row["outcome"] for row in tiers.analyse(plan, early)}
    noisy = results({"plain": 0.0, "cb-upper": 0.7, "tap-adl": 0.3}, noise=1.5)
    rows = [row for row in tiers.analyse(plan, noisy) if row.get("metric") == "clean.accuracy" and "difference" in row]
    assert {row["outcome"] for row in rows} == {"undecided"}
    assert "beside plain's" in tiers.table(rows)


def test_one_common_seed_gives_neither_an_interval_nor_a_claim() -> None:
    plan = tiers.read_plan()
    runs = list(tiers.planned_runs(plan))
    found = results({"plain": 0.0, "cb-upper": 0.5, "tap-adl": 9.0}, noise=0.1, seeds=2)
    uneven = {key: one for key, one in found.items() if key[1] == "plain" or key[2] == 0}  # plain 0, 1; the others 0
    rows = tiers.analyse(plan, uneven)
    (row,) = (
        row for row in rows if (row["group"], row["arm"], row["metric"]) == ("vit-s", "tap-adl", "clean.accuracy")
    )
    assert row["outcome"] == "one seed: no claim" and row["seeds"] == 1
    assert row.keys().isdisjoint({"difference", "interval", "p_value"})
    written = texts.texts(tiers.count_runs(runs, uneven), uneven, rows, {})
    assert (
        "is not known: one of the 5 planned seeds" in written["conclusion"]
        and "200 epochs, ViT-S: no claim (1 of 5 seeds)" in written["situations"]
    )
    assert "raised" not in written["headline"] and not re.search(r"\[[−+]", written["headline"])
    assert "is not known yet" in written["headline"]
    assert "*not known*" in written["from scratch"] and not re.search(r"\[[−+]", written["from scratch"])


def test_seeds_that_only_some_arms_have_are_left_out_of_a_comparison() -> None:
    plan = tiers.read_plan()
    found = results({"plain": 0.0, "cb-upper": 0.0, "tap-adl": 2.0}, noise=0.3, seeds=4)
    del found["vit-s", "cb-upper", 3], found["vit-s", "tap-adl", 2]
    rows = {
        row["arm"]: row for row in tiers.analyse(plan, found) if row["metric"] == "clean.accuracy" and "seeds" in row
    }
    common = [0, 1, 3]  # of which CB lacks one, so that the pair is alone in its model
    pairs = [[found["vit-s", arm, seed]["clean"]["accuracy"] for seed in common] for arm in ("tap-adl", "plain")]  # type: ignore[index]
    differences = np.subtract(*pairs)
    row = next(
        r
        for r in tiers.analyse(plan, found)
        if (r["group"], r["arm"], r["metric"]) == ("vit-s", "tap-adl", "clean.accuracy")
    )
    assert rows and row["seeds"] == 3 and row["degrees_of_freedom"] == 2
    assert row["difference"] == pytest.approx(differences.mean())
    half = 4.302653 * differences.std(ddof=1) / np.sqrt(3)  # Student's t with two degrees of freedom
    assert row["interval"] == pytest.approx((differences.mean() - half, differences.mean() + half), rel=1e-5)


def test_holm_counts_comparisons_that_were_not_run() -> None:
    plan = tiers.read_plan()
    count = len(plan["comparisons"])
    draw = np.random.default_rng(0)
    for _ in range(200):
        found = results({"plain": 0.0, "tap-adl": float(draw.uniform(0.1, 1.5))}, noise=0.3, seeds=3)
        row = next(r for r in tiers.analyse(plan, found) if "difference" in r and r["metric"] == "clean.accuracy")
        assert (row["outcome"] in ("higher", "lower")) == (row["p_value"] <= 0.05 / count)


def test_sentences_follow_the_outcome() -> None:
    plan = tiers.read_plan()
    runs = list(tiers.planned_runs(plan))
    found = results({"plain": 0.0, "cb-upper": 0.0, "tap-adl": 2.0}, noise=0.1)
    costs = {"vit-s": {"tap-adl": {"ratio": 1.25}}, "vit-s, eager": {"tap-adl": {"ratio": 1.5}}, "device": "a GPU"}
    written = texts.texts(tiers.count_runs(runs, found), found, tiers.analyse(plan, found), costs)
    assert "TAP + ADL raised clean accuracy: +" in written["conclusion"]
    assert "The effect of CB in the upper half on clean accuracy is within ±0.5 points (90 %" in written["conclusion"]
    cost = "1.25 times (recorded as a CUDA graph, as trained here) and 1.50 times (eager) as long as plain's on a GPU"
    assert cost in written["conclusion"] and "outside this interval" in written["conclusion"]
    assert "all 15 runs" in written["headline"] and "is not known yet" not in written["headline"]
    assert "200 epochs, ViT-S: higher, +" in written["situations"]
    lowered = results({"plain": 0.0, "cb-upper": 0.0, "tap-adl": -2.0}, noise=0.1)
    rows = tiers.analyse(plan, lowered)
    written = texts.texts(tiers.count_runs(runs, lowered), lowered, rows, {})
    assert "TAP + ADL lowered clean accuracy: −" in written["conclusion"]
    assert re.search(r"\| TAP \+ ADL \| clean accuracy \| .* \| −2\..* \| 5 of 5 \| lower \|", written["headline"])


def stage(group: str, seeds: dict[str, int], **effects: float) -> dict[tuple[str, str, int], dict[str, object]]:
    """Results of a group with so many seeds per arm, and an effect on accuracy of 0 unless given."""
    draw = np.random.default_rng(0)
    found = {}
    for arm, count in seeds.items():
        for seed in range(count):
            score = 75 + seed / 10 + effects.get(arm.replace("-", "_"), 0.0) + draw.normal(0, 0.05)
            found[group, arm, seed] = result(group, arm, seed, score, 80 + draw.normal(0, 0.05))
            found[group, arm, seed]["clean"] = {"miou" if group == "camvid" else "accuracy": score}
    return found


FIRST = {"plain": 5, "cb-upper": 5, "tap-adl": 5}
SECOND = {"cbs": 3, "tap": 3, "adl": 3, "average3": 3, "plain-longer": 3}
#: Stages of the study, and what its texts must and must not say then.
STAGES = {
    "nothing": ({}, ["Plain has no finished run; so far, 0 of the 15 runs", "not known yet"], ["| TAP + ADL |"]),
    "treated before plain": (
        stage("vit-s", {"tap-adl": 1}),
        ["no seed has a run both with and without it"],
        ["raised"],
    ),
    "one run": (stage("vit-s", {"plain": 1}), ["1 of the 15 runs", "is finished", "(seed 0 alone)"], ["are finished"]),
    "one seed": (stage("vit-s", dict.fromkeys(FIRST, 1)), ["one of the 5 planned seeds", "not known yet"], ["raised"]),
    "two seeds": (
        stage("vit-s", {"plain": 2, "cb-upper": 1, "tap-adl": 2}, tap_adl=4.0),
        ["(2 of 5 planned seeds)", "is undecided (not significant after Holm's correction", "not known yet"],
        ["raised", "is within", "*Undecided:* ViT-S/4, clean accuracy: CB"],
    ),
    "first tier": (
        stage("vit-s", FIRST, tap_adl=2.0, cb_upper=-2.0),
        ["TAP + ADL raised clean accuracy: +", "CB in the upper half lowered clean accuracy: −", "all 15 runs"],
        ["not known yet", "*One seed:*"],
    ),
    "some of the second tier": (
        stage("vit-s", FIRST | {"cbs": 1, "tap": 2, "adl": 3}, adl=-3.0),
        ["*One seed:* ViT-S/4, clean accuracy: CB\\_S.", "| 1 of 3 | one seed: no claim |", "| 3 of 3 | lower |"],
        ["not known yet"],
    ),
    "everything": (
        stage("vit-s", FIRST | SECOND, tap_adl=2.0)
        | stage("vit-ti", dict.fromkeys(FIRST, 3), tap_adl=2.0)
        | stage("fine-tune", dict.fromkeys(("plain", "cbs", "tap", "adl", "all"), 5), adl=-2.0)
        | stage("camvid", dict.fromkeys(("plain", "cbs", "tap-adl"), 5), tap_adl=2.0),
        ["None of the planned comparisons.", "the share of mIoU kept under corruption", "10 epochs: ADL: lower, −"],
        ["*Undecided:*", "fewer than two seeds", "not known yet", "mIoU, the share of accuracy"],
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_texts_are_written_at_every_stage(name: str) -> None:
    found, said, unsaid = STAGES[name]
    plan = tiers.read_plan()
    counts = tiers.count_runs(list(tiers.planned_runs(plan)), found)
    costs = {"vit-s": {"tap-adl": {"ratio": 1.25}}, "device": "NVIDIA H200"} if name == "everything" else {}
    written = texts.texts(counts, found, tiers.analyse(plan, found), costs)
    together = "\n".join(written.values())
    assert not [words for words in said if words not in together]
    assert not [words for words in unsaid if words in together]
    assert "no effect" not in together and "did not change" not in together  # equivalence is a bound
    for text in written.values():
        sentences = [line for line in text.split("\n") if line and not line.startswith("|")]
        assert text and "nan" not in text
        assert all(line.endswith((".", ":")) for line in sentences)
        assert not [line for line in sentences if re.search(r"  | [.,;:]|\(\)|\.\.", line)]
        assert all(
            words[0].isupper() or words[0].isdigit()
            for line in sentences
            for words in re.sub(r"[*\[]", "", line).split(". ")
        )
    header = texts.update_recipe("# Plain ViT-S/4 reaches 1.00 % once.\n", found)
    assert re.fullmatch(r"# Plain ViT-S/4 reaches [\d.]+ % (once|on the test images \(.+\))\.\n", header)


def test_every_planned_run_has_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mosaics

    from vitfocus.train.recipe import load_recipe, refuse_unused_keys

    monkeypatch.setattr(mosaics, "data_keys", lambda data, work: ["source=arrays", f"root={data}"])
    (tmp_path / "cost.json").write_text(json.dumps({"vit-s": {"plain": {"ratio": 1.0}, "tap-adl": {"ratio": 1.25}}}))
    recipes = {
        run.place: load_recipe(run.recipe, tiers.overrides(run, tmp_path / "cifar100", tmp_path / "work", tmp_path))
        for run in tiers.planned_runs(tiers.read_plan())
    }
    for run in tiers.planned_runs(tiers.read_plan()):  # `rehearse`, on any machine
        keys = tiers.overrides(run, tmp_path / "cifar100", tmp_path / "work", tmp_path)
        toy = load_recipe(run.recipe, keys + tiers.toy_keys(run))
        refuse_unused_keys(toy)
        assert toy.schedule.epochs == 1 or toy.schedule.steps == 2
    for recipe in recipes.values():
        refuse_unused_keys(recipe)
    assert recipes["vit-s/plain/seed3"].schedule.epochs == 200 and recipes["vit-s/plain/seed3"].engine.seed == 3
    assert recipes["vit-s/plain-longer/seed1"].schedule.epochs == 250  # 200 epochs, and a quarter more time
    steep = recipes["collapse/qknorm/seed1"]
    assert (steep.optimiser.name, steep.optimiser.lr, steep.schedule.epochs) == ("adamw", 1e-3, 24)
    tuned = recipes["fine-tune/adl/seed0"]
    assert tuned.schedule.epochs == 10 and tuned.loss.adl_warmup_epochs == 3 and tuned.data.enlarge == 224
    assert tuned.model.weights == str(tmp_path / "deit_tiny_patch16_224.safetensors")
    dense = recipes["camvid/tap-adl/seed4"]
    assert dense.task == "segment" and dense.data.root == str(tmp_path / "camvid")


def test_one_run_leaves_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import measure
    import mosaics

    small = ("embed_dim=24", "depth=2", "num_heads=3", "num_classes=100", "patch_size=8")
    keys = ["source=shapes", "train_length=64", "val_length=32", "batch=32", "device=cpu", "compile=no", "epochs=1"]
    keys += ["warmup_epochs=0", "evaluate_every=1", *(f"model.arguments.{key}" for key in small)]
    real = tiers.overrides
    monkeypatch.setattr(mosaics, "data_keys", lambda data, work: [])
    monkeypatch.setattr(tiers, "overrides", lambda *given: [*real(*given), *keys])
    measured = {"clean": {"accuracy": 50.0}, "corruption": {"mean_error": 60.0}}
    monkeypatch.setattr(measure, "measure", lambda model, images, labels, **options: measured)
    run = tiers.LongRun(1, "vit-s", "cb-upper", "deit_tiny_patch16_224+cb", 0)
    tiers.carry_out(run, tmp_path, tmp_path / "work", tmp_path / "results")
    written = json.loads((tmp_path / "results" / "vit-s" / "cb-upper" / "seed0.json").read_text())
    assert written["kept"] == 80.0 and written["curve"] and len(written["attention"][0]["overfocus"]) == 2
    assert written["seed"] == 0 and written["spec"].endswith("+cb")
    assert list(tiers.finished(tmp_path / "results")) == [("vit-s", "cb-upper", 0)]


def test_the_cost_of_a_step_is_measured_beside_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cost
    import mosaics

    small = ("embed_dim=24", "depth=2", "num_heads=3", "num_classes=100", "patch_size=8")
    keys = ["source=shapes", "train_length=64", "val_length=32", "batch=32", "device=cpu", "compile=no"]
    real, steps = tiers.overrides, cost.measure_steps
    monkeypatch.setattr(mosaics, "data_keys", lambda data, work: [])
    monkeypatch.setattr(
        tiers, "overrides", lambda *given: [*real(*given), *keys, *(f"model.arguments.{k}" for k in small)]
    )
    monkeypatch.setattr(cost, "measure_steps", lambda group, recipes, **_: steps(group, recipes, 0.01, 2))
    plan = tiers.read_plan()
    runs = tiers.named_runs(list(tiers.planned_runs(plan)), ["vit-s/tap-adl", "vit-s/plain", "vit-s/plain-longer"])
    found = json.loads(tiers.measure_cost(runs, tmp_path, tmp_path / "work", tmp_path).read_text())
    assert list(found["vit-s"]) == ["plain", "tap-adl"] and found["vit-s"]["plain"]["ratio"] == 1.0
    assert found["vit-s"]["tap-adl"]["ms"] > 0 and found["device"] and found["versions"]
    assert found["vit-s, eager"]["tap-adl"]["ratio"] > 0 and found["vit-s, compiled"]["plain"]["ratio"] == 1.0
    shown = "\n".join(long.step_costs("vit-s", found))
    assert f"({found['vit-s, eager']['tap-adl']['ratio']:.2f})" in shown and "own loop, eager" in shown
    with pytest.raises(SystemExit, match="multiple of plain's"):
        tiers.measure_cost(
            tiers.named_runs(list(tiers.planned_runs(plan)), ["vit-s/tap"]), tmp_path, tmp_path, tmp_path
        )
    longer = next(run for run in runs if run.as_long_as)
    assert tiers.matched_epochs(longer, 200, tmp_path) == round(200 * found["vit-s"]["tap-adl"]["ratio"])
    with pytest.raises(SystemExit, match=r"tiers\.py cost vit-s"):
        tiers.matched_epochs(longer, 200, tmp_path / "nowhere")


def test_the_report_shows_what_is_finished(tmp_path: Path) -> None:
    plan = tiers.read_plan()
    runs = list(tiers.planned_runs(plan))
    found = results({"plain": 0.0, "tap-adl": 2.0}, noise=0.1, seeds=2)
    for (_, arm, seed), one in found.items():
        one |= {
            "seconds_of_training": 400.0,
            "epochs": 200.0,
            "curve": [{"epoch": e, "top1": e / 4 + seed} for e in (100, 200)],
        }
        one["attention"] = [{"epoch": 0, "layer": [0, 1, 2], "entropy_share": [0.9] * 3, "overfocus": [0.1] * 3}]
        one["curve"][-1]["top1"] += 3.0 * (arm == "tap-adl")
    rows = one["attention"] + [{"epoch": 50, "layer": [0, 1, 2], "entropy_share": [0.2] * 3, "overfocus": [0.8] * 3}]
    failed = {**one, "group": "collapse", "arm": "plain", "attention": rows}
    path = long.write_report(tmp_path, runs, {**found, ("collapse", "plain", 0): failed}, tiers.analyse(plan, found))
    text = path.read_text()
    assert "Finished runs: 4 of 30 (ViT-S/4 on CIFAR-100), 0 of 9" in text and "collapse: " not in text
    assert "| failed |" in text and "| 50 |" in text
    assert "DeiT-Ti fine-tuned" in text and "fine-tune-training" not in text
    gains = (tmp_path / "vit-s-training.svg").read_text()
    assert "Gain over plain" in gains and ">3<" in gains.replace(".0<", "<") and "tap-adl (2 seeds)" in gains
    longer = {("vit-s", "plain-longer", 0): {**found["vit-s", "plain", 0], "arm": "plain-longer", "epochs": 250.0}}
    long.write_report(tmp_path, runs, {**found, **longer}, tiers.analyse(plan, found))
    before, _, gain = (tmp_path / "vit-s-training.svg").read_text().partition("Gain over plain at")
    assert "plain-longer (1 seed)" in before and "plain-longer" not in gain  # another schedule: epochs do not compare
    assert (tmp_path / "collapse-attention.svg").is_file()


def test_what_is_compiled_is_kept_for_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    import gate

    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_FX_GRAPH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TORCHINDUCTOR_AUTOGRAD_CACHE", "TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    jobs: list[list[str]] = []

    def run(script: str, given: list[list[str]], at_once: int, log: Path) -> None:
        jobs.extend(given)
        found = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "fxgraph" / "kernel"
        if not found.exists():
            found.parent.mkdir(parents=True)
            found.write_text("compiled")
        assert found.read_text() == "compiled"

    monkeypatch.setattr(gate, "run_many", run)
    archive, common = str(tmp_path / "cache.xz"), ["--at-once", "1", "--data", str(tmp_path), "--cache-in"]
    tiers.main(["run", "camvid/plain/seed0", "--work", str(tmp_path / "a"), *common, archive, "--cache-out", archive])
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.pop(name)
    (tmp_path / "b").mkdir()
    tiers.main(["run", "camvid/plain/seed0", "--work", str(tmp_path / "b"), *common, archive])
    assert (tmp_path / "b" / "compiled" / "fxgraph" / "kernel").read_text() == "compiled"
    assert [job[:2] for job in jobs] == [["one", "camvid/plain/seed0"]] * 2
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.pop(name, None)
