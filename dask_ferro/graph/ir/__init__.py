"""Facts of a graph for `graph` and `engines`: its nodes, the types of its values, their topological order.

The one part of `graph` that `engines` imports too.
"""
