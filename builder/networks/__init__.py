"""The networks, each one file that reads like its paper, and the registry that finds them by `model_type`."""
