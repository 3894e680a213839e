"""Verify, before anything runs, that every skip of a model is stashed once and popped once, later."""

from torch import nn

from torchgpipe.skip.scope import SkipKey
from torchgpipe.skip.skippable import skips_of


def verify_skippables(module: nn.Sequential) -> None:
    """Check the skips of a sequence of layers; raise `TypeError` that lists every fault.

    Each skip has to be stashed by one layer and popped by one later layer. Where a class is used several times,
    `layer.isolate(Namespace())` keeps its skips apart.
    """
    faults: list[str] = []
    stashed: dict[SkipKey, str] = {}
    popped: dict[SkipKey, str] = {}
    for name, layer in module.named_children():
        stashes, pops = skips_of(layer)
        for key in stashes:
            if key in stashed:
                faults.append(f"layer {name!r} stashes {key}, which layer {stashed[key]!r} stashed already")
            stashed.setdefault(key, name)
        for key in pops:
            if key in popped:
                faults.append(f"layer {name!r} pops {key}, which layer {popped[key]!r} popped already")
            elif key not in stashed:
                faults.append(f"layer {name!r} pops {key}, which no earlier layer stashes")
            popped.setdefault(key, name)
    faults += [
        f"layer {name!r} stashes {key}, which no later layer pops" for key, name in stashed.items() if key not in popped
    ]
    if faults:
        raise TypeError(
            "skips do not match:\n"
            + "\n".join(f"- {fault}" for fault in faults)
            + "\nA class used more than once needs a namespace for each pair: layer.isolate(Namespace())"
        )
