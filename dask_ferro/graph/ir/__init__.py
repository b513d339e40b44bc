"""What every room may ask of a graph: its nodes, the types of its values, and their order.

The one part of `graph` that `engines` imports too.
"""
