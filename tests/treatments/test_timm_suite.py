"""timm's own tests of a model (forward, backward, tracing by torch.fx), on treated models of every family."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.tiny import TIMM, build
from timm.models._features_fx import get_notrace_functions, get_notrace_modules
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import vitfocus as vf
from vitfocus.treatments.surgery import columns

ALL = "cbs+tap+adl(variant=paper,threshold=1.0)"
QUICK = ("vit", "vit_registers", "deit_distilled", "beit", "eva02", "swin", "pvt_v2", "pit", "mixer", "fan")
FAMILIES = [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in TIMM]


def treated(family: str) -> tuple[nn.Module, torch.Tensor]:
    """A model with as many of the treatments as its family takes."""
    model, images = build(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for spec in ALL.split("+"):
            try:
                vf.treat_(model, spec)
            except vf.VitfocusError:
                continue
    assert vf.applied(model)
    return model, images


def joined(output: Any) -> torch.Tensor:
    return torch.cat(output) if isinstance(output, tuple) else output


def traced(model: nn.Module) -> nn.Module:
    """The graph of a model, traced as timm traces its models."""
    how = {"leaf_modules": list(get_notrace_modules()), "autowrap_functions": list(get_notrace_functions())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = get_graph_node_names(model, tracer_kwargs=how, suppress_diff_warning=True)
        train, evaluate = ([one[-1]] for one in nodes)
        return create_feature_extractor(
            model, train_return_nodes=train, eval_return_nodes=evaluate, tracer_kwargs=how, suppress_diff_warning=True
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward(family: str) -> None:
    plain, images = build(family)
    model, _ = treated(family)
    with torch.no_grad():
        output = joined(model(images[:1]))
    assert output.shape == (1, 5) and not output.isnan().any()
    reached = []
    for one in (plain, model):
        one.train()
        (joined(one(images)).mean() + vf.auxiliary_loss(one)).backward()
        reached.append({name for name, parameter in one.named_parameters() if parameter.grad is not None})
    missing = {name for name, _ in model.named_parameters()} - reached[1]
    assert missing <= {name for name, _ in plain.named_parameters()} - reached[0]
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_tracing(family: str) -> None:
    plain, images = build(family)
    try:
        traced(plain)
    except Exception as error:
        pytest.skip(f"torch.fx does not trace the plain {family}: {type(error).__name__}")
    model, _ = treated(family)
    if family == "naflex":  # whose stem timm does not trace
        with pytest.raises(vf.VitfocusError, match="does not know the grid"):
            traced(model)
        return
    graph = traced(model).eval()
    with torch.no_grad():  # the graph has the reference operations in place of our own, which round otherwise
        expected = joined(model.eval()(images))
        torch.testing.assert_close(joined(tuple(graph(images).values())), expected, atol=1e-5, rtol=1e-4)
    graph.train()
    joined(tuple(graph(images).values())).mean().backward()
    trained = {name for name, parameter in graph.named_parameters() if parameter.grad is not None}
    assert any("dilation_predictor" in name or "context_mlp" in name for name in trained)


@pytest.mark.parametrize("spec", columns().values())
def test_every_treatment_is_traced_or_refused(spec: str) -> None:
    model, images = build("vit")
    vf.treat_(model, spec).eval()
    if spec.startswith(("gate", "sigma")):
        with pytest.raises(vf.VitfocusError, match=r"torch\.fx cannot trace .*: use torch\.export"):
            traced(model)
        return
    with torch.no_grad():
        torch.testing.assert_close(*(one(images) for one in (torch.fx.symbolic_trace(model), model)), atol=1e-5, rtol=0)


def test_torchscript_is_refused_in_a_sentence() -> None:
    model, _ = treated("vit")
    with pytest.raises(vf.VitfocusError, match=r"deprecated: use torch\.compile or torch\.export"):
        torch.jit.script(nn.Sequential(model))
    vf.untreat_(model)
    assert torch.jit.script(model) is not None


def test_attention_extract_reads_treated_models() -> None:
    from timm.layers import set_fused_attn
    from timm.utils import AttentionExtract

    set_fused_attn(False)
    try:
        model, images = treated("vit")
        maps = AttentionExtract(model, method="fx")(images)
    finally:
        set_fused_attn(True)
    expected = vf.attention_maps(model, images, layers=None, normalised=True)
    assert len(maps) == len(expected) == 2
    for found, one in zip(maps.values(), expected, strict=True):
        torch.testing.assert_close(found, one, atol=1e-5, rtol=1e-4)
