"""Makes torchvision importable beside a torch for CPUs.

PyPI's torchvision is built for CUDA. Beside a torch without it, its library is not loaded, and its
import fails at two operators that the library would declare. Here they are declared; nothing calls
them: timm and transformers use the parts of torchvision that are written in Python.
"""

import importlib.util

import torch

if torch.version.cuda is None and importlib.util.find_spec("torchvision"):
    DECLARED = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            DECLARED.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
