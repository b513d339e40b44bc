"""The graph's own facts, which `graph` and `engines` both import: nodes, types of values, order of execution.

The one part of `graph` that `engines` imports too.
"""
