"""One adapter a model family: where the units of its blocks are, what the rest costs, how to rebuild it."""
