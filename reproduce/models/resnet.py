"""Build torchvision's ResNet-101 as a flat sequence of 370 layers, with identities as skips; and other models.

The layers are torchvision's own, in its order. Names have `_` for `.`, as in `layer1_0_conv1`. Weights and eval-mode
outputs are bitwise equal. Two things change: ReLUs are not in place, and a bottleneck stashes its identity at its
start and pops it at its end.

Ten other well-known models are sequences of their own layers, as `torchgpipe.sequential` cuts them. Whatever builds a
model raises `Error` where torchvision is missing or broken.

Source: He et al., "Deep Residual Learning for Image Recognition" (arXiv:1512.03385).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from reproduce.error import Error
from reproduce.models.sizes import check_size
from reproduce.models.unet import Stash
from torchgpipe.skip import Namespace, pop, skippable

if TYPE_CHECKING:
    from torchvision.models.resnet import Bottleneck, ResNet

RESNET101 = (3, 4, 23, 3)  # bottlenecks in each stage


@skippable(pop=["skip"])
class AddIdentity(nn.Module):
    """Add the bottleneck's input, downsampled if the bottleneck changes the image size or the channels."""

    isolate: Callable[[Namespace], nn.Module]  # set by @skippable

    def __init__(self, downsample: nn.Module | None) -> None:
        super().__init__()
        self.downsample = nn.Identity() if downsample is None else downsample

    def forward(self, image: Tensor) -> Generator[pop, Tensor, Tensor]:
        identity = yield pop("skip")
        total: Tensor = image + self.downsample(identity)
        return total


def layers(model: ResNet) -> Iterator[tuple[str, nn.Module]]:
    """Yield every layer of the flat model with its name, in order; a bottleneck has eleven."""
    yield "conv1", model.conv1
    yield "bn1", model.bn1
    yield "relu", nn.ReLU()
    yield "maxpool", model.maxpool
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        for index, block in model.get_submodule(stage).named_children():
            name, identity = f"{stage}_{index}", Namespace()
            yield f"{name}_identity", Stash().isolate(identity)
            for i in (1, 2, 3):
                yield f"{name}_conv{i}", block.get_submodule(f"conv{i}")
                yield f"{name}_bn{i}", block.get_submodule(f"bn{i}")
                if i == 3:
                    yield (
                        f"{name}_add",
                        AddIdentity(cast("Bottleneck", block).downsample).isolate(identity),
                    )
                yield f"{name}_relu{i}", nn.ReLU()
    yield "avgpool", model.avgpool
    yield "flatten", nn.Flatten()
    yield "fc", model.fc


def import_torchvision(module: str = "models.resnet", needed_by: str = "ResNet-101") -> ModuleType:
    """Import a module of torchvision when it is needed, or raise `Error`: all else must work without torchvision."""
    try:
        return importlib.import_module(f"torchvision.{module}")
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise Error(
            f"{needed_by} needs torchvision, which cannot be imported here ({cause}): "
            "install the release that goes with your PyTorch, by 'pip install torch torchvision'"
        ) from error


def resnet(
    blocks: Sequence[int], width: int = 64, expansion: int = 4, num_classes: int = 1000
) -> nn.Sequential:
    """Build a ResNet of bottlenecks with random weights, by torchvision.

    `blocks` are the bottlenecks in each of the four stages. Every stage doubles `width`, the channels within
    bottlenecks, and `expansion`, the channels of their outputs in units of 64.

    Shapes: (N, 3, H, W), both at least 32 or so, to (N, num_classes). `check_size` refuses other sizes.
    """
    for count in blocks:
        check_size("blocks", count)
    check_size("width", width)
    check_size("expansion", expansion)
    check_size("num_classes", num_classes)
    module = import_torchvision()
    bottleneck = type("Bottleneck", (module.Bottleneck,), {"expansion": expansion})
    model = module.ResNet(bottleneck, list(blocks), num_classes=num_classes, width_per_group=width)
    return nn.Sequential(OrderedDict(layers(model)))


def resnet101(num_classes: int = 1000) -> nn.Sequential:
    """Build ResNet-101 with random weights. With the same seed they equal those of torchvision's ResNet-101."""
    return resnet(RESNET101, num_classes=num_classes)


def flat_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a torchvision ResNet's state for the flat model, or for a `GPipe` of it.

        model.load_state_dict(flat_state(torch.load("resnet101.pth", weights_only=True)))

    The tensors are shared, not copied. Names that are flat already stay; `load_state_dict` reports names that do not
    fit.
    """
    return {
        re.sub(r"^(layer\d)\.(\d+)\.", r"\1_\2_", key).replace(
            "_downsample.", "_add.downsample."
        ): value
        for key, value in state.items()
    }


def torchvision_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a flat model's state for torchvision's ResNet: the inverse of `flat_state`."""
    return {
        re.sub(r"^(layer\d)_(\d+)_(?:add\.)?", r"\1.\2.", key): value
        for key, value in state.items()
    }


def torchvision_model(name: str, pixels: int, **options: int) -> nn.Module:
    """Build that model with random weights for `pixels` x `pixels`, or raise `ValueError` if torchvision has none."""
    builder = import_torchvision("models", f"torchvision:{name}").get_model_builder(name)
    # Without weights nothing is downloaded.
    given = {
        key: None for key in inspect.signature(builder).parameters if key.startswith("weights")
    }
    if name.startswith("vit_"):  # ViT is built for one image size
        options["image_size"] = pixels
    device = torch.get_default_device()
    # RegNet's constructor computes widths with tensors, which have no values on `meta`.
    with torch.device("cpu" if name.startswith("regnet_") else device):
        model: nn.Module = builder(**given, **options)
    return model.to(device)
