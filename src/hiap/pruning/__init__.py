"""From a dense model to a compact one: gates in, heads aligned, units cut out, counted and saved."""
