"""The errors a user can cause. Each message says what was wrong, what was found and how to mend it.

All are a `HiapError`, and also what such an error is called in Python, so that old code that catches ValueError or
RuntimeError still does. The command line shows them as one line, and everything else with its traceback.
"""

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "ExportError",
    "ExtractionError",
    "HiapError",
    "InputError",
    "KindError",
    "LatencyError",
    "RunError",
    "TopologyError",
    "UnsupportedModelError",
]


class HiapError(Exception):
    """Any error of this package that a user can cause."""


class InputError(HiapError, ValueError):
    """An argument, a file or data that cannot be used."""


class KindError(HiapError, TypeError):
    """An argument of another kind than is needed."""


class ConfigError(HiapError, ValueError):
    """Everything that is wrong with a configuration, at once."""


class BudgetError(HiapError, ValueError):
    """A target that cannot be read or cannot be reached."""


class UnsupportedModelError(HiapError, ValueError):
    """The model has a structure that cannot be gated or extracted exactly."""


class TopologyError(HiapError, ValueError):
    """A topology is malformed, or does not fit the model it is used with."""


class ExtractionError(HiapError, RuntimeError):
    """The extracted network does not reproduce the gated one."""


class ExportError(HiapError, RuntimeError):
    """A model cannot be exported, or the exported file computes something else."""


class CheckpointError(HiapError, ValueError):
    """A folder cannot be written as, or read as, a compact model."""


class LatencyError(HiapError, ValueError):
    """A table of costs that cannot be read, or does not fit the model."""


class RunError(HiapError, RuntimeError):
    """A run that cannot start, go on or be saved."""
