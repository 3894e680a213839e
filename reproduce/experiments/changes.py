"""Change the settings of an experiment's rows by options of the command line.

For example, `--row n2m4 --set m=16 batch_size=64` runs the row `n2m4` with 16 micro-batches and
mini-batches of 64 samples, whatever its own settings are. The changed row has a name of its own,
`n2m4 m=16 batch_size=64`. It reproduces no published row, and is not compared with unchanged rows.
The record (the file of results) says what was changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from reproduce.error import Error, suggestion
from reproduce.experiments.row import CHANGED, EQUAL_LAYERS, PLANNED, Checkpoint, Row, Scale

MODES = get_args(Checkpoint)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _mode(text: str) -> str:
    if text not in MODES:
        raise ValueError
    return text


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))


@dataclass(frozen=True)
class Setting:
    """A field of a row that a command-line option can change.

    Attributes:
        field: The name of the field in `Row`.
        parse: A function that converts a text to the field's value, or raises `ValueError`.
        allowed: A text that says which values are allowed.
    """

    field: str
    parse: Callable[[str], Any]
    allowed: str


SETTINGS = {
    "n": Setting("partitions", _positive, "a number of partitions, such as 4"),
    "m": Setting("chunks", _positive, "a number of micro-batches, such as 16"),
    "batch_size": Setting("batch_size", _positive, "a number of samples, such as 64"),
    "balance": Setting(
        "balance", _numbers, "the number of layers of each partition, such as 3,6,7,8"
    ),
    "checkpoint": Setting("checkpoint", _mode, "always, except_last or never"),
}
NAMES = {setting.field: name for name, setting in SETTINGS.items()}  # by the field of `Row`
SIZE = Setting("size", _positive, "a size of the model, a whole number from 1")


def change_rows(scale: Scale, texts: Sequence[str]) -> Scale:
    """Return a copy of a scale (a set of rows) in which each row has changed settings.

    Args:
        scale: The scale with the rows to change.
        texts: The new settings, such as `["n=4", "m=16"]`.

    Raises:
        Error: A row has no such field, the value is not allowed, or nothing would change.
    """
    changed = {}  # maps the names of unchanged rows to changed rows
    for row in scale.rows:
        changed[row.name] = change_row(row, texts)
    rows = []
    for row in changed.values():
        # A speed-up over a row with other settings would mix two effects.
        baseline = changed.get(row.over or "")
        rows.append(replace(row, over=None if baseline is None else baseline.name))
    return replace(scale, rows=tuple(rows))


def change_row(row: Row, texts: Sequence[str]) -> Row:
    """Return a copy of a row (a configuration) with changed settings and a new name.

    `texts` has the new settings, such as `["n=4", "m=16"]`.
    """
    fields: dict[str, Any] = {}
    given = set()
    different = []
    changes = {}
    sizes = _names_of_sizes(row)
    for text in texts:
        name, value = _parsed(text, row, sizes)
        if name in given:
            raise Error(f"--set {' '.join(texts)}: {name} is set twice")
        given.add(name)
        setting = SETTINGS.get(name, SIZE)
        if setting is SIZE:
            size = list(fields.get("size", row.size))
            before: Any = size[sizes.index(name)]
            size[sizes.index(name)] = value
            fields["size"] = tuple(size)
        else:
            before = getattr(row, setting.field)
            fields[setting.field] = value
        if value != before:
            different.append(text)
            changes[name] = list(value) if isinstance(value, tuple) else value
    if not different:
        raise Error(f"--set {' '.join(texts)}: {row.name} has these settings already")
    configuration = row.configuration if row.configuration in (PLANNED, EQUAL_LAYERS) else CHANGED
    made = replace(
        row,
        **_with_consequences(row, fields),
        name=f"{row.name} {' '.join(different)}",
        configuration=configuration,
        changed_from=row.name,
        changed=changes,
        equal=None,
        published=None,
        skip_epochs=0,
        steps_per_epoch=0,
    )
    _check(made, fields, " ".join(texts))
    return made


def _names_of_sizes(row: Row) -> tuple[str, ...]:
    from reproduce.models.built import MODELS

    return MODELS[row.model].sizes


def _parsed(text: str, row: Row, sizes: Sequence[str]) -> tuple[str, Any]:
    """Return the name and the parsed value of a new setting, from a text such as `n=4`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise Error(f"--set {text}: give a field and its value, such as n=4")
    name = NAMES.get(name, name)
    known = [*SETTINGS, *sizes]
    if name == "schedule":
        raise Error(
            f"--set {text}: the schedule cannot be changed, because every row runs GPipe's, as in "
            "the papers; 'python -m benchmarks.schedules' compares schedules; --set can change "
            f"{', '.join(known)}"
        )
    if name not in known:
        raise Error(f"--set {text}: {row.name} has no {name} to set; {suggestion(name, known)}")
    setting = SETTINGS.get(name, SIZE)
    try:
        return name, setting.parse(value)
    except ValueError:
        raise Error(f"--set {text}: {name} is {setting.allowed}") from None


def _with_consequences(row: Row, fields: dict[str, Any]) -> dict[str, Any]:
    """Return all fields to change: those in `fields`, and others that follow from them.

    - A new balance also sets the number of partitions.
    - A new number of partitions, or a new size of the model, removes the old balance. The run then
      finds a balance by profiling.
    - A row without a pipeline that gets partitions also gets a checkpoint mode.
    """
    whole = dict(fields)
    if "balance" in fields:
        whole.setdefault("partitions", len(fields["balance"]))
    elif "partitions" in fields or "size" in fields:
        whole["balance"] = None
    if row.partitions is None and "partitions" in whole:
        whole.setdefault("checkpoint", "except_last")
    return whole


def _check(row: Row, fields: dict[str, Any], said: str) -> None:
    """Raise `Error` if the settings of a changed row do not fit each other or the row's model.

    For example, the number of partitions must not exceed the number of the model's layers.
    """
    problem = None
    if row.partitions is None and not fields.keys() <= {"batch_size", "size"}:
        problem = f"{row.changed_from} is trained without a pipeline; set n and m, too"
    elif row.partitions is not None and row.chunks is None:
        problem = f"{row.changed_from} is trained without a pipeline; set m, too"
    elif row.chunks is not None and row.chunks > row.batch_size:
        problem = f"m={row.chunks} is more than the {row.batch_size} samples of a mini-batch"
    elif row.balance is not None and len(row.balance) != row.partitions:
        problem = f"balance has {len(row.balance)} partitions, and n is {row.partitions}"
    elif "balance" in fields or "partitions" in fields:
        problem = _not_fitting(row)
    if problem is not None:
        raise Error(f"--set {said}: {problem}")


def _not_fitting(row: Row) -> str | None:
    """Return why a row's partitions do not fit the layers of its model, or None if they fit."""
    import torch

    with torch.device("meta"):
        layers = len(row.sized.layers())
    if row.partitions is not None and row.partitions > layers:
        return f"n={row.partitions} is more than the {layers} layers of {row.model}"
    if row.balance is not None and sum(row.balance) != layers:
        return f"balance has {sum(row.balance)} layers, and {row.model} has {layers}"
    return None
