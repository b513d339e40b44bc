"""What a person calls and both `runtime` and `views` are needed for: the commands that `cli` gathers, one a module."""
