"""The readings reimplemented in plain loops over numpy arrays: slow, obvious, and sharing no code with the library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def naive_row(maps: np.ndarray, geometry: Any) -> dict[str, float]:
    """A layer's numbers from explicit maps (B, H, Q, K)."""
    maps = maps.astype(np.float64)
    _, heads, queries, keys = maps.shape
    entropies = np.array([[[entropy(row) for row in head] for head in image] for image in maps])
    row = {
        "entropy": entropies.mean(),
        "entropy_p15": np.percentile(entropies, 15),
        "entropy_p85": np.percentile(entropies, 85),
        "entropy_bound": math.log(keys),
        "gradient": np.mean([sum(a - a * a for a in row) for row in maps.reshape(-1, keys)]),
    }
    if geometry.class_token:
        row["entropy_cls"] = entropies[:, :, 0].mean()
    top = max(1, round(0.05 * keys))
    shares, effective = [], []
    for image in maps:
        for head in image:
            received = head.sum(axis=0) / queries
            shares.append(sum(sorted(received, reverse=True)[:top]))
            effective.append(math.exp(entropy(received / received.sum())))
    row |= {"overfocus": np.mean(shares), "effective_tokens": np.mean(effective)}
    if heads > 1:
        row["head_similarity"] = np.mean(
            [cosine(image[a], image[b]) for image in maps for a in range(heads) for b in range(heads) if a != b]
        )
    if geometry.grids is not None:
        row["distance"] = naive_distance(maps, geometry)
    average = maps.mean(axis=1)
    row["diversity_official"] = np.mean([official(image) for image in average])
    row["diversity_paper"] = np.mean([paper(image) for image in average])
    return {key: float(value) for key, value in row.items()}


def entropy(row: np.ndarray) -> float:
    return -sum(a * math.log(a) for a in row if a > 0)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float((a * b).sum() / lengths) if lengths > 0 else 0.0


def naive_distance(maps: np.ndarray, geometry: Any) -> float:
    def place(token: int, grid: tuple[int, int]) -> tuple[float, float]:
        rows, columns = grid
        return token // columns / max(rows - 1, 1), token % columns / max(columns - 1, 1)

    prefix, total, count = geometry.prefix_tokens, 0.0, 0
    average = maps.mean(axis=(0, 1))[prefix:, prefix:]
    for i in range(average.shape[0]):
        y, x = place(i, geometry.query_grid)
        for j in range(average.shape[1]):
            other_y, other_x = place(j, geometry.key_grid)
            total += average[i, j] * (abs(y - other_y) + abs(x - other_x))
        count += 1
    return total / count


def official(rows: np.ndarray) -> float:
    least = 2 / rows.shape[-1]
    mean = rows.mean(axis=0)
    mean = np.where(mean > least, mean, 0)
    return float(np.mean([cosine(np.where(row > least, row, 0), mean) for row in rows]))


def paper(rows: np.ndarray) -> float:
    kept = np.where(rows >= 2 / rows.shape[-1], rows, 0)
    return float(np.mean([cosine(row, kept.mean(axis=0)) for row in kept]))
