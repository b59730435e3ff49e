"""Visual question answering: the official accuracy, VQAv2's layout, words, and a run from recipe to answers."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import vilt_config
from msgspec.structs import replace
from PIL import Image

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.data.shapes.dataset import Shapes
from vitfocus.data.shapes.layouts import write_layout
from vitfocus.data.vqa.batches import VqaPreprocessing, fitted_size
from vitfocus.data.vqa.dataset import (
    QuestionTokenizer,
    VqaDataset,
    attach_tokenizer,
    open_questions,
    read_vqav2,
    shapes_questions,
    tokenizer_of,
)
from vitfocus.reproduce import load_item
from vitfocus.reproduce.plan import DataFolders, plan_row
from vitfocus.reproduce.results import Measurement, MeasureSettings, measure, submissions
from vitfocus.tasks.vqa.evaluation import (
    Answerer,
    best_constant,
    frequent_answers,
    language_baselines,
    normalise_answer,
    soft_accuracy,
    soft_targets,
)
from vitfocus.train import load_recipe, train
from vitfocus.train.optimiser import TrainingSchedule
from vitfocus.treatments.spec import split_spec

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

#: What VQAv2's own evaluation makes of these answers.
NORMALISED = {
    "Yes": "yes",
    " a  dog ": "dog",
    "the one": "1",
    "None": "0",
    "1,000": "1000",
    "3.5": "3.5",
    "e.g.": "eg",
    "black/white": "black white",
    "black / white": "black white",
    "it's": "it's",
    "dont": "don't",
    "couldnt've": "couldn't've",
    "somebody'd": "somebodyd",
    "what?!": "what",
    "t-shirt": "t shirt",
    "50%": "50%",
    "10:30": "10:30",
    "line\nbreak": "line break",
    "An apple, a pear": "apple pear",
    "(left) side": "left side",
}


@pytest.fixture(scope="module")
def vqav2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shapes as VQAv2 publishes its data; the pictures are wider than high."""
    return write_layout(tmp_path_factory.mktemp("vqav2"), "vqav2", 24, val_count=10, size=(32, 48))


def overrides(root: Path | None = None, **more: Any) -> list[str]:
    """A tiny run of the shipped recipe."""
    chosen: dict[str, Any] = {
        "data.source": "vqav2" if root else "shapes",
        "data.root": root or "",
        "data.train_length": 0 if root else 24,
        "data.val_length": 0 if root else 10,
        "data.batch": 8,
        "schedule.steps": 6,
        "schedule.warmup_steps": 2,
        "engine.device": "cpu",
        "model.arguments.hidden_size": 16,
        "model.arguments.num_hidden_layers": 2,
        "model.arguments.num_attention_heads": 2,
        "model.arguments.intermediate_size": 32,
    } | {key.replace("__", "."): value for key, value in more.items()}
    return [f"{key}={value}" for key, value in chosen.items()]


@pytest.mark.parametrize(("raw", "expected"), NORMALISED.items())
def test_answers_are_normalised_as_the_official_evaluation_does(raw: str, expected: str) -> None:
    assert normalise_answer(raw) == expected


def test_official_accuracy_equals_leave_one_annotator_out() -> None:
    draw = random.Random(0)
    for _ in range(300):
        people = draw.choices(["yes", "no", "2", "3", "maybe"], weights=[5, 3, 1, 1, 1], k=10)
        answer = draw.choice(["yes", "no", "2", "3", "maybe", "never"])
        scores = []
        for left_out in range(10):
            others = [given for place, given in enumerate(people) if place != left_out]
            scores.append(min(1, sum(given == answer for given in others) / 3))
        assert soft_accuracy(answer, people) == pytest.approx(np.mean(scores))
        assert soft_targets(people, {answer: 7}).get(7, 0.0) == pytest.approx(np.mean(scores))


def test_answers_are_normalised_unless_all_annotators_agree_exactly() -> None:
    assert soft_accuracy("the 2", ["two"] * 9 + ["2"]) == 1.0
    assert soft_accuracy("2", ["two"] * 10) == 0.0
    assert soft_accuracy("two", ["two"] * 10) == 1.0


def test_the_vocabulary_holds_the_most_frequent_answers() -> None:
    agreed = ["yes"] * 5 + ["No."] * 4 + ["two", "2", "a 2"] + ["red"] * 2 + ["rare"]
    assert frequent_answers(agreed) == ["yes", "no", "2", "red", "rare"]
    assert frequent_answers(agreed, size=3) == ["yes", "no", "2"]
    assert frequent_answers(agreed, least=3) == ["yes", "no", "2"]
    with pytest.raises(vf.VitfocusError, match="99 times or more"):
        frequent_answers(agreed, least=99)


def test_blind_baselines() -> None:
    asked = shapes_questions("val", 60, 32)
    blind = language_baselines(asked.questions)
    words = {normalise_answer(answer) for question in asked.questions for answer in question.answers}
    means = {w: np.mean([soft_accuracy(w, question.answers) for question in asked.questions]) for w in words}
    assert blind["constant_accuracy"] == pytest.approx(max(means.values()))
    assert means[blind["constant_answer"]] == pytest.approx(max(means.values()))
    assert blind["constant_accuracy"] < blind["question_type_accuracy"] < 0.6
    assert best_constant([["a", "b", "b"]])[0] == "b"


def test_written_layout_reads_back_unchanged(vqav2: Path) -> None:
    for split, count in (("train", 24), ("val", 10)):
        read, drawn = read_vqav2(vqav2, f"{split}2014"), shapes_questions(split, count, 32)
        assert len(read.images) == count
        wide = shapes_questions(split, count, (32, 48))
        for one, other in zip(read.questions, wide.questions, strict=True):
            assert (one.image, one.text, one.answers, one.agreed) == (
                other.image,
                other.text,
                other.answers,
                other.agreed,
            )
            assert (one.answer_type, one.question_type) == (other.answer_type, other.question_type)
        picture = np.asarray(Image.open(read.images[3]), np.int64)
        exact = wide.images[3].permute(1, 2, 0).numpy().astype(np.int64)
        assert picture.shape == (32, 48, 3) and np.abs(picture - exact).mean() < 4
        assert read.digest() != drawn.digest()
    both = read_vqav2(vqav2, "train2014+val2014")
    assert len(both.images) == 34 and len(both) == 102 and both.questions[-1].image == 33
    assert {question.image for question in both.first(5).questions} == set(range(5))


def test_the_folders_of_the_official_tools_are_found(vqav2: Path, tmp_path: Path) -> None:
    for name, place in (
        ("*questions.json", "Questions"),
        ("*annotations.json", "Annotations"),
        ("val2014", "Images/mscoco"),
    ):
        (tmp_path / place).mkdir(parents=True)
        for file in vqav2.glob(name):
            (tmp_path / place / file.name).symlink_to(file)
    assert read_vqav2(tmp_path, "val2014").digest() == read_vqav2(vqav2, "val2014").digest()


@pytest.mark.parametrize(
    ("remove", "said"),
    [
        ("v2_OpenEnded_mscoco_val2014_questions.json", "lacks VQAv2's questions of val2014"),
        ("v2_mscoco_val2014_annotations.json", "lacks VQAv2's annotations of val2014"),
        (
            "val2014/COCO_val2014_000000500003.jpg",
            "lacks 1 of the 10 images .* such as COCO_val2014_000000500003.jpg",
        ),
        ("val2014", "lacks the COCO images of val2014"),
    ],
)
def test_missing_files_are_reported_before_training(vqav2: Path, tmp_path: Path, remove: str, said: str) -> None:
    for file in vqav2.rglob("*"):
        here = file.relative_to(vqav2)
        if file.is_file() and not str(here).startswith(remove):
            (tmp_path / here).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / here).symlink_to(file)
    with pytest.raises(vf.VitfocusError, match=said):
        train("shapes_answer", out=tmp_path / "run", overrides=overrides(tmp_path))
    assert not (tmp_path / "run" / "config.toml").exists()


def test_files_of_another_kind_are_refused(vqav2: Path, tmp_path: Path) -> None:
    (tmp_path / "v2_OpenEnded_mscoco_val2014_questions.json").write_text('{"questions": [{"question_id": 1}]}')
    with pytest.raises(vf.VitfocusError, match=r"questions\[0\] lacks the key 'image_id'"):
        read_vqav2(tmp_path, "val2014")
    (tmp_path / "v2_OpenEnded_mscoco_val2014_questions.json").write_text('{"questions": [')
    with pytest.raises(vf.VitfocusError, match="cannot be read"):
        read_vqav2(tmp_path, "val2014")
    with pytest.raises(vf.VitfocusError, match="no data folder"):
        read_vqav2(tmp_path / "nowhere", "val2014")
    good = {"question_id": 1, "image_id": 1, "question": "What?"}
    asked, answered = ("v2_OpenEnded_mscoco_val2014_questions.json", "v2_mscoco_val2014_annotations.json")
    for question, answers, said in (
        (None, [{"answer": "a"}], "question is None; expected text"),
        ("What?", ["a"], "answers.0. is 'a'"),
    ):
        (tmp_path / asked).write_text(json.dumps({"questions": [{**good, "question": question}]}))
        (tmp_path / answered).write_text(json.dumps({"annotations": [{"question_id": 1, "answers": answers}]}))
        with pytest.raises(vf.VitfocusError, match=said):
            read_vqav2(tmp_path, "val2014")


@pytest.mark.parametrize(("what", "key"), [("questions", "OpenEnded_mscoco"), ("annotations", "mscoco")])
def test_a_question_that_is_listed_twice_is_refused(vqav2: Path, tmp_path: Path, what: str, key: str) -> None:
    root = tmp_path / "root"
    shutil.copytree(vqav2, root)
    file = root / f"v2_{key}_val2014_{what}.json"
    content = json.loads(file.read_text())
    content[what].append({**content[what][0], "question": "Another?", "answers": [{"answer": "another"}]})
    file.write_text(json.dumps(content))
    number = content[what][0]["question_id"]
    with pytest.raises(vf.VitfocusError, match=f"{what}.json lists the question {number} twice"):
        read_vqav2(root, "val2014")


def test_images_are_held_out_of_the_default_training_split(
    vqav2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command evaluates no run on images that it was trained on unless a split is named."""
    recipe = load_recipe("shapes_answer", overrides(vqav2, **{"data.holdout": 3}))
    training, held = (open_questions(recipe.data, split) for split in ("train", "val"))
    assert {Path(held.name(index)).parent.name for index in range(len(held))} == {"train2014"}
    assert len(held) + len(training) == len(read_vqav2(vqav2, "train2014"))
    train(recipe, out=tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert "holds out 3 images, which no suite can select: give --split" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--split", "val2014"]) == 0


def test_word_pieces_equal_those_of_bert(tmp_path: Path) -> None:
    """The same vocabulary in BERT's own tokenizer cuts questions alike."""
    questions = [question.text for question in shapes_questions("train", 40, 32).questions]
    words = QuestionTokenizer.train(questions, size=90)
    (tmp_path / "vocab.txt").write_text(
        "\n".join(sorted(words.tokenizer.get_vocab(), key=words.tokenizer.get_vocab().get)), encoding="utf-8"
    )
    asked = [*questions[:20], "Is the ZEBRA red, or isn't it?", "Où est l'étoile?", ""]
    bert = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    rows, again = words(asked), QuestionTokenizer.read(tmp_path)
    assert again is not None and torch.equal(again(asked)["input_ids"], rows["input_ids"])
    expected = bert(asked, padding=True, return_tensors="pt")
    assert torch.equal(expected["input_ids"], rows["input_ids"])
    assert torch.equal(expected["attention_mask"], rows["attention_mask"])
    assert QuestionTokenizer.train(questions, size=90).to_json() == words.to_json()
    assert QuestionTokenizer(words.tokenizer, longest=5)(asked)["input_ids"].shape[1] == 5


def test_pictures_are_prepared_as_vilt_prepares_them() -> None:
    processor = transformers.ViltImageProcessor(size={"shortest_edge": 96}, size_divisor=16)
    look = VqaPreprocessing(96, 16, (0.5,) * 3, (0.5,) * 3)
    draw = np.random.default_rng(0)
    for height, width in ((60, 80), (200, 90), (64, 300), (96, 96), (31, 47)):
        picture = Image.fromarray(draw.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)).resize(
            (width, height)
        )
        theirs = processor(picture, return_tensors="pt")["pixel_values"][0]
        ours = look.resize(picture)
        assert tuple(ours.shape[1:]) == tuple(theirs.shape[1:]) == fitted_size(height, width, 96, 16)
        assert (ours.float() / 127.5 - 1 - theirs).abs().mean() < 0.02


def test_a_treated_run_resumes_loads_and_answers_again(vqav2: Path, tmp_path: Path) -> None:
    changes = overrides(vqav2, spec="transformers:ViltForQuestionAnswering+cbs(tokens=text)+adl", **{"data.size": 16})
    recipe = load_recipe("shapes_answer", [*changes, "engine.checkpoint_steps=3", "augment.randaugment=rand-m9-n2"])
    whole = train(recipe, out=tmp_path / "whole")
    stopped = tmp_path / "whole" / "checkpoints" / "00000003"
    resumed = train(recipe, out=tmp_path / "resumed", resume=stopped)
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert whole["last"] == resumed["last"] and whole["train_images"] == 72

    model = vf.load(tmp_path / "whole" / "model")
    assert [str(one) for one in vf.applied(model)] == ["cbs(tokens=text)", "adl"]
    asked = read_vqav2(vqav2, "val2014")
    answerer = Answerer(model, size=16)
    pictures = [asked.read(index)[0] for index in range(len(asked))]
    given = answerer(pictures, [question.text for question in asked.questions])
    official = np.mean([soft_accuracy(a, question.answers) for a, question in zip(given, asked.questions, strict=True)])
    assert official == pytest.approx(whole["last"]["accuracy"])

    scores = vf.evaluate(model, "answers", vqav2, out=tmp_path / "scores", progress=False, batch_size=7)
    assert scores["accuracy"] == pytest.approx(100 * official)
    shapes = Shapes("val", length=12, size=16, task="answer")
    drawn = shapes_questions("val", 12, 16)
    firsts = [next(one for one in drawn.questions if one.image == item) for item in range(12)]
    subset = VqaDataset(firsts, drawn.images)
    by_item, by_set = (vf.evaluate(model, "answers", data, progress=False) for data in (shapes, subset))
    assert by_item["accuracy"] == pytest.approx(by_set["accuracy"]) and by_item.images == 12
    written = json.loads((tmp_path / "scores" / "answers.json").read_text())
    assert [one["answer"] for one in written] == given
    assert [one["question_id"] for one in written] == [question.number for question in asked.questions]

    batch = {"pixel_values": torch.stack([torch.tensor(np.asarray(p)).permute(2, 0, 1) for p in pictures[:4]])}
    rows = vf.diagnose(model, batch | {"question": [question.text for question in asked.questions[:4]]}).rows
    assert len(rows) == 2 and all(0 < row["entropy"] <= row["entropy_bound"] for row in rows)


def test_checkpoint_keeps_its_tokenizer_and_answers(
    vqav2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = QuestionTokenizer.train(["is there a star", "how many are there"], size=120)
    config = vilt_config(
        vocab_size=len(words),
        max_position_embeddings=20,
        id2label={0: "no", 1: "yes", 2: "blue"},
        label2id={"no": 0, "yes": 1, "blue": 2},
    )
    torch.manual_seed(3)
    original = transformers.ViltForQuestionAnswering(config)
    original.save_pretrained(tmp_path / "vilt")
    (tmp_path / "vilt" / "tokenizer.json").write_text(words.to_json())
    changes = [one for one in overrides(vqav2) if not one.startswith("model.arguments")]
    chosen = [
        *changes,
        f"spec=transformers:{tmp_path}/vilt+cbs(tokens=image)",
        "model.pretrained=true",
        "model.arguments={}",
    ]
    recipe = load_recipe("shapes_answer", [*chosen, "optimiser.head_lr=10", "optimiser.lr=0", "schedule.warmup_lr=0"])
    results = train(recipe, out=tmp_path / "run")
    assert (results["answers"], results["words_from"]) == (3, "the checkpoint")
    said = capsys.readouterr().err
    assert "answer.words=200 is not used, since the checkpoint determines it" in said and "answer.answers" not in said
    (tmp_path / "vilt").rename(tmp_path / "moved")  # a saved model stands on its own
    model: Any = vf.load(tmp_path / "run" / "model")
    assert model.config.id2label == {0: "no", 1: "yes", 2: "blue"}
    assert (
        tokenizer_of(model)(["how many are there"])["input_ids"].tolist()
        == words(["how many are there"])["input_ids"].tolist()
    )
    with vf.untreated(model):
        for name, tensor in original.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name


def test_the_papers_recipes() -> None:
    """Table 10's four models: ViLT's own fine-tuning, and one value a channel and layer more."""
    with torch.device("meta"):
        model = transformers.ViltForQuestionAnswering(transformers.ViltConfig(num_labels=3129))
    plain = sum(parameter.numel() for parameter in model.parameters())
    groups = {"": None, "_cbs_image": "image", "_cbs_text": "text", "_cbs_both": "all"}
    for name, tokens in groups.items():
        recipe = load_recipe(f"vilt_vqav2{name}")
        optimiser, schedule = recipe.optimiser, recipe.schedule
        assert (recipe.data.batch, schedule.epochs, optimiser.lr, optimiser.head_lr) == (256, 10, 1e-4, 10)
        plan = TrainingSchedule.of(recipe, 443_757)
        assert plan.warmup / plan.steps == pytest.approx(0.1, abs=1e-3) and plan.learning_rate(plan.warmup) == 1e-4
        treatments = split_spec(recipe.model.spec)[1]
        assert [getattr(one, "tokens", None) for one in treatments] == ([tokens] if tokens else [])
        vf.treat_(model, *treatments)
        assert sum(parameter.numel() for parameter in model.parameters()) - plain == (12 * 768 if tokens else 0)
        vf.untreat_(model)
    assert frequent_answers(map(str, range(5000)))[:2] == ["0", "1"]
    assert len(frequent_answers(map(str, range(5000)))) == load_recipe("vilt_vqav2").answer.answers == 3129


def test_other_models_and_keys_are_refused() -> None:
    with pytest.raises(vf.VitfocusError, match="task=answer trains ViLT"):
        train(load_recipe("shapes_answer", [*overrides(), "spec=vit_tiny_patch16_224"]), out="nowhere")
    with pytest.raises(vf.VitfocusError, match=r"augment\.flip"):
        train(load_recipe("shapes_answer", [*overrides(), "augment.flip=0.1"]), out="nowhere")
    with pytest.raises(vf.VitfocusError, match=r"source of questions 'vqa'.*vqav2"):
        train(load_recipe("shapes_answer", [*overrides(), "data.source=vqa"]), out="nowhere")
    assert not Path("nowhere").exists()


def test_withheld_answers_are_predicted_but_not_scored(vqav2: Path, tmp_path: Path) -> None:
    asked = read_vqav2(vqav2, "val2014")
    assert asked.annotated
    bare = VqaDataset([type(one)(one.number, one.image, one.text) for one in asked.questions], asked.images)
    assert not bare.annotated
    words = QuestionTokenizer.train([question.text for question in asked.questions], size=80)
    names = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes = {"image_size": 32, "patch_size": 16, "vocab_size": len(words)}
    model = vf.create_model("transformers:ViltForQuestionAnswering", **names, **small, **sizes)
    with pytest.raises(vf.VitfocusError, match=r"tokenizer\.json or vocab\.txt"):
        vf.evaluate(model, "answers", asked, progress=False)
    attach_tokenizer(model, words)
    with pytest.raises(vf.VitfocusError, match="withheld"):
        vf.evaluate(model, "answers", bare, progress=False)
    scores = vf.evaluate(model, "answers", bare, out=tmp_path, progress=False)
    assert "accuracy" not in scores.models[next(iter(scores.models))]
    assert "withheld" in str(scores.table())
    written = json.loads((tmp_path / "answers.json").read_text())
    assert [one["question_id"] for one in written] == [one.number for one in bare.questions]


def test_train_and_val_are_trained_on_and_test_dev_is_answered(vqav2: Path, tmp_path: Path) -> None:
    """As ViLT is fine-tuned: some images of val2014 are held out, answers come from both splits, and a file is for the
    server that has test-dev's answers. Every number says its split."""
    root = tmp_path / "vqav2"
    shutil.copytree(vqav2, root)
    (root / "test2015").mkdir()
    questions = json.loads((root / "v2_OpenEnded_mscoco_val2014_questions.json").read_text())
    (root / "v2_OpenEnded_mscoco_test-dev2015_questions.json").write_text(json.dumps(questions))
    for file in (root / "val2014").iterdir():
        shutil.copy(file, root / "test2015" / file.name.replace("val2014", "test2015"))
    splits = {"data.train_split": "train2014+val2014", "data.holdout": 3, "data.size": 16}
    recipe = load_recipe("shapes_answer", overrides(root, **splits))
    training, held = (open_questions(recipe.data, split) for split in ("train", "val"))
    both = read_vqav2(root, "train2014+val2014")
    pictures = {Path(held.name(index)).parent.name for index in range(len(held))}
    assert len({question.image for question in held.questions}) == 3 and pictures == {"val2014"}
    assert not {q.image for q in held.questions} & {q.image for q in training.questions}
    assert {q.number for q in held.questions} | {q.number for q in training.questions} <= {
        q.number for q in both.questions
    }
    assert len(held) + len(training) == len(both) == 34 * 3
    results = train(recipe, out=tmp_path / "run")
    assert results["splits"]["val"] == "3 held-out images of val2014" and results["val_images"] == 9
    counts = Counter(normalise_answer(question.agreed) for question in both.questions)
    assert results["answers"] == len(counts), "from train and val"

    item = load_item("cb/table10")
    planned = plan_row(item, item.rows[0], "smoke", DataFolders(), tmp_path)
    assert planned is not None
    run = dataclasses.replace(planned, recipe=recipe, folder=tmp_path / "run")
    value = measure("vqa", run, results, MeasureSettings(DataFolders()))
    assert isinstance(value, Measurement) and value.title == "VQA accuracy on 3 held-out images of val2014"
    (note,) = submissions(item.measures, run, MeasureSettings(DataFolders()))
    written = json.loads(Path(note.rpartition(": ")[2].rstrip(".")).read_text())
    assert [one["question_id"] for one in written] == [one["question_id"] for one in questions["questions"]]
    assert "test-dev2015" in note and all(isinstance(one["answer"], str) for one in written)
    with pytest.raises(vf.VitfocusError, match=r"data\.holdout=10 leaves none of the 10 images of val2014"):
        open_questions(replace(recipe.data, holdout=10), "train")


def test_questions_are_counted_as_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the progress, the result and the report of a run, and in the progress of an evaluation."""
    out = tmp_path / "run"
    assert main(["train", "shapes_answer", *overrides(), "log_every=1", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "72 training and 30 validation questions, 6 steps" in said.err
    assert " questions/s" in said.err and " questions/s). Model" in said.out
    assert "images" not in said.err + said.out
    page = (out / "report.html").read_text("utf-8")
    assert "training questions" in page and "questions per second of the training run" in page
    assert "end of training" in page and not any(f"{kind} images" in page for kind in ("training", "validation"))
    assert main(["evaluate", str(out), "--data", "shapes:2"]) == 0
    said = capsys.readouterr()
    assert " question evaluations." in said.err and "image evaluations" not in said.err
