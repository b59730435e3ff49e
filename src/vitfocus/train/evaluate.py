"""Top-1, top-5 and cross-entropy on the validation images, over all processes."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from vitfocus.data.evaluation import EvaluationBatches
from vitfocus.train.loss import split_output


@torch.no_grad()
def evaluate(model: nn.Module, batches: EvaluationBatches, accelerator: Accelerator) -> dict[str, float]:
    """Every image counts once; the model is left in the mode it was in."""
    training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=accelerator.device)
    with closing(iter(batches)) as parts:
        for images, labels, counts in parts:
            with accelerator.autocast():
                output: Any = model(images)
            logits = split_output(output)[0].float()
            ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="none")
            rows = torch.stack([torch.ones_like(loss), loss, ranked[:, 0].float(), ranked.any(1).float()])
            sums += (rows * counts).sum(1).double()
    model.train(training)
    count, loss_sum, first, five = accelerator.reduce(sums).tolist()
    count = max(1.0, count)
    return {"top1": first / count, "top5": five / count, "loss": loss_sum / count}
