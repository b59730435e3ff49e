"""Save and load a treated model or only its treatments, and push it to the Hugging Face hub.

A saved model is a folder with config.json, safetensors and a model card, without pickle. Files are written atomically.
"""

from pathlib import Path

import timm
import torch

import vitfocus as vf

torch.manual_seed(0)
folder, image = Path("runs/examples/store"), torch.randn(1, 3, 64, 64)
tiny = {"img_size": 64, "depth": 2, "num_classes": 10}

model = vf.create_model("deit_tiny_patch16_224+cb(layers=upper)+tap(branches=3)", **tiny).eval()
vf.save(model, folder / "whole")
again = vf.load(folder / "whole")
assert torch.equal(again(image), model(image))
print("whole model:    ", [file.name for file in sorted((folder / "whole").iterdir())])

# timm opens the folder too, and so does transformers (from_pretrained, pipeline); both need `import vitfocus` before.
theirs = timm.create_model(f"local-dir:{folder / 'whole'}", pretrained=True).eval()
assert torch.equal(theirs(image), model(image))
print("opened by timm: ", [str(treatment) for treatment in vf.applied(theirs)])

# Only the added parameters: a small folder to load onto an existing base model.
vf.save(model, folder / "added", only="treatments")
base = vf.create_model("deit_tiny_patch16_224", **tiny).eval()
with vf.untreated(model):
    base.load_state_dict(model.state_dict())
vf.load(folder / "added", onto=base)
assert torch.equal(base(image), model(image))
sizes = {name: sum(file.stat().st_size for file in (folder / name).iterdir()) for name in ("whole", "added")}
print(f"only treatments: {sizes['added'] / 1e3:.0f} kB instead of {sizes['whole'] / 1e3:.0f} kB")

# Needs an account and `hf auth login`; others then use vf.load("hf-hub:you/deit-tiny-cb-tap").
# vf.push(model, "you/deit-tiny-cb-tap")
