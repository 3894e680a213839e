"""Change a setting of the whole process for as long as any thread needs the new value."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class ProcessSetting(AbstractContextManager[None]):
    """A context that changes a setting of the whole process, for all threads.

    Several threads can be in the context at the same time. The setting gets its old value back
    when the last thread leaves the context.

    Args:
        get: A function that returns the present value of the setting.
        put: A function that sets the setting to the value that it is given.
        value: The value of the setting within the context.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object], value: object) -> None:
        self._get, self._put, self._value = get, put, value
        self._lock, self._within = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                self._before = self._get()
                self._put(self._value)
            self._within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._within -= 1
            if not self._within:
                self._put(self._before)
