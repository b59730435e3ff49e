"""Train from a recipe in Python, resume, and load the trained model.

`vitfocus train shapes epochs=0.05 val_length=200 --out runs/examples/train` does the same on the command line.
"""

import vitfocus as vf
from vitfocus.data.shapes.dataset import Shapes
from vitfocus.train import load_recipe, train

changes = ["spec=vit_tiny_patch16_224+cbs(layers=upper)", "epochs=0.05", "warmup_epochs=0", "val_length=200"]
recipe = load_recipe("shapes", changes)
results = train(recipe, out="runs/examples/train", resume="auto")  # starts, resumes, or returns the finished run
print(f"top-1 after {results['epochs']:.2g} epochs: {100 * results['last']['top1']:.1f} % (chance: 10 %)")

model = vf.load("runs/examples/train/model")
print(vf.applied(model))
print(vf.evaluate(model, "clean", data=Shapes("val", length=100, size=32)).table())
