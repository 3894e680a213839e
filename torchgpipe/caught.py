"""Helpers for errors: describe an error or a value in one line, and avoid a reference cycle."""


def caught(error: Exception) -> Exception:
    """Remove the first frame from a caught error's traceback; return the error.

    A generator with the decorator `contextmanager` calls this function when it catches an error.
    The first frame of the traceback is then the generator's own frame. From Python 3.12 on, this
    frame refers to its caller's frame, which refers to the error. Without this function, that
    reference cycle would keep alive all objects in the two frames.
    """
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def in_one_line(error: BaseException) -> str:
    """Describe an error in one line: the name of its class, and its message's first line."""
    kind = type(error).__name__
    lines = str(error).splitlines()
    return f"{kind}: {lines[0]}" if lines and lines[0] else kind


def shortened(value: object) -> str:
    """Return the `repr` of a value for a message: one line of at most 200 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:199]}…"


def how_many(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular or in the plural: "1 layer", "2 layers"."""
    if number == 1:
        return f"1 {noun}"
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"
