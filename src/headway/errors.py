"""The one error that every room raises for a user's mistake."""


class UserError(Exception):
    """The input is wrong: the message says what, where and how to fix it. The command line prints it and exits with 2."""
