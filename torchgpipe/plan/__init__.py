"""Plan a pipeline without running it: count a model's layers, predict seconds and bytes, search for the best setup.

    from torchgpipe.plan import plan
    p = plan(model, sample, batch_size=512, devices=8, memory="24GiB", hardware="h100x8", optimizer="adam")
    p = plan(model, sample, batch_size=512, devices=8, memory="24GiB")    # or by a profile on the sample's device
    print(p)
    model = p.gpipe()

| module | what it is |
| --- | --- |
| `operators` | what an operator does: its class, floating-point operations, bytes |
| `count`, `growth` | what every layer does and holds, counted on `meta` for two sizes, and whether others follow |
| `as_on`, `attention`, `autocast` | on `meta`, what a device would run: its fused kernels, in autocast's types |
| `errors` | which layer could not be counted |
| `hardware` | descriptions of nodes, and the seconds that operators take on them |
| `profiled`, `timing`, `here` | in their place, a profile on the present device, and what that device is |
| `predict`, `replay` | seconds and bubble of a training step |
| `footprint`, `task`, `memory` | what a layer, a micro-batch on a partition, and a device hold: exact bytes |
| `optimizer` | what an optimizer holds: its state, and what its step makes |
| `measure`, `live`, `alike` | how a layer's footprint is found, and which layers share one |
| `search` | the best balance, micro-batches and checkpoint mode under a memory limit |
| `balances`, `trial` | for given micro-batches and mode: a bound on all balances, and the best of those tried |
| `headroom` | how much of a device's memory tensors may take |
| `impossible` | why there is none |
| `planner`, `report`, `reason`, `amount` | `plan` itself, and how it is written |
| `beside` | data parallel training on as many devices |
"""

from torchgpipe.plan.hardware.hardware import Hardware, hardware_names, load_hardware
from torchgpipe.plan.planner import Plan, plan
from torchgpipe.plan.search.impossible import Impossible

__all__ = ["Hardware", "Impossible", "Plan", "hardware_names", "load_hardware", "plan"]
