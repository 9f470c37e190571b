"""The kinds of error that a user is meant to read, and the one that ends an attempt on purpose."""


class RaypackError(Exception):
    """Bad input or an impossible request.

    The text is one line: which value, which limit, what to change. Commands print it and exit non-zero;
    it crosses processes as text, so it takes exactly one argument.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class LostRank(RaypackError):
    """A rank waited in vain for another one: worth another attempt, and seldom the cause itself."""


class Leaving(Exception):
    """All ranks end here together, after a checkpoint, because they were asked to: the run goes on in a new attempt."""
