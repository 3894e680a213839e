"""What passes change, in place or not: buffers, parameters, inputs and outputs."""

from . import held, in_place, parameters

ROWS = [*held.ROWS, *parameters.ROWS, *in_place.ROWS]
