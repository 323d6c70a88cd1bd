"""Sum of partial results over the ranks of a tensor-parallel group; with one rank, the identity.

It stands after the output projection and after the experts in every network, so that a sharded engine differs from a
whole one only in what this op does. Op: `all_reduce`.
"""
