"""Errors that a user can mend: where, what was expected, what came, how to fix it. Entry scripts print them without a traceback."""


class RankerError(Exception):
    """A user's mistake or a broken input; its text is one line that says where, expected, got and fix."""


class ConfigError(RankerError):
    """One or several faults in the configuration, each with its dotted key."""


class DataError(RankerError):
    """A missing, broken or contradicting input file or collection."""


class CheckpointError(RankerError):
    """A checkpoint or model folder that is missing, incomplete or does not fit."""
