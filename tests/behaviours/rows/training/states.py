"""Test cases about saved states, evaluation mode, and exceptions."""

from functools import partial

import torch
from torch import Tensor, nn

from ....parts import Fails
from ...pipe import Training, batch, mlp, squares
from .actions import (
    ON_PURPOSE,
    as_it_is,
    between_steps,
    evaluated,
    going_on,
    moved,
    next_batch,
    raised,
    stepped_then_evaluated,
    told,
    trained_then_evaluated,
)
from .models import adam, between, normed, sgd

STATE = "state files"
EVALUATION = "evaluation"
FAILURES = "an exception"
RAISES = "Every rank raises, and none hangs or is killed."


def raising_in(phase: str) -> nn.Sequential:
    """Build a model whose middle layer raises an error once, in forward or in backward."""
    fails = Fails()
    fails.fail(phase, ValueError(ON_PURPOSE))
    return mlp(fails)


def raising(output: Tensor, target: Tensor) -> Tensor:
    """Return the squared error. If the target is all zeros, raise an error."""
    if not target.any():
        raise ValueError(ON_PURPOSE)
    return squares(output, target)


def bad_target() -> tuple[Tensor, Tensor]:
    x, _ = batch()
    return x, torch.zeros(8, 3)


ROWS = [
    Training(
        "names and values",
        STATE,
        "All ranks together write what the model alone would write.",
        normed,
        (3, 2),
        action=as_it_is,
    ),
    Training(
        "another balance",
        STATE,
        "A training goes on with another split, or on other machines.",
        balance=(1, 3),
        action=moved,
        optimizer=sgd,
    ),
    Training(
        "going on",
        STATE,
        "After a restart it is as if nothing had happened, the optimizer's state included.",
        action=going_on,
        optimizer=adam,
    ),
    Training(
        "outputs",
        EVALUATION,
        "They are the model's, without dropout.",
        between(nn.Dropout),
        (3, 2),
        action=evaluated(),
    ),
    Training(
        "batch norm",
        EVALUATION,
        "Evaluation uses running statistics and leaves them as they are.",
        normed,
        (3, 2),
        action=stepped_then_evaluated,
    ),
    Training(
        "between two steps of training",
        EVALUATION,
        "Evaluation leaves training as it is.",
        action=between_steps,
        optimizer=adam,
    ),
    Training(
        "a larger batch than in training",
        EVALUATION,
        "Evaluation needs less memory, so batches are larger.",
        action=trained_then_evaluated,
        optimizer=sgd,
    ),
    Training(
        "an uneven batch",
        EVALUATION,
        "The last samples of a test set count as well.",
        action=evaluated(*batch(14)),
    ),
]
for phase in ("forward", "backward"):
    for place, balance in (("first", (3, 2)), ("last", (2, 3))):
        row = Training(
            f"in {phase} of the {place} partition",
            FAILURES,
            RAISES,
            partial(raising_in, phase),
            balance,
            action=raised,
        )
        ROWS.append(row)
ROWS += [
    Training(
        "in the criterion",
        FAILURES,
        RAISES,
        given=bad_target,
        action=raised,
        criterion=raising,
    ),
    Training(
        "is told to every rank",
        FAILURES,
        "Whichever log is read, it says what went wrong.",
        partial(raising_in, "forward"),
        (2, 3),
        action=told,
    ),
    Training(
        "then the next mini-batch",
        FAILURES,
        "A program that leaves out a bad batch goes on with right gradients.",
        given=bad_target,
        action=next_batch,
        criterion=raising,
    ),
]
