"""Rows that need a guard: without it, each of these rows fails on some engine and mode.

The guards are files of torchgpipe/task/guards. tests/planted/rows.json leaves each guard out.
"""

ROWS_OF_GUARDS = {
    "parameters": [
        "between: a parameter changed",
        "between: a frozen parameter changed",
        "buffers: a parameter replaced in forward",
        "gradients: a layer that hooks its parameter",
    ],
    "memory": ["between: the input changed"],
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
    "in_place": [
        "between: a parameter that is replaced",
        "gradients: a buffer that a hypernetwork makes",
    ],
    "randomness": ["at_once: hooks that draw", "at_once: threads that draw, one generator"],
}
