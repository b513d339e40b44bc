"""Inline SVG of rectangles, paths and texts; colours are classes of `card.css`, lengths are pixels."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup

_EMPTY = Markup("")
# The most characters of a label in a drawing, and of a title under the mouse.
_LABEL, _TITLE = 60, 200


def drawing(width: float, height: float, parts: Iterable[Markup], *, label: str) -> Markup:
    """Return an SVG of this size that shrinks with its cell; `label` says what it shows, for screen readers."""
    return Markup(
        '<svg class="ff-drawing" width="{w:.0f}" height="{h:.0f}" viewBox="0 0 {w:.0f} {h:.0f}" role="img"'
        ' aria-label="{label}">{inner}</svg>'
    ).format(w=width, h=height, label=label, inner=_EMPTY.join(parts))


def rect(
    x: float, y: float, width: float, height: float, kind: str, *, title: str = "", opacity: float = 1.0
) -> Markup:
    """Return a rectangle of a class, with a title that is shown under the mouse."""
    faded = Markup(' fill-opacity="{:.2f}"').format(opacity) if opacity < 1 else _EMPTY
    inner = Markup("<title>{}</title>").format(clipped(title, _TITLE)) if title else _EMPTY
    return Markup(
        '<rect class="{k}" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"{faded}>{inner}</rect>'
    ).format(k=kind, x=x, y=y, w=max(width, 0.5), h=height, faded=faded, inner=inner)


def boxes(kind: str, cells: Iterable[tuple[float, float, float, float]], *, opacity: float = 1.0) -> Markup:
    """Return many rectangles (x, y, width, height) of one class as one path, which is a tenth of their size."""
    path = "".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z" for x, y, w, h in cells)
    return Markup('<path class="{}" fill-opacity="{:.2f}" d="{}"/>').format(kind, opacity, path)


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "ff-line") -> Markup:
    """Return a straight line."""
    return Markup('<path class="{}" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>').format(kind, x1, y1, x2, y2)


def curve(x1: float, y1: float, x2: float, y2: float) -> Markup:
    """Return an edge from left to right, level at both ends."""
    middle = (x1 + x2) / 2
    return Markup(
        '<path class="ff-edge" d="M{:.1f} {:.1f}C{m:.1f} {:.1f} {m:.1f} {:.1f} {:.1f} {:.1f}"/>'
    ).format(x1, y1, y1, y2, x2, y2, m=middle)


def words(
    x: float, y: float, text: str, *, anchor: str = "start", kind: str = "ff-words", most: int = _LABEL
) -> Markup:
    """Return a text at its baseline; a long one ends in an ellipsis."""
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        kind, x, y, anchor, clipped(text, most)
    )


def clipped(text: str, most: int) -> str:
    """Return a text of at most some characters.

    >>> clipped("reshape", 7), clipped("reshape", 5)
    ('reshape', 'resh…')
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"
