"""Predict which pipeline trains a model fastest, without running the pipeline.

A setup is a balance, a number of micro-batches, a checkpoint mode and a schedule. The function
`plan` finds the setup with the shortest predicted training step, among the setups that fit the
devices' memory. For the prediction, it counts the operators and bytes of each layer.

    from torchgpipe.plan import plan
    found = plan(
        model,
        sample,
        batch_size=512,
        devices=8,
        memory="24GiB",
        hardware="h100x8",    # without it, the layers are profiled on the sample's device
        optimizer="adam",
    )
    print(found)
    model = found.gpipe()

This package has these parts:

- `planner` has the function `plan`;
- `count` counts each layer's operators and bytes;
- `hardware` describes devices, and tells how many seconds a device takes for an operator;
- `predict` predicts the seconds and the bytes of a step, from counted operators or from the layers'
  measured seconds;
- `search` finds the fastest setup that fits the memory.
"""

from torchgpipe.plan.hardware.hardware import Hardware, hardware_names, load_hardware
from torchgpipe.plan.planner import plan
from torchgpipe.plan.report import Plan
from torchgpipe.plan.search.impossible import Impossible

__all__ = ["Hardware", "Impossible", "Plan", "hardware_names", "load_hardware", "plan"]
