"""Plan a pipeline without running it.

`plan` counts the operators and bytes of a model's layers, predicts the seconds and bytes of a
training step, and searches for the fastest setup that fits the memory. A setup is a balance, a
number of micro-batches, a checkpoint mode and a schedule.

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

These are the parts:

- `planner` has the function `plan`;
- `count` counts each layer's operators and bytes;
- `hardware` tells how long a device takes for an operator;
- `predict` predicts the seconds and the bytes of a step, from counted operators or from the
  layers' measured seconds;
- `search` finds the best setup.
"""

from torchgpipe.plan.hardware.hardware import Hardware, hardware_names, load_hardware
from torchgpipe.plan.planner import plan
from torchgpipe.plan.report import Plan
from torchgpipe.plan.search.impossible import Impossible

__all__ = ["Hardware", "Impossible", "Plan", "hardware_names", "load_hardware", "plan"]
