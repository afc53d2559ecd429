"""Lets a process import a torchvision that was built for CUDA beside a torch that was built for the CPU.

Its own operators cannot be loaded then, and its import ends with an error because it describes two of them. They are
declared here first, and never called. Python runs this file by itself when the folder is in PYTHONPATH.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path


class DeclareOperators:
    """Looks at the search for torchvision, and finds nothing itself."""

    declared = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and "torch" in sys.modules and self.declared is None:
            import torch

            spec = PathFinder.find_spec(name)
            try:
                torch.ops.load_library(str(next(Path(spec.origin).parent.glob("_C*.so"))))
            except (AttributeError, StopIteration, OSError):
                self.declared = torch.library.Library(name, "DEF")
                for operator in ("nms", "qnms"):
                    self.declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DeclareOperators())
