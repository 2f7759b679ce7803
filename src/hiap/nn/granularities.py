"""The kinds of gates, by name. Nothing here needs torch, so that the command line can tell of them at once."""

__all__ = ["GRANULARITIES", "PAPER"]

PAPER = ("head", "block", "value_dim", "neuron")  # the paper's four
GRANULARITIES = (*PAPER, "qk_dim", "attention")
