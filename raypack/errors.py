"""The one kind of error that a user is meant to read."""


class RaypackError(Exception):
    """Bad input or an impossible request.

    The text is one line: which value, which limit, what to change. Commands print it and exit non-zero;
    it crosses processes as text, so it takes exactly one argument.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
