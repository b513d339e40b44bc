"""The inputs of a model: their signature, the checks of what is given, and how it reaches the tasks."""
