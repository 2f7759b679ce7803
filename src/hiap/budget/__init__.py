"""Targets and what they are about: costs, latency tables, and the choice of units that fits a target."""
