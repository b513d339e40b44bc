"""Signatures and docstrings of functions that rows of tables make: an extension of griffe, which reads source alone."""

from __future__ import annotations

from typing import Any

import griffe


class Rows(griffe.Extension):
    """In modules that import `example`, functions are those of the imported module, with their docstrings."""

    def on_module(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Replace functions, and attributes that are functions once the module is imported."""
        if "example" not in mod.members:
            return
        made = griffe.inspect(mod.path)
        for name in [n for n in mod.members if not n.startswith("_") and n in made.members]:
            if made.members[name].kind is griffe.Kind.FUNCTION:
                mod.set_member(name, made.members[name])
