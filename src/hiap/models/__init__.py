"""Families of models: what the rest of the package needs to know of a ViT, one file a family."""
