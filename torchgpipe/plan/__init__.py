"""Plan a pipeline without running it: count a model's layers, predict seconds and bytes, search for the best setup.

    from torchgpipe.plan import plan
    p = plan(model, sample, batch_size=512, devices=8, memory="24GiB", hardware="h100x8", optimizer="adam")
    p = plan(model, sample, batch_size=512, devices=8, memory="24GiB")    # or by a profile on the sample's device
    print(p)
    model = p.gpipe()

`count` says what layers do and hold, `hardware` how fast that is, `predict` and `memory` what a step takes, and
`search` which setup is the best. `planner` puts them together; `profiled` may stand in for counts and hardware.
"""

from torchgpipe.plan.hardware.hardware import Hardware, hardware_names, load_hardware
from torchgpipe.plan.planner import plan
from torchgpipe.plan.report import Plan
from torchgpipe.plan.search.impossible import Impossible

__all__ = ["Hardware", "Impossible", "Plan", "hardware_names", "load_hardware", "plan"]
