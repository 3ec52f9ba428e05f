"""The error that ends a command with one sentence and no traceback."""

from __future__ import annotations


class UserError(Exception):
    """Input or an environment that the command cannot work with.

    The message is printed as it is, so it must name the file, key or node, say what is wrong, and what to do about it.
    """
