"""Gradient rules of operators, a module a family."""
