"""The kinds of gates, by name. Nothing here needs torch, so that the command line can tell of them at once."""

__all__ = ["GRANULARITIES", "OLD_NAMES", "PAPER", "present_name"]

PAPER = ("head", "ffn", "value_dim", "neuron")  # the paper's four
GRANULARITIES = (*PAPER, "qk_dim", "attention")
OLD_NAMES = {"block": "ffn"}  # still accepted


def present_name(name: str) -> str:
    """The name a kind of gates has now."""
    return OLD_NAMES.get(name, name)
