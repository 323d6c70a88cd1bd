"""What `twostroke demo` runs on a built engine, and beside it the weights of the demo models, one folder each.

The recipe that made the weights, and all that needs torch, is in `builder/demo`.
"""
