"""Lets `import torchvision` succeed beside a torch built for CPUs; loaded by a .pth file.

SGLang imports torchvision even for text alone. The published build is linked against CUDA: its
extension does not load here, and the module then stops at an operator that nobody declared.
Declaring two is enough; none is ever called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclareFirst:
    """A finder that finds nothing, and declares the operators when torchvision is looked for."""

    kept: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if name == "torchvision" and self.kept is None:
            import torch

            self.kept = torch.library.Library("torchvision", "FRAGMENT")
            for schema in DECLARED:
                self.kept.define(schema)


sys.meta_path.insert(0, DeclareFirst())
