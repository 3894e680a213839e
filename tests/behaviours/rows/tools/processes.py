"""Test cases with saved states, the device `meta`, other processes, and the profiler."""

from typing import Any

from torch import nn

from examples.works_with import (
    Batches,
    checkpoint_files,
    forked_process,
    profiler,
    spawned_process,
    train,
)

from ....plain import Plain, piped
from .rows import ALONE, LONG, changed, layers, then, tool


def save_for_another_balance(run: Any, batches: Batches) -> nn.Module:
    other = Plain(layers(), chunks=4) if isinstance(run, Plain) else piped(layers(), [1, 3], 4)
    checkpoint_files(run, other, batches)
    return other


def to_empty(layers: nn.Module) -> None:
    layers.to("meta").to_empty(device="cpu")


def from_meta(run: nn.Module, batches: Batches) -> list[float]:
    run.load_state_dict(layers().state_dict())
    return train(run, batches)


def assign(layers: nn.Module) -> None:
    weights = layers.state_dict()
    layers.to("meta").load_state_dict(weights, assign=True)


def assign_others(run: nn.Module) -> None:
    weights = layers().state_dict()
    run.load_state_dict(weights, assign=True)


ROWS = [
    tool(
        "`torch.distributed.checkpoint`",
        save_for_another_balance,
        "Use `get_state_dict` and `set_state_dict`. The state can be loaded into a pipeline with "
        "another balance.",
        **ALONE,
    ),
    changed(
        "from `meta` by `to_empty`",
        to_empty,
        "Load the weights after `to_empty`, either before or after you wrap the layers in a "
        "pipeline.",
        use=from_meta,
        **ALONE,
    ),
    changed(
        "from `meta` by `load_state_dict(assign=True)`",
        assign,
        "Load the weights before you wrap the layers, because a pipeline refuses layers on `meta` "
        "without `init`. You can load other weights into the pipeline afterwards. Create the "
        "optimizer last, because `assign=True` replaces the parameters by other objects.",
        use=then(assign_others),
        **ALONE,
    ),
    tool(
        "a forked process",
        forked_process,
        "The pipeline in the forked process has worker threads of its own.",
        **ALONE,
    ),
    tool(
        "a spawned process",
        spawned_process,
        "The pipeline may be an argument of the function that the spawned process calls.",
        without={**ALONE["without"], **LONG},
    ),
    tool(
        "the profiler",
        profiler,
        "By default, the profiler records only the calling thread. To record worker threads as "
        "well, set `experimental_config=_ExperimentalConfig(profile_all_threads=True)` of "
        "`torch._C._profiler`. `FlopCounterMode` has no such setting, so use it with "
        '`engine="graph"`.',
        **ALONE,
    ),
]
