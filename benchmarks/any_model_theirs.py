"""PyTorch's own `pipeline()` on a model: two ranks, ScheduleGPipe, two micro-batches of two samples.

It needs the split by hand. Given are the places that its users would choose: in the middle of the model's blocks, and
where that does not work, in the middle of its layers.
"""

from __future__ import annotations

import copy
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.multiprocessing.spawn import start_processes

from torchgpipe.trace.parts import tensors_in

PATIENCE = 300  # seconds for the ranks of one split
RANKS = 2
SPLITS = ("between blocks", "within blocks")


class Unequal(Exception):
    """Say in what a pipeline differs from the model, or what it ran into."""


def theirs(case: Any, tolerance: float) -> str:
    """Return the first split that gives the model's results.

    Raises:
        Unequal: there is none; the message is of the first.
    """
    module, sample = case
    sample = {name: x[:4] for name, x in sample.items()} if isinstance(sample, dict) else sample[:4]
    plain, micro = _plain(module, sample)
    args, kwargs = ((), micro[0]) if isinstance(sample, dict) else ((micro[0],), {})
    found = []
    for where in SPLITS:
        try:
            own = copy.deepcopy(module)  # which the split stays in
            pipe = pipeline(own, args, kwargs, split_spec={_middle(own, where): SplitPoint.BEGINNING})
        except Exception as error:
            found.append(_said(error))
        else:
            found.append(_on_ranks(partial(_run, pipe, sample, plain, tolerance)))
        if found[-1] == "equal":
            return where
    raise Unequal(found[0])


def _on_ranks(run: Callable[[int, str], str]) -> str:
    """Return what is not `equal` on some rank, of what `run` returns on each for its rank and a folder."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_processes(_rank, (run, folder), nprocs=RANKS, join=False, start_method="fork")
        end, done = time.monotonic() + PATIENCE, False
        try:
            while not done and time.monotonic() < end:  # it returns when the first of them has ended, too
                done = ranks.join(timeout=max(1.0, end - time.monotonic()))
        except Exception as error:
            return f"a rank died: {str(error).strip().splitlines()[-1]}"
        for process in () if done else ranks.processes:
            process.kill()
        said = [said for path in Path(folder).glob("rank*.txt") if (said := path.read_text()) != "equal"]
        said.sort(
            key=lambda text: "by peer" in text or "not connected" in text
        )  # which follows from what the other rank says
        return said[0] if said else "equal" if done else f"not finished after {PATIENCE} seconds"


def _rank(rank: int, run: Callable[[int, str], str], folder: str) -> None:
    torch.set_num_threads(1)
    try:
        said = run(rank, folder)
    except Exception as error:
        said = _said(error)
    (Path(folder) / f"rank{rank}.txt").write_text(said)


def _said(error: BaseException) -> str:
    """Return an error's first words, and the file it comes from."""
    while error.__cause__ is not None and str(error.__cause__):  # what is around it says only where it was
        error = error.__cause__
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({Path(last.filename).name})"


def _run(pipe: Any, sample: Any, plain: dict[str, Any], tolerance: float, rank: int, folder: str) -> str:
    """Run a step on a rank; return `equal`, or what differs first."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: _loss(output), scale_grads=False)
    if rank == 0:
        schedule.step(*([] if isinstance(sample, dict) else [sample]), **(sample if isinstance(sample, dict) else {}))
    else:
        losses: list[Tensor] = []
        schedule.step(target=torch.zeros(4), losses=losses)
        found, expected = torch.stack(losses).detach(), plain["losses"]
        if not _close(found, expected, tolerance):
            return f"losses are {found.tolist()} for {expected.tolist()}"
    for name, x in (*stage.submod.named_parameters(), *stage.submod.named_buffers()):
        if name not in plain:  # a constant of a graph
            continue
        y, expected = x.grad if isinstance(x, nn.Parameter) else x, plain[name]
        if y is None and expected is None:
            continue
        if y is None or expected is None:
            return f"{name}: {'no gradient' if y is None else 'a gradient that the model does not have'}"
        if not _close(y, expected, tolerance):
            return f"{name}: another {'gradient' if isinstance(x, nn.Parameter) else 'value'}"
    return "equal"


def _close(y: Tensor, x: Tensor, tolerance: float) -> bool:
    return bool((x.double() - y.double()).abs().max() <= tolerance * x.double().abs().max())


def _plain(module: nn.Module, sample: Any) -> tuple[dict[str, Any], list[Any]]:
    before = {name: x.clone() for name, x in module.state_dict().items()}
    if isinstance(sample, dict):
        micro = [{name: x.chunk(2)[i] for name, x in sample.items()} for i in range(2)]
        losses = [_loss(module(**x)) for x in micro]
    else:
        micro = [*sample.chunk(2)]
        losses = [_loss(module(x)) for x in micro]
    torch.stack(losses).sum().backward()
    found: dict[str, Any] = {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)}
    found |= {name: b.clone() for name, b in module.named_buffers()} | {"losses": torch.stack(losses).detach()}
    module.zero_grad()
    module.load_state_dict(before)
    return found, micro


def _loss(output: Any) -> Tensor:
    tensors = [y for y in tensors_in(output) if y.requires_grad]
    return sum((y * torch.linspace(1, 2, y.numel(), dtype=y.dtype).view_as(y)).mean() for y in tensors)  # type: ignore[return-value]


def _middle(module: nn.Module, where: str) -> str:
    """Return the submodule that the second stage shall begin with: about half of the parameters come before it."""
    if where == "between blocks":
        lists = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Sequential | nn.ModuleList)]
        names = [f"{n}.{k}".lstrip(".") for n, m in lists for k, child in m.named_children() if [*child.parameters()]]
    else:
        names = [n for n, m in module.named_modules() if not [*m.children()] and [*m.parameters()]]
    names = names or [n for n, m in module.named_children() if [*m.parameters()]][1:]
    sizes: dict[str, int] = dict.fromkeys(names, 0)
    passed = 0
    owners = list(names)
    for name, parameter in module.named_parameters():
        for owner in owners:
            if name.startswith(owner + ".") and not sizes[owner]:
                sizes[owner] = passed
        passed += parameter.numel()
    return min(names[1:] or names, key=lambda n: abs(sizes[n] - passed / 2))
