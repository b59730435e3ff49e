"""Padding in a vision-language model: it enters no mean of Context Broadcasting and no reading of attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import vilt_config
from torch import Tensor

import vitfocus as vf
from vitfocus.attention.batches import PatchesInOrder
from vitfocus.data.vqa.batches import pad_images

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

SIZES = ((32, 32), (48, 16), (16, 64), (32, 32))
LENGTHS = (3, 6, 4, 1)


def tiny_vilt(**more: Any) -> Any:
    torch.manual_seed(0)
    config = vilt_config(vocab_size=50, max_position_embeddings=12, num_labels=5, **more)
    model = transformers.ViltForQuestionAnswering(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def singles() -> list[dict[str, Tensor]]:
    """Questions of several lengths about pictures of several sizes, each on its own and without padding."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(5, 50, (1, length), generator=generator),
            "pixel_values": torch.randn(1, 3, *size, generator=generator),
        }
        for length, size in zip(LENGTHS, SIZES, strict=True)
    ]


def together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The same as one padded batch; what pads it is noise, which must not matter."""
    ids = torch.randint(5, 50, (len(parts), max(LENGTHS)))
    mask = torch.zeros_like(ids)
    masks = pad_images([torch.zeros(3, *size, dtype=torch.uint8) for size in SIZES])
    pixels = torch.randn(len(parts), 3, *masks["pixel_mask"].shape[1:])
    for row, part in enumerate(parts):
        ids[row, : LENGTHS[row]], mask[row, : LENGTHS[row]] = part["input_ids"][0], 1
        pixels[row, :, : SIZES[row][0], : SIZES[row][1]] = part["pixel_values"][0]
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "pixel_mask": masks["pixel_mask"]}


@pytest.mark.parametrize("tokens", ["all", "image", "text"])
@pytest.mark.parametrize("variant", ["mean", "scaled"])
def test_padded_texts_and_pictures_answer_like_unpadded_ones(tokens: str, variant: str) -> None:
    model, parts = tiny_vilt(), singles()
    with torch.no_grad():
        plain = torch.cat([model(**part).logits for part in parts])
        vf.treat_(model, vf.ContextBroadcasting(variant=variant, tokens=tokens))
        for name, parameter in model.named_parameters():
            if name.endswith("context_scale"):
                torch.nn.init.normal_(parameter, std=0.5)
        alone = torch.cat([model(**part).logits for part in parts])
        padded = model(**together(parts)).logits
    assert not torch.allclose(plain, alone, atol=1e-3)
    torch.testing.assert_close(padded, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["", ",variant=paper,heads=each"])
def test_padding_is_excluded_from_the_diversification_loss(form: str) -> None:
    model, parts = tiny_vilt(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), singles()
    vf.treat_(model, f"adl(threshold=1.0{form})").train()
    losses = []
    for batch in (*parts, together(parts)):
        model(**batch)
        losses.append(vf.auxiliary_loss(model))
    torch.testing.assert_close(losses[-1], torch.stack(losses[:-1]).mean())


@pytest.mark.parametrize("tokens", ["image", "text"])
def test_token_group_is_broadcast_only_to_itself(tokens: str) -> None:
    model, part = tiny_vilt(), singles()[1]
    vf.treat_(model, vf.ContextBroadcasting(tokens=tokens, layers=[0]))
    seen: dict[str, Tensor] = {}
    block = vf.anatomy(model)[0].host
    block.context_mlp.register_forward_hook(lambda module, args, output: seen.update(before=args[0], after=output))
    with torch.no_grad():
        model(**part)
    length = LENGTHS[1]
    group = slice(0, length) if tokens == "text" else slice(length, None)
    rest = slice(length, None) if tokens == "text" else slice(0, length)
    before, after = seen["before"], seen["after"]
    assert torch.equal(before[:, rest], after[:, rest])
    expected = (before[:, group] + before[:, group].mean(1, keepdim=True)) / 2
    torch.testing.assert_close(after[:, group], expected)


@pytest.mark.parametrize(
    "specs", [("cbs(tokens=image)", "cbs(tokens=text)"), ("cbs(tokens=text)", "cbs(tokens=image)")]
)
def test_each_kind_of_token_may_have_its_own_scale(specs: tuple[str, str], tmp_path: Path) -> None:
    model, part = tiny_vilt(), singles()[1]
    with torch.no_grad():
        plain = model(**part).logits
        vf.treat_(model, "+".join(specs))
        seen: dict[str, Tensor] = {}
        block = vf.anatomy(model)[0].host
        modules = {one.tokens: one for one in block.modules() if hasattr(one, "context_scale")}
        scales = {tokens: torch.nn.init.normal_(modules[tokens].context_scale) for tokens in ("image", "text")}
        first, last = (modules[spec[len("cbs(tokens=") : -1]] for spec in specs)
        first.register_forward_hook(lambda module, args, output: seen.update(before=args[0]))
        last.register_forward_hook(lambda module, args, output: seen.update(after=output))
        treated = model(**part).logits
        expected = seen["before"].clone()
        for tokens, group in (("text", slice(0, LENGTHS[1])), ("image", slice(LENGTHS[1], None))):
            expected[:, group] += scales[tokens] * seen["before"][:, group].mean(1, keepdim=True)
        torch.testing.assert_close(seen["after"], expected)
        loaded: Any = vf.load(vf.save(model, tmp_path / "model"))
        assert [str(one) for one in vf.applied(loaded)] == list(specs)
        torch.testing.assert_close(loaded(**part).logits, treated)
        with pytest.raises(vf.VitfocusError, match="already; untreat"):
            vf.treat_(model, specs[0])
        with vf.untreated(model):
            torch.testing.assert_close(model(**part).logits, plain)
        torch.testing.assert_close(model(**part).logits, treated)
        assert not torch.allclose(plain, treated, atol=1e-3)
        other = vf.treat_(tiny_vilt(), "+".join(reversed(specs)))
        with pytest.raises(vf.VitfocusError):  # the scales would change places
            vf.load_weights(other, model.state_dict())


def test_a_diagnosis_excludes_padding() -> None:
    model, parts = tiny_vilt(), singles()
    whole = vf.diagnose(model, together(parts)).rows
    single = [vf.diagnose(model, part).rows for part in parts]
    rows = [part["input_ids"].shape[1] + 1 + h * w // 64 for part, (h, w) in zip(parts, SIZES, strict=True)]
    for layer, row in enumerate(whole):
        for key, weights in (
            ("entropy", rows),
            ("entropy_bound", rows),
            ("head_similarity", [1] * 4),
            ("distance", [1] * 4),
        ):
            expected = sum(s[layer][key] * w for s, w in zip(single, weights, strict=True)) / sum(weights)
            assert row[key] == pytest.approx(expected, rel=1e-4), key
        assert row["entropy"] <= row["entropy_bound"]


def test_stability_compares_patches_that_lie_at_the_same_place() -> None:
    """ViLT shuffles the patches of every picture; against itself a picture must still be perfectly stable."""
    model, batch = tiny_vilt(), together(singles())
    rows = vf.diagnose(model, batch, against=batch).rows
    assert [row["stability"] for row in rows] == pytest.approx([1.0, 1.0], abs=1e-5)


def test_maps_have_their_patches_in_order() -> None:
    """A picture that is bright in one patch alone is seen there, and the shuffle changes no output."""
    model = tiny_vilt()
    part = singles()[0]
    with torch.no_grad():
        shuffled, logits = (model(**part).logits for _ in range(2))
        with PatchesInOrder():
            ordered = model(**part).logits
    torch.testing.assert_close(shuffled, logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ordered, logits, atol=1e-5, rtol=1e-5)
    first, second = (vf.attention_maps(model, part)[0] for _ in range(2))
    assert torch.equal(first, second) and first.shape == (1, 2, 20, 20)


def test_model_that_needs_text_raises_an_error() -> None:
    with pytest.raises(vf.VitfocusError, match="reads a text with every image"):
        vf.diagnose(tiny_vilt(), torch.zeros(2, 3, 32, 32))
