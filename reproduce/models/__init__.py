"""Build the papers' three models as flat `nn.Sequential`s, whose every entry is one layer to balance.

- `amoebanetd(num_layers, num_filters)`: a classifier, 3 x 224 x 224, whose layers hand on pairs of tensors;
- `unet(depth, num_convs, base_channels)`: segmentation, 3 x 192 x 192, with long skips;
- `resnet101()`: torchvision's classifier, 3 x 224 x 224, with a short skip over every bottleneck.

Build under `with torch.device("meta"):` to count or to work out shapes without memory. No layer overwrites
its input, for under checkpointing a partition's input is needed again.
"""

from __future__ import annotations

from reproduce.models.amoebanet import amoebanetd
from reproduce.models.resnet import resnet101
from reproduce.models.unet import unet

__all__ = ["amoebanetd", "resnet101", "unet"]
