"""Contexts around models, in threads and out of order."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import eval_frame

from vitfocus.core.modules import eval_mode, running_eagerly


def test_contexts_that_overlap_leave_the_compiler_as_it_was() -> None:
    """As two threads do: the first context ends before the second."""
    before = eval_frame._stance
    first, second = running_eagerly(), running_eagerly()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert eval_frame._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert eval_frame._stance == before


def test_eval_mode_leaves_no_cached_biases_and_restores_every_mode() -> None:
    """transformers' LeViT caches its position biases in eval mode until `train()` is called; training changes them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LevitConfig(image_size=64, hidden_sizes=[16, 24, 32], key_dim=[8, 8, 8], depths=[1, 1, 1])
    torch.manual_seed(0)
    model = transformers.LevitForImageClassification(config).train()
    model.levit.patch_embeddings.eval()  # frozen, as in fine-tuning
    images = torch.randn(2, 3, 64, 64)
    modes = [module.training for module in model.modules()]
    with eval_mode(model), torch.no_grad():
        model(images)
    assert [module.training for module in model.modules()] == modes
    cached = [module.attention_bias_cache for module in model.modules() if hasattr(module, "attention_bias_cache")]
    assert len(cached) == 5 and not any(cached)
