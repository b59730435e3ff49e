"""The readings of well-known models, to which the findings of a diagnosis compare: `vitfocus diagnose`, averaged.

Writes src/vitfocus/attention/reference.json. Run it with the published weights of DeiT-Ti and ViT-Ti (timm's
`deit_tiny_patch16_224` and `vit_tiny_patch16_224` as safetensors files) and photographs of ImageNet's validation set:

    python benchmarks/reference_readings.py --weights DIR --images DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import vitfocus as vf
from vitfocus.core.environment import versions
from vitfocus.core.statistics import evenly_spaced
from vitfocus.data.image_files import as_images

OUT = Path(__file__).parents[1] / "src" / "vitfocus" / "attention" / "reference.json"
MODELS = {"DeiT-Ti": "deit_tiny_patch16_224", "ViT-Ti (ImageNet-21k)": "vit_tiny_patch16_224"}
AGAINST = "gaussian_noise/3"
#: Readings whose values do not depend on the number of tokens, or are divided by the bound of the entropy.
PLAIN = ("overfocus", "distance", "head_similarity", "diversity_official", "stability", "high_norm")
OF_BOUND = ("entropy", "entropy_p85")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="folder with the models' safetensors files")
    parser.add_argument("--images", type=Path, required=True, help="folder of photographs")
    parser.add_argument("--limit", type=int, default=200, help="number of photographs, evenly spaced")
    args = parser.parse_args()
    files = as_images(args.images) or []
    chosen = [files[index] for index in evenly_spaced(len(files), args.limit)]
    models = {}
    for label, name in MODELS.items():
        model = vf.open_model(name, weights=args.weights / f"{name}.safetensors")
        diagnosis = vf.diagnose(model, chosen, AGAINST)
        values = {key: [row[key] for row in diagnosis.rows] for key in PLAIN}
        values |= {key: [row[key] / row["entropy_bound"] for row in diagnosis.rows] for key in OF_BOUND}
        models[label] = {"model": name, **{key: [round(v, 5) for v in found] for key, found in values.items()}}
        print(diagnosis)
    facts = {"images": len(chosen), "data": "photographs of ImageNet's validation set", "against": AGAINST}
    OUT.write_text(json.dumps(facts | {"versions": versions("torch", "timm"), "models": models}, indent=1) + "\n")


if __name__ == "__main__":
    main()
