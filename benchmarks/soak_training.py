"""The training of the soak: its steps, by ranks with saves and faults, or undisturbed in one process.

What each step computes is reported: losses, the norm of gradients, and digests of the state.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.soak_layers import Trap, layers_of, pass_by, traps
from benchmarks.soak_plan import IN_LAYERS, Batch, Episode
from benchmarks.soak_reports import Report
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.saves import Saves


def train_undisturbed(episode: Episode, report: Report) -> None:
    """Train in one process, without saves and faults."""
    torch.set_num_threads(1)
    traps.clear()
    balance, deferred = episode.reference, episode.deferred_batch_norm
    model = GPipe(layers_of(episode), balance, devices=["cpu"] * len(balance), deferred_batch_norm=deferred)
    _train(episode, model, report, None)


class Seat:
    """What a process keeps from one attempt of an episode to the next: the pipeline, and where states are saved."""

    def __init__(self, episode: Episode, folder: Path) -> None:
        self._episode, self.folder = episode, folder
        self._saves = Saves(folder / "saves")
        self._model: DistributedGPipe | None = None

    def train(self, attempt: int, report: Report) -> None:
        """Train on this rank, from the last saved state until something goes wrong."""
        torch.set_num_threads(1)
        episode, (balance, *faults) = self._episode, self._episode.attempts[attempt]
        model = self._model
        if model is None or balance != episode.attempts[attempt - 1].balance:
            deferred = episode.deferred_batch_norm
            model = DistributedGPipe(layers_of(episode), balance, deferred_batch_norm=deferred, silence=episode.silence)
            self._model = model
        model.zero_grad()
        model.train()
        traps.clear()
        for fault in faults:
            if fault is not None and fault.rank == model.rank:
                step = episode.steps[fault.step]
                batch = step.evaluation if fault.place == "evaluation" else step.batches[0]
                passes = 1 + fault.skipped % batch.m if fault.place in IN_LAYERS and batch is not None else 1
                layer = sum(balance[: fault.rank]) + int(fault.share * balance[fault.rank])
                traps.append(Trap(fault, layer, passes, report, self.folder / f"released {attempt}"))
        _train(episode, model, report, self._saves)

    def close(self) -> None:
        """Close the connections to other ranks."""
        if self._model is not None:
            self._model.close()


def _train(episode: Episode, model: GPipe | DistributedGPipe, report: Report, saves: Saves | None) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(episode.seed)
    last = model.rank + 1 == len(model.balance) if isinstance(model, DistributedGPipe) else True
    first = 0
    if saves is not None:
        found = saves.load(model, optimizer)
        if found is None:  # a pipeline that is kept goes back to it
            found = {"step": -1}
            saves.save(-1, model, optimizer)
        first = found["step"] + 1
        report("loaded", step=first - 1, state=_digests(model, optimizer))
    for number, step in enumerate(episode.steps[first:], first):
        for trap in traps:
            trap.begin(number)
        data = torch.Generator().manual_seed(episode.seed + number)
        losses = []
        for batch in step.batches:
            x, target = _samples(episode, batch, data), _samples(episode, batch, data)
            pass_by("data")
            model.chunks, model.checkpoint = batch.chunks, step.mode
            loss = model.loss(_criterion, x, target)
            losses.append(float(loss).hex())
            pass_by("before backward")
            loss.backward()
        norm = None
        if step.clip is not None:
            pass_by("clipping")
            norm = float(model.clip_grad_norm_(step.clip)).hex()
        pass_by("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        output = None
        if step.evaluation is not None:
            x = _samples(episode, step.evaluation, data)
            model.chunks = step.evaluation.chunks
            model.eval()
            with torch.no_grad():
                y = model(x)
            model.train()
            output = _digest(y) if last else None
        report("step", step=number, losses=losses, norm=norm, output=output, state=_digests(model, optimizer))
        if step.saved and saves is not None:
            for trap in traps:
                trap.begin_saving()
            saves.save(number, model, optimizer, seen=number + 1)
            report("saved", step=number)


def _samples(episode: Episode, batch: Batch, data: torch.Generator) -> Tensor:
    return torch.randn(batch.samples, episode.length, episode.width, generator=data)


def _criterion(output: Tensor, target: Tensor) -> Tensor:
    pass_by("loss")
    return nn.functional.mse_loss(output, target)


def _digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what tells states of parameters, buffers and the optimizer apart, by name in the model."""
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name} {key}": x for key, x in optimizer.state.get(parameter, {}).items()}
    return {name: _digest(x) for name, x in tensors.items()}


def _digest(x: Tensor) -> str:
    return hashlib.blake2b(x.detach().contiguous().numpy().tobytes(), digest_size=6).hexdigest()
