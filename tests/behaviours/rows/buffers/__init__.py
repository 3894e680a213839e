"""Test cases in which a forward changes or replaces buffers, parameters, inputs or outputs."""

from . import held, in_place, parameters

ROWS = [*held.ROWS, *parameters.ROWS, *in_place.ROWS]
