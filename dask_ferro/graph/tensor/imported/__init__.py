"""Loaded models as pure functions of inputs and named parameters: names, what is a parameter, and writing back."""
