"""Register your own vision transformer with one function that lists the parts of its blocks.

After that, `vf.anatomy`, treatments, diagnoses and `vf.evaluate` work on it.
"""

import torch
from torch import Tensor, nn

import vitfocus as vf
from vitfocus.anatomy import Anatomy, Family, GridRule, Plan, Trunk, register


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class MyViT(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, kernel_size=8, stride=8), nn.Linear(width, 10)
        self.layers = nn.Sequential(Layer(width), Layer(width), Layer(width))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


# "<" is the input of the module at a path, ">" its output; the three places are front, mid and end of a branch.
places = {"attention_places": ("norm1>", "attn.out<", "attn>"), "mlp_places": ("ffn<", "ffn.2<", "ffn>")}
PLAN = Plan(norm="norm1", attention="attn", mlp="ffn", pool="norm1<", **places)


def dissect(model: MyViT) -> Anatomy:
    trunk, grid = Trunk(build_size=(64, 64)), GridRule(((8, 8, 0),))  # kernel, stride, padding of the patches
    for index, layer in enumerate(model.layers):
        trunk.add(layer, PLAN, f"layers.{index}", grid)
    return trunk.anatomy(model, model.patches)


register(Family("my vit", "mine", (MyViT,), dissect))
model = vf.treat_(MyViT(), "cb(layers=upper)+tap(branches=2)+adl")
print(vf.anatomy(model))
print(vf.diagnose(model, torch.randn(4, 3, 64, 96)))
