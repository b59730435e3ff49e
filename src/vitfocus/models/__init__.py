"""The architectures that timm lacks, registered with timm: FAN, RVT, PVT v1 and LocalViT.

After `import vitfocus.models`, `timm.create_model("fan_tiny_12_p16_224")` works, and any other size can be built from
the classes. Modules have the published tensor names, so `load_published` loads the authors' checkpoints.
"""

from vitfocus.models.base import Loaded, checkpoint_filter_fn, load_published
from vitfocus.models.fan import FAN
from vitfocus.models.localvit import LocalViT
from vitfocus.models.pvt import PVT
from vitfocus.models.rvt import RVT

__all__ = ["FAN", "PVT", "RVT", "Loaded", "LocalViT", "checkpoint_filter_fn", "load_published"]
