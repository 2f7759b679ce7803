"""The errors a user can meet. Each message says what was wrong, what was found and how to mend it."""

__all__ = ["CheckpointError", "ExtractionError", "TopologyError", "UnsupportedModelError"]


class UnsupportedModelError(ValueError):
    """The model has a structure that cannot be gated or extracted exactly."""


class TopologyError(ValueError):
    """A topology is malformed, or does not fit the model it is used with."""


class ExtractionError(RuntimeError):
    """The extracted network does not reproduce the gated one."""


class CheckpointError(ValueError):
    """A folder cannot be written as, or read as, a compact model."""
