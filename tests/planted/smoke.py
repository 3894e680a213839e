"""What any run of a package shows: all modules are imported, and a tiny pipeline takes a step or a record is shown."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path

import torch
from torch import nn

RECORD = "results/measured/unet-speed-small-2xamd-epyc-20261122T1730.json"


def step(checkpoint: str) -> None:
    from torchgpipe import GPipe  # that of the copy

    torch.manual_seed(0)
    layers, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh()), torch.randn(6, 4)
    plain = torch.cat([layers(part) for part in x.chunk(3)])
    wanted = torch.autograd.grad(plain.sum(), list(layers.parameters()))
    model = GPipe(layers, [2, 2], devices=["cpu", "cpu"], chunks=3, checkpoint=checkpoint)  # type: ignore[arg-type]
    output = model(x)
    output.sum().backward()
    torch.testing.assert_close(output, plain)
    torch.testing.assert_close([p.grad for p in model.parameters()], list(wanted))


def show(package: str, tree: Path, output: Path) -> None:
    """Run what is in a tree, in a process that has imported nothing of it, and write what it prints into a file."""
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    with output.open("w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    for module in pkgutil.walk_packages([package], f"{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    if package == "torchgpipe":
        for each in ("always", "never"):
            step(each)
    else:
        main = importlib.import_module("reproduce.cli.main").main
        print(main(["list"]), main(["show", RECORD]), flush=True)
