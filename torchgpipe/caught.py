"""Describe an error or a value in one line, and remove a reference cycle from a caught error."""


def caught(error: Exception) -> Exception:
    """Return an error without the first frame of its traceback.

    Use this in a generator with the decorator `contextmanager`, when the generator has caught the
    error. The first frame is the generator's own. From Python 3.12 on, this frame refers to its
    caller's frame, and the caller's frame refers to the error. This reference cycle would keep
    alive everything that the frames hold.
    """
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def in_one_line(error: BaseException) -> str:
    """Return the name of an error's class, and the first line of its message if there is one."""
    kind = type(error).__name__
    lines = str(error).splitlines()
    return f"{kind}: {lines[0]}" if lines and lines[0] else kind


def shortened(value: object) -> str:
    """Return the `repr` of a value for a message: one line of at most 200 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:199]}…"
