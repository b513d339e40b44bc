"""Reverse-mode gradients, from a graph of tensors to a graph of tensors."""
