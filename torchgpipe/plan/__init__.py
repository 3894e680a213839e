"""Plan a pipeline without running it.

A plan counts the layers of a model, predicts the seconds and bytes of training steps, and searches
for the fastest setup that fits the memory.

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

`planner` puts the parts together. `count` tells what layers do and hold, and `hardware` how long a
device takes for that; `profiled` can measure the layers instead. `predict` and `memory` predict the
seconds and bytes of a step, and `search` finds the best setup.
"""

from torchgpipe.plan.hardware.hardware import Hardware, hardware_names, load_hardware
from torchgpipe.plan.planner import plan
from torchgpipe.plan.report import Plan
from torchgpipe.plan.search.impossible import Impossible

__all__ = ["Hardware", "Impossible", "Plan", "hardware_names", "load_hardware", "plan"]
