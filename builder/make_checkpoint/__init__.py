"""Checkpoints of named models with random weights: the layout, names, dtypes and shapes of a release at any scale, for
tests and measurements. Nothing else of the package may import this; it knows the configs of releases by heart, which
a build never does."""
