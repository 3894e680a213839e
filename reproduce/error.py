"""The one exception for what a user can do something about: a message of one line, and the program's exit code."""

USAGE = 2
"""The exit code where what was asked for cannot be had, as click has it."""


class Error(Exception):
    """Stop with one line on stderr. It says what was given or what failed, what is allowed, and what to do."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
