"""Say in words what holds a plan back, and what would help."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Predictor
from torchgpipe.plan.search.beside import DataParallel
from torchgpipe.plan.search.search import Found
from torchgpipe.plan.search.trial import Candidate

MUCH = 0.1
"""The least share of time that is worth a sentence."""


def reason(predictor: Predictor, found: Mapping[int, Found], memory: float, beside: Sequence[DataParallel] = ()) -> str:
    """Return a sentence or two on the fastest setup: what the bubble takes, what more samples or memory would do.

    The last one is on data parallel training, where that has room and is faster.
    """
    best = min((each.best for each in found.values() if each.best is not None), key=lambda x: x.seconds)
    n = len(best.setup.balance)
    sentences = [_bubble(predictor, best, found, memory)]
    if best.seconds > found[n].unlimited * (1 + MUCH):
        faster = best.seconds / found[n].unlimited - 1
        sentences.append(f"Memory is in the way: with enough of it, n = {n} would be {faster:.0%} faster.")
    faster_ways = [each for each in beside if each.peak <= memory and each.seconds * 1.005 < best.seconds]
    if faster_ways:
        other = min(faster_ways, key=lambda each: each.seconds)
        gain = best.seconds / other.seconds - 1
        sentences.append(
            f"Data parallel training on {other.devices} devices has room, and is {gain:.0%} faster: take "
            "DistributedDataParallel in place of a pipeline."
        )
    return " ".join(filter(None, sentences))


def _bubble(predictor: Predictor, best: Candidate, found: Mapping[int, Found], memory: float) -> str:
    n, setup = len(best.setup.balance), best.setup
    fewer = max((k for k, each in found.items() if k < n and each.best is not None), default=None)
    if len(found) == 1:
        return f"The bubble takes {best.bubble:.0%}." if n > 1 else ""
    if n == 1:
        return "Of pipelines, one device is the fastest: what a second one saves, it loses to the bubble and to copies."
    more = replace(setup, batch_size=2 * setup.batch_size, chunks=2 * len(setup.sizes))
    text = f"At n = {n} the bubble takes {best.bubble:.0%}"
    if max(device.peak for device in setup_memory(predictor.counts, more)) > memory:
        return f"{text}; twice the batch has no room with this balance."
    larger = 2 * best.seconds / predictor.step(more).seconds - 1
    if fewer is None:
        return f"{text}; twice the batch would bring {larger:.0%} more samples/s."
    slower = found[fewer].best
    assert slower is not None
    device = (slower.seconds / best.seconds) ** (1 / (n - fewer)) - 1
    helps = (
        "twice the batch would help more than the last device does"
        if larger > device
        else "the last device helps more than twice the batch would"
    )
    return f"{text}: {helps} (samples/s: {larger:+.0%} by the batch, {device:+.0%} by the device)."
