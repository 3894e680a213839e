"""Raise the error of a backward only when no thread runs a partition any more.

On several GPUs, autograd has a thread for each GPU. If a node raises an error in one thread,
`backward()` raises this error in the caller's thread at once:

    thread of GPU 1    backward of micro-batch 1 on stage 1 fails
    thread of GPU 0    backward of micro-batch 2 on stage 0 … … … … still runs
    caller             gets the error, and calls the model again

While the thread of GPU 0 runs stage 0, the layers have other tensors (stand-ins) in place of their
parameters. A caller who catches the error would find these tensors in the layers. Therefore the
thread that has failed waits until no thread runs a partition, and only then raises its error. In
the meantime, no thread begins another task.
"""

import copy
import threading
from types import TracebackType

from torchgpipe.caught import in_one_line
from torchgpipe.tensors._autograd import backward_id

WAIT_SECONDS = 10.0
"""How many seconds a thread that has failed waits for other threads.

Without a limit, it could wait for ever: if a layer uses the GPU of another stage, its backward
needs the thread of that GPU, which waits here.
"""


class InPartitions:
    """A context that a thread enters while it runs a partition in a backward of a mini-batch.

    A thread that fails leaves the context only when no other thread is in it. So when the caller
    gets the error, no thread changes the layers any more. A thread that enters after this failure,
    in the same backward, gets an error with the same text.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        # The number of the backward that has failed, and an error like its error.
        self._failed: int | None = None
        self._error: BaseException = RuntimeError()

    def __enter__(self) -> None:
        with self._changed:
            if self._failed == backward_id():
                raise _like(self._error)
            self._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
            if error is not None:
                self._failed = backward_id()
                self._error = _like(error)
                self._changed.wait_for(lambda: self._inside == 0, WAIT_SECONDS)


def _like(error: BaseException) -> BaseException:
    """Return an error with the same class, message and notes, but without frames.

    The frames of an error keep the tensors of a task alive. Autograd shows the caller the error of
    the thread that raises first, so the errors of all threads must have the same text.
    """
    try:
        another = copy.copy(error)
    except Exception:  # the class takes other arguments than the error has in `args`
        another = RuntimeError(in_one_line(error))
    return another.with_traceback(None)
