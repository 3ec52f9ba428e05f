"""What stops a command: one sentence that says what, where and what to do."""

from __future__ import annotations


class UserError(Exception):
    """Input or surroundings that must not be worked with. Its text is what the user reads, whole."""
