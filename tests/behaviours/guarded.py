"""For each guard, the names of test cases that fail without this guard.

A guard is code that keeps one thing the same in a forward and its recomputation, such as the random
numbers (torchgpipe/task/guards). For each guard, tests/planted/rows.json has a planted fault that
leaves it out. The test cases named here must find this fault.
"""

from pathlib import Path

from torchgpipe.task import guards

from .compiled.test_compilations import test_compilations_under_autocast

FOLDER = Path(guards.__file__ or "").parent
GUARDS = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "guard"}
"""The names of the files that define a guard; guard.py defines their base class."""

ROWS_OF_GUARDS = {
    "parameters": [
        "between: a parameter changed",
        "between: a frozen parameter changed",
        "buffers: a parameter replaced in forward",
        "gradients: a layer that hooks its parameter",
    ],
    "inputs": ["between: the input changed"],
    "modes": [
        "between: autocast in forward",
        "between: a default type in backward",
        "between: `TorchDispatchMode` in backward",
        "between: default device in forward",
    ],
    "stateful": ["between: a mode whose count matters"],
    "attention": ["unusual: attention in evaluation mode"],
    "gradients": ["gradients: a layer that reads its gradient"],
    "layers": [
        "between: a setting of a layer",
        "between: an inner layer",
        "between: a forward hook added",
        "gradients: a hook that removes itself",
    ],
    "buffers": [
        "buffers: two that share memory",
        "buffers: an observer of quantization",
        "buffers: statistics of a norm in evaluation mode",
        "tools: `spectral_norm`",
    ],
    "statistics": ["between: BatchNorm1d for the inside of a layer"],
    "stand_ins": [
        "between: a parameter that is replaced",
        "gradients: a buffer that a hypernetwork makes",
    ],
    "randomness": ["random: dropout", "random: a generator of a layer's own"],
}

OF_ITS_OWN = {"cast_cache": test_compilations_under_autocast}
"""The test that fails without a guard, for guards that change no results and so have no rows."""
