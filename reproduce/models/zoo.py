"""Build torchvision's models as they are, and ten well-known ones of them as sequences of their own layers."""

from __future__ import annotations

import copy
import functools
import inspect

import torch
from torch import nn

import torchgpipe
from reproduce.models.resnet import import_torchvision

ZOO = ("resnet18", "resnet50", "alexnet", "densenet121", "mobilenet_v3_large", "efficientnet_b0", "convnext_tiny",
       "vit_b_16", "swin_t", "regnet_y_1_6gf")  # fmt: skip


def torchvision_model(name: str, pixels: int, **options: int) -> nn.Module:
    """Build the model of that name with random weights, for square images of so many pixels a side.

    Raises:
        Error: torchvision is missing or broken.
        ValueError: it has no such model.
    """
    builder = import_torchvision("models", f"torchvision:{name}").get_model_builder(name)
    # Without weights nothing is downloaded.
    given = {key: None for key in inspect.signature(builder).parameters if key.startswith("weights")}
    if name.startswith("vit_"):  # which are made for one size of images
        options["image_size"] = pixels
    device = torch.get_default_device()
    # RegNet works out its widths with tensors, which have no values on `meta`.
    with torch.device("cpu" if name.startswith("regnet_") else device):
        model: nn.Module = builder(**given, **options)
    return model.to(device)


def layers_of(name: str, pixels: int, num_classes: int = 1000) -> nn.Sequential:
    """Build the model of that name as `torchgpipe.sequential` cuts it; after one seed, with the same weights.

    Shapes: (N, 3, pixels, pixels) to (N, num_classes).

    Raises:
        Error: torchvision is missing or broken.
    """
    return copy.deepcopy(_traced(name, pixels, num_classes, torch.get_default_device(), torch.initial_seed()))


@functools.lru_cache(maxsize=1)  # rows of one model follow each other, and recording takes seconds
def _traced(name: str, pixels: int, num_classes: int, device: torch.device, seed: int) -> nn.Sequential:
    model = torchvision_model(name, pixels, num_classes=num_classes)
    return torchgpipe.sequential(model, torch.rand(2, 3, pixels, pixels))
