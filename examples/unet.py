"""Train a U-Net, whose skips go from the first layers to the last, in one process or over ranks.

    python examples/unet.py
    torchrun --local-addr 127.0.0.1 --nproc-per-node 2 examples/unet.py

The forward of the U-Net is written as for a single device. The function `pipeline` finds the layers
and the skips, and plans which layers each device has. Here each device may use only 4 MiB, so that
the model needs both devices. A skip is sent directly to the device that uses it.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, max_pool2d

from torchgpipe import distributed_pipeline, pipeline


def convolutions(inputs: int, outputs: int) -> nn.Module:
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A model that says, for each pixel of an image, to which of two classes the pixel belongs."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolutions(1, 8), convolutions(8, 16), convolutions(16, 32)])
        self.bottom = convolutions(32, 64)
        up = [convolutions(64 + 32, 32), convolutions(32 + 16, 16), convolutions(16 + 8, 8)]
        self.up = nn.ModuleList(up)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = images, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = max_pool2d(x, 2)
        x = self.bottom(x)
        for block in self.up:
            x = interpolate(x, scale_factor=2)
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.head(x)


ranks = "RANK" in os.environ  # torchrun sets RANK
torch.manual_seed(0)  # All ranks make the same model. Then each keeps only its own layers.
module = UNet()
images = torch.rand(16, 1, 32, 32)
classes = (images[:, 0] > 0.5).long()

# The hardware is named, so that the plan takes seconds: by default, it times the layers here.
options = {"batch_size": 16, "chunks": 4, "memory": "4MiB", "hardware": "h100x8"}
if ranks:
    dist.init_process_group("gloo")
    model = distributed_pipeline(module, images[:4], **options)
else:
    model = pipeline(module, images[:4], devices=["cpu", "cpu"], **options)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(5):
    loss = model.step(cross_entropy, images, classes)
    optimizer.step()
    optimizer.zero_grad()
    if model.rank == 0:
        print(f"step {step}: loss {loss.item()}")
if ranks:
    dist.destroy_process_group()
