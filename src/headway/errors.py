"""The one error that every room raises for a user's mistake."""


class UserError(Exception):
    """The input is wrong; the message says what, where and how to fix it. The command line exits with 2."""


class RunFailed(Exception):  # noqa: N818 - it names what happened, as the log line does
    """The run met what it must not go on from: divergence, too many corrupt records. The command line exits with 1."""
