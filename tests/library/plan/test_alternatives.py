"""Test predictions for training without a pipeline: on one device, by data parallelism, by FSDP."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn import Linear, Sequential, Tanh

from torchgpipe.plan import load_hardware
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.predict.memory import setup_memory
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.plan.search.alternatives import Alternative, alternatives
from torchgpipe.tensors.checkpoint import Mode

NODE = replace(load_hardware("a100x8"), launch=1e-9, link_latency=0.0)
ADAM = optimizer_named("adam", foreach=True)
SGD = optimizer_named("sgd", foreach=True)
PLENTY = 2.0**50


def model(width: int = 64, layers: int = 8) -> Sequential:
    made = Sequential()
    for _ in range(layers):
        made.extend([Linear(width, width, bias=False), Tanh()])
    return made


def predictor(width: int = 64, link: float = NODE.link_bandwidth, rows: int = 1) -> Predictor:
    """Make a predictor for a model of linear layers.

    Args:
        width: The number of input and output features of the layers.
        link: The bandwidth between devices in bytes per second.
        rows: The number of vectors in a sample. Each vector has `width` features.
    """
    counts = count(model(width), torch.empty(2, rows, width))
    return Predictor(counts, replace(NODE, link_bandwidth=link))


def bytes_of(made: Predictor) -> float:
    """Return the bytes of all parameters."""
    return float(sum(layer.parameters for layer in made.counts.low))


def test_plain_training_is_a_pipeline_of_one_device() -> None:
    made = predictor()
    (plain,) = alternatives(made, 512, 1, ADAM, PLENTY)
    assert (plain.micro_batches, plain.size, plain.recomputed) == (1, 512, False)
    setup = Setup(512, (16,), 1, "never", ADAM, schedule="1F1B")
    (device,) = setup_memory(made.counts, setup)
    assert plain.seconds == pytest.approx(made.step(setup).seconds)
    assert plain.peak == device.peak


def test_accumulation_is_a_pipeline_of_one_device() -> None:
    """Check that one device with little memory accumulates gradients over micro-batches.

    Its predicted time must be that of a 1F1B pipeline on one device.
    """
    made = predictor()
    (plain,) = alternatives(made, 512, 1, SGD, PLENTY)
    (found,) = alternatives(made, 512, 1, SGD, plain.peak * 0.6)
    assert found.peak <= plain.peak * 0.6
    assert found.micro_batches > 1 or found.recomputed
    mode: Mode = "always" if found.recomputed else "never"
    setup = Setup(512, (16,), found.micro_batches, mode, SGD, schedule="1F1B")
    assert found.seconds == pytest.approx(made.step(setup).seconds)


def test_a_smaller_last_micro_batch_takes_the_time_of_its_own_samples() -> None:
    """Check that three samples, of which two fit at once, take the time of three samples, not four.

    Micro-batches of one sample fit, too, but add up gradients more often.
    """
    made = predictor(rows=1000)
    needs = {}
    for samples in (2, 3):
        (found,) = alternatives(made, samples, 1, SGD, PLENTY)
        needs[samples] = found.peak
    (found,) = alternatives(made, 3, 1, SGD, (needs[2] + needs[3]) / 2)
    assert (found.micro_batches, found.size, found.recomputed) == (2, 2, False)
    setup = Setup(3, (16,), 2, "never", SGD, schedule="1F1B")
    assert setup.sizes == [2, 1]
    assert found.seconds == pytest.approx(made.step(setup).seconds)


def test_recomputation_takes_another_forward_and_saves_memory() -> None:
    """Check that a request for a setup of 0 bytes, which cannot exist, gets the smallest setup.

    The smallest setup has micro-batches of one sample, and recomputes its activations.
    """
    made = predictor(rows=100)
    (least,) = alternatives(made, 512, 1, SGD, 0.0)
    assert least.recomputed
    assert (least.micro_batches, least.size) == (512, 1)
    layers = made.layers(1)
    again = 512 * sum(layers.graph)
    setup = Setup(512, (16,), 512, "never", SGD, schedule="1F1B")
    assert least.seconds == pytest.approx(made.step(setup).seconds + again)
    (device,) = setup_memory(made.counts, setup)
    assert least.peak < device.peak


def test_data_parallel_training_sums_gradients_over_devices() -> None:
    slow = 1e6  # bytes per second, so that the exchange takes far longer than the backward
    made = predictor(link=slow)
    found, _ = alternatives(made, 512, 4, SGD, PLENTY)
    layers = made.layers(128)
    forward = sum(layers.graph)
    exchange = 2 * 3 * bytes_of(made) / 4 / slow
    update = made.update(Setup(128, (16,), optimizer=SGD), [bytes_of(made)])
    assert found.seconds == pytest.approx(forward + exchange + update)
    quick, _ = alternatives(predictor(link=1e15), 512, 4, SGD, PLENTY)
    (alone,) = alternatives(made, 128, 1, SGD, PLENTY)
    assert quick.seconds == pytest.approx(alone.seconds)  # the backward hides the exchange
    assert quick.memory.gradients == alone.memory.gradients + bytes_of(made)


def fsdp(made: Predictor, batch_size: int, devices: int) -> Alternative:
    _, found = alternatives(made, batch_size, devices, ADAM, PLENTY)
    assert found.way == "FSDP"
    return found


def test_fsdp_shards_parameters_gradients_and_state() -> None:
    """Check the predicted memory of FSDP, which shards as ZeRO-3 does.

    FSDP splits the layers into four equal units. Each device has its shard of all parameters,
    gradients and Adam states. It also has the gathered parameters of two units, and the whole
    gradients of one unit. Activations take hardly any memory, because each device has only one
    sample.
    """
    made = predictor(width=512)
    whole = bytes_of(made)
    for devices in (2, 8):
        found = fsdp(made, devices, devices)
        assert found.peak == pytest.approx((1 + 1 + 2) * whole / devices + 3 * whole / 4, rel=0.02)
    peaks = [fsdp(made, 8, devices).peak for devices in (2, 4, 8)]
    for more, fewer in pairwise(peaks):
        assert more > fewer


def test_fsdp_gathers_parameters_twice_and_scatters_gradients_once() -> None:
    slow = 1e6
    made = predictor(link=slow)
    found = fsdp(made, 512, 4)
    travel = 3 * (4 - 1) / 4 * bytes_of(made) / slow
    update = made.update(Setup(128, (16,), optimizer=ADAM), [bytes_of(made) / 4])
    assert found.seconds == pytest.approx(travel + update)
    quick = fsdp(predictor(link=1e15), 512, 4)
    assert quick.seconds < found.seconds / 100


def test_fsdp_has_all_activations_when_its_backward_begins() -> None:
    """Check that activations count although whole gradients would take more memory than they do.

    FSDP keeps only a share of the gradients. So its memory is fullest when its backward begins, and
    not at the end of the backward, as in data parallel training.
    """
    width, rows, devices = 512, 256, 8
    made = predictor(width=width, rows=rows)
    whole = bytes_of(made)
    activations = 8 * rows * width * 4  # the outputs of the eight Tanh layers, for one sample
    assert activations < whole
    least = (1 + 1 + 2) * whole / devices + 2 * whole / 4 + activations
    assert fsdp(made, devices, devices).peak >= least
