"""Treated models compile, export, run in onnxruntime, and train on several processes."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.processes import start
from helpers.tiny import build
from torch import nn

import vitfocus as vf

ALL = "cbs+tap+adl(variant=paper,threshold=1.0)+se"


@pytest.mark.parametrize(
    "family", ["vit", "beit", "swin", "swin_v2", "pvt_v2", "eva02", "fan", "rvt", "pvt", "localvit", "mixer"]
)
def test_compiles_without_a_graph_break(family: str) -> None:
    one_block = {"depth": 1} if family in ("beit", "eva02", "fan", "localvit") else {}  # tracing takes time per block
    model, images = build(family, **one_block)
    vf.treat_(model, "cb+se" if family == "mixer" else ALL).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.Dropout):
            module.eval()
    expected = model(images)
    expected_loss = vf.auxiliary_loss(model)
    (expected.square().mean() + expected_loss).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = compiled(images)
    loss = vf.auxiliary_loss(compiled)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=1e-4)
    (output.square().mean() + loss).backward()
    for name, parameter in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(parameter.grad, grads[name], atol=1e-4, rtol=1e-3)


def test_inductor_end_to_end() -> None:
    model, images = build("vit")
    vf.treat_(model, ALL).train()
    expected = model.eval()(images)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(images), expected, atol=1e-4, rtol=1e-3)


def test_compiled_models_can_be_treated_and_untreated() -> None:
    model, images = build("vit")
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        plain = compiled(images)
        vf.treat_(compiled, "cb+tap")
        treated = compiled(images)
        torch.testing.assert_close(treated, model(images), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(treated, plain)
        with vf.untreated(compiled):
            torch.testing.assert_close(compiled(images), plain)
        torch.testing.assert_close(compiled(images), treated)
        torch.testing.assert_close(vf.untreat_(compiled)(images), plain)


@pytest.mark.parametrize("family", ["vit", "vit_rect", "swin", "pvt_v2", "fan", "rvt", "pvt", "localvit"])
def test_exports(family: str) -> None:
    model, images = build(family)
    vf.treat_(model, ALL)
    with torch.no_grad():
        expected = model(images)
        program = torch.export.export(model, (images,))
        torch.testing.assert_close(program.module()(images), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", ["cbs+tap+adl+se", "registers+ttr(neurons=[[0,1]])+gate+qknorm+sigma"])
def test_exports_for_any_number_of_images(spec: str) -> None:
    model, images = build("vit", depth=2)
    vf.treat_(model, spec)
    three, batch = torch.cat((images, images[:1])), {0: torch.export.Dim("batch", min=2, max=64)}
    with torch.no_grad():
        program = torch.export.export(model, (three,), dynamic_shapes=(batch,))
        torch.testing.assert_close(program.module()(images), model(images), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_onnx(family: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
    pytest.importorskip("onnxscript", reason="the onnx extra is not installed")
    model, images = build(family)
    vf.treat_(model, ALL)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model(images)
        torch.onnx.export(model, (images,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), expected, atol=1e-4, rtol=1e-3)


#: Everything that adds parameters and does not depend on the other images of a batch.
_TRAINED = "cbs+registers+gate+qknorm+sigma+adl(variant=paper,threshold=1.0)"


def _train_on_one_of_two(rank: int, folder: str, sharded: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model, images = build("vit")
    vf.treat_(model, _TRAINED).train()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        wrapped: nn.Module = fully_shard(model, mesh=mesh)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    loss = wrapped(images[rank : rank + 1]).square().mean() + vf.auxiliary_loss(wrapped)
    loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    if rank == 0:
        torch.save(grads, f"{folder}/grads.pt")
    dist.barrier()
    dist.destroy_process_group()


def _rescale_sharded_weights(folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    model, images = build("vit")
    expected = vf.treat_(copy.deepcopy(model), "sigma").train()(images)
    vf.treat_(model, "sigma").train()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    torch.testing.assert_close(model(images), expected)
    vf.save(model, f"{folder}/model")
    torch.testing.assert_close(vf.load(f"{folder}/model")(images), model.eval()(images))
    with pytest.raises(vf.VitfocusError, match="gate adds parameters: treat the model before fully_shard"):
        vf.treat_(model, "gate")
    vf.treat_(model, "cb")  # which has none
    with pytest.raises(vf.VitfocusError, match=r"sigma .*: treat the model before"):
        vf.treat_(vf.untreat_(model), "sigma")
    dist.destroy_process_group()


def test_fsdp2_shards_rescaled_weights_and_nothing_that_comes_later(tmp_path: Path) -> None:
    started = start(_rescale_sharded_weights, str(tmp_path))
    assert started.wait() == 0, started.error


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_give_the_gradient_of_one(sharded: bool, tmp_path: Path) -> None:
    started = [start(_train_on_one_of_two, rank, str(tmp_path), sharded) for rank in (0, 1)]
    assert [one.wait() for one in started] == [0, 0], [one.error for one in started]
    model, images = build("vit")
    vf.treat_(model, _TRAINED).train()
    start_of_all = copy.deepcopy(model.state_dict())
    for image in images.split(1):
        model.load_state_dict(start_of_all)  # each process has taken one step of power iteration
        ((model(image).square().mean() + vf.auxiliary_loss(model)) / 2).backward()
    grads = torch.load(tmp_path / "grads.pt", weights_only=True)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-6, rtol=1e-4)
    for part in ("context_scale", "registers.tokens", "gates.weight", "query_norm.weight", "gain"):
        assert any(name.endswith(part) for name in grads), part


def test_inside_ddp_no_parameter_is_added(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(build("vit")[0])
        with pytest.raises(vf.VitfocusError, match="cbs adds parameters: treat the model before wrapping"):
            vf.treat_(wrapped, "cbs")
        assert not vf.applied(wrapped)
        vf.treat_(wrapped, "cb+adl")
        assert vf.applied(wrapped) == vf.applied(wrapped.module) != []
    finally:
        dist.destroy_process_group()
