"""The live page as a Space: everybody may open it, so there is no token and no fixed host."""

from __future__ import annotations

import os

import uvicorn

import vitfocus as vf
from vitfocus.report.serve import create_app

NAMES = os.environ.get("VITFOCUS_MODELS", "deit_tiny_patch16_224").split()
PRETRAINED = os.environ.get("VITFOCUS_PRETRAINED", "1") == "1"

app = create_app({name: vf.open_model(name, pretrained=PRETRAINED) for name in NAMES}, hosts=["*"])

if __name__ == "__main__":
    uvicorn.run(app, host="0.0.0.0", port=int(os.environ.get("PORT", "7860")))
