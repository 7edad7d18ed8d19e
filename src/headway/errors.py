"""The one error that every room raises for a user's mistake."""


class UserError(Exception):
    """The input is wrong: the message says what, where and how to fix it. The command line prints it and exits with 2."""


class RunFailed(Exception):  # noqa: N818 - it names what happened, as the log line does
    """The run met something it must not go on from (divergence, too many corrupt records): the message says what and where
    the last good checkpoint is. The command line prints it and exits with 1."""
