"""Errors for the person who called jzero; a command turns them into one line and exit code 2."""


class JzeroError(ValueError):
    """Something the caller can mend: the message says what was wrong, where, and what to do."""


class ConfigError(JzeroError):
    """A configuration that jzero cannot honour; the message starts with the key's full path."""


class RunFailed(RuntimeError):
    """Something that failed while a command ran; the command tells it in one line, exit code 1."""
