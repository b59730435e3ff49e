"""Contexts around models, in threads and out of order."""

from __future__ import annotations

import timm
import torch
from torch import nn
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
    """LeViT caches its position biases in eval mode until `train()` is called; training changes them."""
    torch.manual_seed(0)
    model = timm.create_model("levit_128s", num_classes=10).train()
    model.stem.eval()  # frozen, as in fine-tuning
    images = torch.randn(2, 3, 224, 224)
    modes = [module.training for module in model.modules()]
    with eval_mode(model), torch.no_grad():
        model(images)
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attention_biases"):
                nn.init.normal_(parameter)
    fresh = timm.create_model("levit_128s", num_classes=10).eval()
    fresh.load_state_dict(model.state_dict())
    with eval_mode(model), torch.no_grad():
        torch.testing.assert_close(model(images), fresh(images))
