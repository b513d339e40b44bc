"""Array kernels of operators, a module a family."""
