"""Values as HTML for a cell of a notebook: a card with facts, drawings and tables.

    drawn       the kind of a value -> its function
    card        facts, figures and tables -> HTML, by `card.html` and `card.css`
    svg         rectangles, lines and texts -> one inline drawing
    model, traces, schedules, plans, clusters, check, bars    a value -> its card

Text is escaped, as names come from files and from other users.  A card does not grow with its value: a graph of 100,000
tasks is drawn as its profile, a table shows its first rows and counts the others.  Colours follow the page: text and
lines are the page's own (`currentColor`), JupyterLab's theme sets them where it is there, and the browser's preference
for dark pages elsewhere.  Without its style (an untrusted notebook) a card shows the value's text.
"""
