"""An extension of griffe: the keywords that `ff.SLURMCluster` puts into its docstring when it is imported."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import griffe

from dask_ferro.runtime.jobs.keywords import PLACE, ClusterKeywords, paragraphs


class Keywords(griffe.Extension):
    """Replace the place of the keywords, in each docstring that has it."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Write the paragraphs of the keywords into the docstring of a class."""
        place = PLACE.strip()
        if cls.docstring is not None and place in cls.docstring.value:
            cls.docstring.value = cls.docstring.value.replace(
                place, dedent(paragraphs(ClusterKeywords)).strip()
            )
