"""The tasks' own sections of a recipe: [segment], [detect] and [answer], key by key."""

from __future__ import annotations

from dataclasses import dataclass

from vitfocus.data.settings import bounded, pair


@dataclass(frozen=True)
class Segment:
    """Training pictures and the test protocol of semantic segmentation; `data.size` is the training crop."""

    scale: tuple[float, float] = pair((0.5, 2.0), 1e-3)  # training: random factor of the picture's size
    short_side: int = bounded(0)  # pictures are first resized so that this is their short side; 0: as they are
    photometric: bool = True  # training: random brightness, contrast, saturation and hue
    most_of_one: float = bounded(0.75, 0, 1)  # training: no crop shows more than this share of one class, if avoidable
    auxiliary: float = bounded(0.4)  # weight of the auxiliary head's loss
    window: int = bounded(0)  # test: side of the sliding window; 0: the whole picture at once
    stride: int = bounded(0)  # test: from one window to the next; 0: two thirds of the window
    test_flip: bool = False  # test: average with the mirrored picture's prediction


@dataclass(frozen=True)
class Detect:
    """Pictures of detection and instance segmentation; `data.size` is the shortest side, at test time too."""

    longest: int = bounded(1333, 8)  # the longest side is at most this, at the cost of the shortest
    sides: tuple[float, float] = pair((0, 0), 0)  # training: shortest sides between these, in steps of 32; 0: data.size
    jitter: tuple[float, float] = pair((1.0, 1.0), 1e-3)  # training: large-scale jitter of a square; 1, 1: off
    keep_empty: bool = False  # training: pictures without an object too


@dataclass(frozen=True)
class Answer:
    """Visual question answering; `data.size` is the shorter side of a picture.

    A model that starts from a checkpoint keeps that checkpoint's answers and word pieces, where it has them.
    """

    answers: int = bounded(3129, 1)  # the most frequent answers of the training questions, so many at most
    least: int = bounded(1, 1)  # and no answer that is agreed on fewer times than this
    words: int = bounded(30522, 16)  # word pieces at most
    longest: int = bounded(40, 3)  # word pieces of a question that are read, its start and end included
