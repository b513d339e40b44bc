"""What every layer may have drawn: the registry of views, and displays that are updated in a notebook.

The drawings themselves are in `views`, the only place that writes HTML or text for a screen.
"""
