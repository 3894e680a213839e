"""Say in one line why no setup fits."""

from __future__ import annotations

from dataclasses import replace

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.plan.amount import amount
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.task import task_bytes

__all__ = ["Impossible", "hopeless", "why"]


class Impossible(ValueError):
    """Tell in one line why no setup fits."""


def hopeless(predictor: Predictor, devices: int, memory: float, state: int) -> str | None:
    """Say what makes every setup impossible: a layer that fits no device, or all of them together; else `None`."""
    layers = predictor.layers(1).layers
    footprints = predictor.counts.footprints(1)
    needs = []
    for i, layer in enumerate(layers):
        task = task_bytes(footprints, i, i + 1)
        work = max(task.inputs + task.graph, task.recomputed + task.later) + task.output_grad
        needs.append(layer.parameters * (2 + state) + layer.frozen + work)
    heaviest = max(range(len(needs)), key=needs.__getitem__)
    if needs[heaviest] > memory:
        return (
            f"layer {heaviest} ({layers[heaviest].name}) alone needs {amount(needs[heaviest])} of {amount(memory)}, "
            "with micro-batches of one sample: split the layer, or use devices with more memory"
        )
    static = sum(layer.parameters * (2 + state) + layer.frozen for layer in layers)
    if static > devices * memory:
        return (
            f"parameters, gradients and optimizer state need {amount(static)}, and {devices} device(s) have "
            f"{amount(devices * memory)}: use more devices, or an optimizer with less state"
        )
    return None


def why(predictor: Predictor, batch_size: int, devices: int, memory: float, state: int) -> str:
    """Say by how much the setup that needs the least misses, where no setup was found."""
    least = Setup(batch_size, (1,), batch_size, "always", state)
    layers = predictor.layers(1).layers
    needed = [layer.parameters * (2.0 + state) + layer.frozen for layer in layers]
    balance = tuple(minimise_heaviest(needed, min(devices, len(layers))))
    peak = max(d.peak for d in setup_memory(predictor.counts, replace(least, balance=balance)))
    return (
        f"no balance fits {devices} device(s) of {amount(memory)}: even in {batch_size} micro-batches of one, all "
        f"recomputed and balanced by parameters, the fullest needs {amount(peak)}; use more devices, or a smaller batch"
    )
