"""Light and dark pages, as the browser prefers (`prefers-color-scheme`), and as it changes while a page is open.

HTML has its colours from variables of a style sheet (`look.css`).  Figures are drawn on a canvas, which no style sheet
reaches: a script in the browser exchanges the colours of their models, and the scheduler does not learn of it.
"""

from __future__ import annotations

from bokeh.core.templates import FILE
from bokeh.document import Document
from bokeh.models import CustomJS

from dask_ferro.views.pages import look

_VARIABLES = " ".join(f"{look.variable(light)}: {dark};" for light, dark in look.DARK.items())
# Dask's own navigation bar is light, and on windows of some 900 pixels its second row covers our tabs.  Tooltips are
# dark on both pages, as Bokeh's blue names are not readable on white.
STYLE = f"""
:root {{ color-scheme: light dark; }}
.bk-Tooltip {{ color: {look.DARK[look.INK]}; background-color: {look.DARK[look.GRID]}; opacity: 1; }}
@media (min-width: 801px) and (max-width: 1100px) {{
  .navbar li {{ font-size: 15px; }}
  .navbar li a {{ padding: 11px 8px; }}
}}
@media (prefers-color-scheme: dark) {{
  :root {{ {_VARIABLES} --bokeh-icon-color: {look.DARK[look.FAINT]}; }}
  html, body {{ background: {look.DARK[look.PAPER]}; color: {look.DARK[look.INK]}; }}
  .navbar ul, .dropdown-content {{ background-color: {look.DARK[look.GRID]}; }}
  .navbar li a {{ color: {look.DARK[look.INK]}; }}
  #navbar-toggle-icon img, .jupyter-link img {{ filter: invert(1); }}
  .navbar li.active, .navbar li:hover {{ background-color: rgb(234 170 109 / 25%); }}
}}
"""
# Bokeh's own page, for panels without a navigation bar.
ALONE = FILE.environment.from_string(
    "{% extends base %}{% block preamble %}<style>" + STYLE + "</style>{% endblock %}"
)
# Colours are strings, {value: string} or palettes.  Without `sync`, nothing is sent to the scheduler.
_EXCHANGE = """
const undone = Object.fromEntries(Object.entries(dark).map(([from, to]) => [to, from]))
const preference = matchMedia("(prefers-color-scheme: dark)")
const exchanged = (color, table) => {
  if (typeof color == "string") return table[color.toLowerCase()]
  if (Array.isArray(color)) {
    const palette = color.map((one) => table[one] ?? one)
    return palette.some((one, i) => one != color[i]) ? palette : undefined
  }
  const value = table[color?.value]
  return value == null ? undefined : {...color, value}
}
const paint = () => {
  const table = preference.matches ? dark : undone
  for (const model of Bokeh.documents.flatMap((one) => [...one.all_models])) {
    const changes = {}
    for (const property of model) {
      if (property.is_unset || !/color$|^palette$/.test(property.attr)) continue
      const color = exchanged(property.get_value(), table)
      if (color != null) changes[property.attr] = color
    }
    model.setv(changes, {sync: false})
  }
}
paint()
preference.addEventListener("change", paint)
"""


def follow(document: Document) -> None:
    """Let the figures of a document be as light or dark as its browser prefers."""
    document.js_on_event("document_ready", CustomJS(args={"dark": look.DARK}, code=_EXCHANGE))
