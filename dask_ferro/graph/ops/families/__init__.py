"""The facts of operators, a module a family; each module ends with its `TABLE`, one row an operator."""
