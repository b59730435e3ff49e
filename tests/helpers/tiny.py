"""Small models of many families, whose weights are all nonzero, for tests that compare arithmetic."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import nn

import vitfocus.models  # noqa: F401  registers FAN, RVT, PVT and LocalViT with timm

TIMM: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "vit": ("vit_tiny_patch16_224", {"depth": 2, "img_size": 64, "embed_dim": 48, "num_heads": 3}, (64, 64)),
    "vit_rect": ("vit_tiny_patch16_224", {"depth": 2, "img_size": (64, 96), "embed_dim": 48}, (64, 96)),
    "vit_registers": ("vit_small_patch14_reg4_dinov2", {"depth": 2, "img_size": 56, "embed_dim": 48}, (56, 56)),
    "vit_gap": (
        "vit_base_patch16_siglip_gap_224",
        {"depth": 2, "img_size": 64, "embed_dim": 48, "num_heads": 3},
        (64, 64),
    ),
    "vit_res_post": ("vit_relpos_small_patch16_rpn_224", {"depth": 2, "img_size": 64, "embed_dim": 48}, (64, 64)),
    "vit_parallel": ("vit_small_patch16_18x2_224", {"depth": 2, "img_size": 64, "embed_dim": 48}, (64, 64)),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", {"depth": 2, "img_size": 64, "embed_dim": 48}, (64, 64)),
    "beit": ("beit_base_patch16_224", {"depth": 2, "img_size": 64, "embed_dim": 48}, (64, 64)),
    "eva02": ("eva02_tiny_patch14_224", {"depth": 2, "img_size": 56, "embed_dim": 48}, (56, 56)),
    "dinov3": ("vit_small_patch16_dinov3", {"depth": 2, "img_size": 64, "embed_dim": 48, "num_heads": 3}, (64, 64)),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"depths": (2, 2), "embed_dim": 24, "img_size": 56, "drop_path_rate": 0.0},
        (56, 56),
    ),
    "swin_v2": (
        "swinv2_tiny_window8_256",
        {"depths": (2, 2), "embed_dim": 24, "img_size": 64, "drop_path_rate": 0.0},
        (64, 64),
    ),
    "swin_v2_cr": (
        "swinv2_cr_tiny_ns_224",
        {
            "depths": (2, 2),
            "embed_dim": 24,
            "num_heads": (2, 4),
            "window_size": 4,
            "img_size": 64,
            "drop_path_rate": 0.0,
        },
        (64, 64),
    ),
    "sam": (
        "samvit_base_patch16_224",
        {"depth": 3, "img_size": 80, "embed_dim": 48, "num_heads": 3, "window_size": 2},
        (80, 80),
    ),
    "naflex": ("naflexvit_base_patch16_gap", {"depth": 2, "embed_dim": 48, "num_heads": 3}, (64, 96)),
    "twins": ("twins_svt_small", {"depths": (2, 2, 2, 2)}, (64, 96)),
    "pvt_v2": ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}, (64, 96)),
    "pit": ("pit_ti_distilled_224", {"img_size": 64}, (64, 64)),
    "mixer": ("mixer_s32_224", {"img_size": 64}, (64, 64)),
    "gmlp": ("gmlp_ti16_224", {"img_size": 64}, (64, 64)),
    "resmlp": ("resmlp_12_224", {"img_size": 64}, (64, 64)),
    "convit": ("convit_tiny", {"img_size": 64}, (64, 64)),
    "cait": ("cait_xxs24_224", {"depth": 2, "img_size": 64}, (64, 64)),
    "xcit": ("xcit_nano_12_p16_224", {"depth": 2}, (64, 96)),
    "mvit": ("mvitv2_tiny", {"drop_path_rate": 0.0, "img_size": 64}, (64, 64)),
    "davit": ("davit_tiny", {"depths": (1, 1, 1, 1)}, (64, 64)),
    "maxvit": ("maxvit_rmlp_pico_rw_256", {"img_size": 64}, (64, 64)),
    "coatnet": ("coatnet_rmlp_nano_rw_224", {"img_size": 64}, (64, 64)),
    "visformer": ("visformer_tiny", {"img_size": 64}, (64, 64)),
    "volo": ("volo_d1_224", {"img_size": 64}, (64, 64)),
    "fan": ("fan_tiny_8_p4_hybrid", {"depth": 2, "img_size": 64}, (64, 96)),
    "rvt": ("rvt_tiny_plus", {"img_size": 96, "depths": (2, 1), "masked_blocks": 1}, (96, 96)),
    "pvt": ("pvt_tiny", {"img_size": 64, "depths": (1, 1, 1, 1)}, (64, 64)),
    "localvit": ("localvit_tiny", {"img_size": 64, "depth": 2}, (64, 64)),
}


def build(name: str, seed: int = 0, **more: Any) -> tuple[nn.Module, torch.Tensor]:
    """A tiny model of that family in eval mode, with random weights throughout, and a batch of two images for it."""
    model_name, options, size = TIMM[name]
    torch.manual_seed(seed)
    model = timm.create_model(model_name, num_classes=5, **{**options, **more}).eval()
    shake(model)
    return model, torch.randn(2, 3, *size)


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Give every parameter and running statistic a value that is neither zero nor one."""
    for parameter in model.parameters():
        spread = 0.5 / max(1, parameter[0].numel()) ** 0.5 if parameter.ndim > 1 else 0.2
        parameter.copy_(torch.randn_like(parameter) * spread + (0.5 if parameter.ndim == 1 else 0.0))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)


def vilt_config(**more: Any) -> Any:
    """The configuration of a tiny ViLT of transformers."""
    from transformers import ViltConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViltConfig(**({"image_size": 32, "patch_size": 8, **sizes} | more))
