"""Plan a pipeline without running it: count a model's layers, predict seconds and bytes, search for the best setup.

    from torchgpipe.plan import plan
    p = plan(model, sample, batch_size=512, devices=8, memory="24GiB", hardware="h100x8", optimizer="adam")
    print(p)
    model = p.gpipe()

| module | what it is |
| --- | --- |
| `operators` | what an operator does: its class, floating-point operations, bytes |
| `count` | what every layer does and holds, counted on `meta` |
| `hardware` | descriptions of nodes, and the seconds that operators take on them |
| `predict` | seconds and bubble of a training step |
"""

from __future__ import annotations
