"""The error that another one takes the place of: `caught`."""


def caught(error: Exception) -> Exception:
    """Return an error without the frame of the `contextmanager` that has caught it.

    From Python 3.12 on that frame keeps its caller's, and that the error: a cycle, with all that
    these frames hold.
    """
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
