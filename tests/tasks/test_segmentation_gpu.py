"""Segmentation on a GPU: at 1024×1024 pixels the diversification loss costs next to no memory, at batch size 1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import vitfocus as vf


def peak(spec: str, side: int) -> float:
    """Bytes at the highest point of a second training step, beyond what the model itself takes."""
    torch.manual_seed(0)
    model = vf.create_model(spec, num_classes=19).cuda().train()
    images = torch.randn(1, 3, side, side, device="cuda")
    masks = torch.randint(19, (1, side, side), device="cuda")
    optimiser = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            output = model(images)
        output = output["out"].float()
        loss = F.cross_entropy(output, masks) + vf.auxiliary_loss(model)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        assert loss.isfinite()
    return torch.cuda.max_memory_allocated()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["upernet:vit_tiny_patch16_224", "segformer:fan_base_16_p4_hybrid"])
def test_diversification_fits_at_1024(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    plain = peak(name, 1024)
    torch.cuda.empty_cache()
    assert peak(f"{name}+adl", 1024) <= 1.15 * plain
