"""PyTorch's own `pipeline()` on a model: two ranks, ScheduleGPipe, two micro-batches of two samples.

It needs the split by hand. Given are the places that its users would choose: in the middle of the model's blocks, and
where that does not work, in the middle of its layers.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.multiprocessing.spawn import start_processes

from torchgpipe.trace.parts import tensors_in

PATIENCE = 300  # seconds for one model and one split
RANKS = 2


def theirs(make: Callable[[], Any], tolerance: float) -> dict[str, Any]:
    """Return `equal` or what went wrong, for each split that was tried until one gave the model's results."""
    found: dict[str, Any] = {}
    for where in ("between blocks", "within blocks"):
        with tempfile.TemporaryDirectory() as folder:
            ranks = start_processes(
                _rank, (make, where, folder, tolerance), nprocs=RANKS, join=False, start_method="fork"
            )
            try:
                end = time.monotonic() + PATIENCE
                done = False
                while not done and time.monotonic() < end:  # it returns when the first of them has ended, too
                    done = ranks.join(timeout=max(1.0, end - time.monotonic()))
            except Exception as error:
                done, found[where] = True, f"a rank died: {str(error).strip().splitlines()[-1]}"
            if not done:
                for process in ranks.processes:
                    process.kill()
                found[where] = f"not finished after {PATIENCE} seconds"
            said = [said for path in Path(folder).glob("rank*.txt") if (said := path.read_text()) != "equal"]
            said.sort(key=lambda text: "by peer" in text)  # which follows from what the other rank says
            found.setdefault(where, said[0] if said else "equal")
        if found[where] == "equal":
            break
    return found


def _rank(rank: int, make: Callable[[], Any], where: str, folder: str, tolerance: float) -> None:
    torch.set_num_threads(1)
    try:
        said = _run(rank, make, where, folder, tolerance)
    except Exception as raised:
        error: BaseException = raised
        while error.__cause__ is not None:  # the schedule says only where it was
            error = error.__cause__
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({Path(last.filename).name})"
    (Path(folder) / f"rank{rank}.txt").write_text(said)


def _run(rank: int, make: Callable[[], Any], where: str, folder: str, tolerance: float) -> str:
    module, sample = make()
    sample = {name: x[:4] for name, x in sample.items()} if isinstance(sample, dict) else sample[:4]
    plain, micro = _plain(module, sample)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    split = {_middle(module, where): SplitPoint.BEGINNING}
    args, kwargs = ((), micro[0]) if isinstance(sample, dict) else ((micro[0],), {})
    pipe = pipeline(module, args, kwargs, split_spec=split)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: _loss(output), scale_grads=False)
    if rank == 0:
        schedule.step(*([] if isinstance(sample, dict) else [sample]), **(sample if isinstance(sample, dict) else {}))
    else:
        losses: list[Tensor] = []
        schedule.step(target=torch.zeros(4), losses=losses)
        plain["loss"], found = plain.pop("losses"), torch.stack(losses).detach()
        if not _close(found, plain["loss"], tolerance):
            return f"losses are {found.tolist()} for {plain['loss'].tolist()}"
    for name, x in (*stage.submod.named_parameters(), *stage.submod.named_buffers()):
        y, expected = x.grad if isinstance(x, nn.Parameter) else x, plain.get(name)
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
