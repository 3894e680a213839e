"""Test calls of a pipeline over processes: their order, their checks and their errors.

Any order of calls is allowed if it is the same on all ranks. Each error message is one line.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from torchgpipe import GPipe, sequential
from torchgpipe.distributed import DistributedGPipe, RankFailed, connections
from torchgpipe.distributed.liveness import liveness
from torchgpipe.distributed.liveness.monitor import RankMonitor

from ..trace.texts import SHAPES, Long, text
from .training import assert_same

WORLD = 3
pytestmark = pytest.mark.ranks(WORLD)
X = torch.arange(36.0).view(9, 4).sin()
TARGET = torch.arange(36.0).view(9, 4).cos()


def linears(
    count: int = WORLD, wrap: Callable[..., nn.Module] = lambda layer: layer
) -> nn.Sequential:
    layers = [wrap(nn.Linear(4, 4)) for _ in range(count)]
    return nn.Sequential(*layers)


def small(**options: Any) -> Any:
    """Return two pipelines with equal layers: one over ranks, and one over threads."""
    pair = []
    for make in (DistributedGPipe, partial(GPipe, devices=["cpu"] * WORLD, engine="workers")):
        torch.manual_seed(6)
        pair.append(make(linears(), [1] * WORLD, chunks=3, **options))
    # Wait until all ranks have made their pipeline. Otherwise, if a rank failed in its first call,
    # another rank could raise this error while it still makes its pipeline.
    dist.barrier()
    return pair


def loss_of(model: Any, x: Tensor = X) -> Tensor:
    loss: Tensor = model.loss(nn.functional.mse_loss, x, TARGET)
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(ours: Any, threads: Any) -> None:
    assert_same(gradients(ours), gradients(threads))
    ours.zero_grad()
    threads.zero_grad()


def test_calls_in_any_order() -> None:
    """Check that calls of two pipelines can be mixed: evaluations, losses, 0 to 2 backwards."""
    ours, threads = small()
    others = small()
    for first, second in ((ours, others[0]), (threads, others[1])):
        one = loss_of(first)
        two = loss_of(second, X + 1)
        loss_of(first)
        with torch.no_grad():
            loss_of(first.eval())
        first.train()
        one.backward(retain_graph=True)
        two.backward()
        one.backward()
    assert_same_gradients(ours, threads)
    assert_same_gradients(*others)


def test_a_parameter_hook_that_raises_is_told_to_all_ranks() -> None:
    """Check that all ranks raise an error if a hook of a parameter raises it on one rank.

    A step calls such hooks at its end. Ranks that have already ended this step raise the error in
    the next step.
    """
    model, _ = small(schedule="1F1B")

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("no such luck")

    if model.rank == 1:
        model.partition[0].weight.register_hook(fail)
    with pytest.raises((ArithmeticError, RankFailed), match="no such luck"):
        for _ in range(2):
            model.step(nn.functional.mse_loss, X, TARGET)
    model.close()


def test_a_criterion_that_calls_the_pipeline_is_refused_at_once() -> None:
    model, threads = small(schedule="1F1B")

    def criterion(y: Tensor, target: Tensor) -> Tensor:
        model.evaluate(nn.functional.mse_loss, X, TARGET)
        return nn.functional.mse_loss(y, target)

    with pytest.raises((RuntimeError, RankFailed), match="calls the pipeline while it runs"):
        model.step(criterion, X, TARGET)
    model.close()
    for each in (model, threads):
        each.step(nn.functional.mse_loss, X, TARGET)
    assert_same_gradients(model, threads)


def penalised(layers: nn.Sequential) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a criterion that adds to the loss a penalty on the parameters of `layers`."""

    def criterion(y: Tensor, target: Tensor) -> Tensor:
        penalty: Any = sum(p.square().sum() for p in layers.parameters())
        return nn.functional.mse_loss(y, target) + penalty

    return criterion


def test_a_criterion_that_uses_parameters_of_another_rank_is_refused() -> None:
    """Check that a criterion may use parameters of the last rank only.

    The criterion runs on the last rank. A gradient of another rank's parameter would stay there.
    """
    layers = linears()
    model = DistributedGPipe(layers, [1] * WORLD, chunks=3, schedule="1F1B")
    refusal = r"uses \d.\w+, a parameter of another rank's layers.*each rank"
    with pytest.raises((RuntimeError, RankFailed), match=refusal):
        model.step(penalised(layers), X, TARGET)
    model.close()
    own = nn.Sequential(layers[-1])
    model.step(penalised(own), X, TARGET)
    assert all(p.grad is not None for p in model.parameters())


def test_a_loss_without_the_output_and_one_that_outlives_its_pipeline() -> None:
    ours, threads = small()
    scale = torch.ones(4, requires_grad=True)

    def of_scale(y: Tensor, target: Tensor) -> Tensor:
        return (y.detach() * scale).sum()

    def of_both(y: Tensor, target: Tensor) -> Tensor:
        return (y * scale).sum()

    for model in (ours, threads):
        for criterion in (of_scale, of_both):
            model.loss(criterion, X, TARGET).backward()
    assert_same_gradients(ours, threads)
    ours.requires_grad_(False)
    ours.loss(of_both, X, TARGET).backward()

    model = small()[0]
    loss = loss_of(model)
    parameters = [*model.parameters()]
    del model
    gc.collect()
    loss.backward()
    assert any(p.grad is not None for p in parameters)


def assert_refused_after_close(ours: Any) -> None:
    loss = loss_of(ours)
    dist.barrier()
    ours.close()
    closed = r"connections were closed by close\(\) after the forward of this"
    with pytest.raises(RuntimeError, match=closed):
        loss.backward()
    ended = ours._connections.liveness
    ended.fail("what breaks once a rank has closed its connections is no failure")
    assert not ended.stopped


def assert_a_second_backward_is_refused(ours: Any) -> None:
    loss = loss_of(ours)
    loss.backward()
    ours.zero_grad()
    dist.barrier()  # fail only after the backward of all ranks has ended
    with pytest.raises(RuntimeError, match="the pipeline was already gone through backward"):
        if ours.rank == 1:
            loss.backward()
        loss_of(ours)
    ours.close()


def assert_an_error_of_the_criterion_is_told(ours: Any) -> None:
    with pytest.raises((KeyError, RankFailed)) as caught:
        ours.loss(Mock(side_effect=KeyError("of the criterion")), X, TARGET)
    told = "'of the criterion'"
    if ours.rank != WORLD - 1:
        told = f"rank 2 failed in the criterion: KeyError: {told}"
    assert str(caught.value) == told


def assert_mini_batches_are_compared(ours: Any) -> None:
    """Assert that all ranks raise an error if rank 1 is one mini-batch ahead of the others."""
    if ours.rank == 1:
        ours._serial += 1
    refusal = r"rank \d is in mini-batch \d, but rank \d is in mini-batch \d: every rank has to"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=refusal):
            loss_of(ours)
    ours.close()


def assert_clipping_is_compared(ours: Any) -> None:
    for name, of_rank_1 in (("max_norm", (2.0, 2.0)), ("norm_type", (1.0, 1.0))):
        given = of_rank_1 if ours.rank == 1 else (1.0, 2.0)
        refusal = f"clip_grad_norm_ with the same settings, but {name} is ..0 on rank . and"
        with pytest.raises((ValueError, RankFailed), match=refusal):
            ours.clip_grad_norm_(*given)
        ours.close()
    loss_of(ours).backward()
    ours.clip_grad_norm_(float("nan"))
    ours.zero_grad()


def assert_settings_are_compared(ours: Any) -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("chunks", 0, "chunks must be a whole number of at least 1, but got 0"),
        (
            "chunks",
            2,
            "call the pipeline with the same settings, but chunks is 3 on rank 0 and 2 on rank 1",
        ),
        (
            "_balance",
            [2, 0, 1],
            r"but the balance is \(1, 1, 1\) on rank 0 and \(2, 0, 1\) on rank 1",
        ),
        ("training", False, "but training is True on rank 0 and False on rank 1"),
        ("timeout", None, "but timeout is 300.0 on rank 0 and None on rank 1"),
    ]
    for name, value, message in wrong:
        before = getattr(ours, name)
        if ours.rank == 1:
            setattr(ours, name, value)
        with pytest.raises((ValueError, RankFailed), match=message):
            loss_of(ours)
        setattr(ours, name, before)


def test_errors_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = dist.get_rank()
    ours, threads = small()
    with monkeypatch.context() as patch:
        # On a busy machine, a rank can be late by seconds with its answer to other ranks' last
        # messages. Without these patches, the other ranks would not wait so long, and would count
        # this rank as failed.
        for module in (liveness, connections):
            patch.setattr(module, "END_SECONDS", 20.0)
        patch.setattr(RankMonitor, "answers", lambda monitor, peer: True)
        assert_refused_after_close(ours)
    assert_a_second_backward_is_refused(ours)
    assert_an_error_of_the_criterion_is_told(ours)
    assert_mini_batches_are_compared(ours)
    loss_of(ours).backward()
    loss_of(threads).backward()
    assert_same_gradients(ours, threads)
    assert_clipping_is_compared(ours)

    ours.timeout = 7
    changed = r"timeout was changed from 300.0 to 7 .* call close\(\)"
    with pytest.raises(RuntimeError, match=changed):
        loss_of(ours)
    ours.timeout = 300.0

    with pytest.raises(RuntimeError, match="a pipeline over ranks cannot run within a backward"):
        checkpoint(ours, X, use_reentrant=False).sum().backward()
    ours.close()
    ours.rank = (rank + 1) % WORLD  # as if this part had been saved on another rank
    another_rank = (
        f"this pipeline has the partitions of rank {ours.rank}, and runs on that rank only"
    )
    with pytest.raises(RuntimeError, match=another_rank):
        loss_of(ours)
    ours.rank = rank

    assert_settings_are_compared(ours)
    two_inputs = r"takes one input, .* but got 1 by place, mask"
    with pytest.raises((TypeError, RankFailed), match=two_inputs):
        ours(X, mask=X)


def test_wrong_arguments() -> None:
    other = dist.get_rank() == 1
    device = "meta" if other else "cpu"
    schedule = "GPipe" if other else "1F1B"
    module = linears(5, nn.Sequential) if other else linears(5)
    interleaved = {"schedule": "Interleaved1F1B", "balance": [1, 1, 1, 2]}
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"balance": [5]},
            r"the balance \[5\] has 1 partitions, but there are 3 ranks; give each rank a number",
        ),
        (
            {"mesh": 3},
            r"mesh must be one dimension of a DeviceMesh, such as mesh\['pp'\], but got 3",
        ),
        ({"device": ["cpu"]}, r"device must be this rank's device, but got \['cpu'\]"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, or None, but got 0"),
        ({"device": device}, "the kind of device is 'cpu' on rank 0 and 'meta' on rank 1"),
        ({"schedule": schedule}, "the schedule is '1f1b' on rank 0 and 'gpipe' on rank 1"),
        (interleaved, "the balance has 4 for 3 devices; give a balance of 6"),
        (
            {"module": module},
            "the checksum of its parameters' names and shapes is .* on rank 0",
        ),
    ]
    for options, message in wrong:
        arguments = {"module": linears(5), "balance": [1, 2, 2], **options}
        with pytest.raises((TypeError, ValueError, RankFailed), match=message):
            loss_of(DistributedGPipe(**arguments))
    with pytest.raises(ValueError, match=r"rank \d holds 2 partitions: see model.partitions"):
        DistributedGPipe(linears(6), [1] * 6, schedule="ZBVZeroBubble").partition  # noqa: B018


def test_the_old_name_of_the_timeout() -> None:
    renamed = "silence is now called timeout, and the old name will be removed"
    with pytest.warns(DeprecationWarning, match=renamed) as warned:
        model = DistributedGPipe(linears(), [1] * WORLD, silence=7)
        assert model.timeout == 7
        model.silence = 9
        assert model.silence == 9
    assert [each.filename for each in warned] == [__file__] * 3


def test_a_connection_that_fails_is_told_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, threads = small()
    ours.close()

    said = (
        "failed with [pair.cc:561] Connection closed by peer [::1]:7. This is typically caused by"
    )
    rank = dist.get_rank()
    told = rf"rank {rank} connected to others \(Connection closed by peer \[::1\]:7\)"
    with monkeypatch.context() as patch:
        patch.setattr(dist, "ProcessGroupGloo", Mock(side_effect=RuntimeError(said)))
        with pytest.raises(RankFailed, match=f"an unknown rank ended while {told}"):
            loss_of(ours)
    loss_of(ours).backward()
    loss_of(threads).backward()
    assert_same_gradients(ours, threads)


def test_a_length_with_other_calls_is_refused_on_all_ranks() -> None:
    layers = sequential(Long(blocks=1), text(2, 8), dynamic_shapes=SHAPES)
    model = DistributedGPipe(layers, [1, 1, len(layers) - 2], chunks=2, schedule="1F1B")
    for length in (7, 10, 9):
        x, target = torch.ones(4, length, dtype=torch.int64), torch.ones(4, length, 11)
        if length == 10:
            with pytest.raises((TypeError, RankFailed), match="2x10 samples x lengths it does"):
                model.step(mse_loss, x, target)
        else:
            assert model.step(mse_loss, x, target).isfinite()
