"""Draw the pictures of the documentation: `python docs/drawings/draw.py` writes the SVG files beside this script.

Shapes have colours of medium lightness and texts are black on a white plate, so that a picture reads the same
in light and in dark mode.  Nothing but the standard library is needed.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
BLUE, ORANGE, GREEN, GREY, RED = "#8fb8de", "#f3b562", "#9ccc9c", "#d9dde2", "#e58f8f"
INK, SOFT = "#1b1f24", "#5b6570"


class Drawing:
    """An SVG picture, written part by part; sizes are in pixels."""

    def __init__(self, name: str, width: int, height: int, title: str) -> None:
        self.name, self.width, self.height, self.title = name, width, height, title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, text: str = "", fill: str = BLUE, size: int = 13
    ) -> None:
        """Draw a rectangle with lines of text in its middle."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{INK}" stroke-width="1"/>'
        )
        lines = text.split("\n") if text else []
        top = y + h / 2 - (len(lines) - 1) * (size + 3) / 2 + size * 0.36
        for i, line in enumerate(lines):
            self.text(x + w / 2, top + i * (size + 3), line, size, "middle")

    def frame(self, x: float, y: float, w: float, h: float, text: str) -> None:
        """Draw a dashed frame with a caption above its upper left corner."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="none" stroke="{SOFT}" '
            'stroke-width="1.2" stroke-dasharray="5 4"/>'
        )
        self.text(x + 2, y - 6, text, 12, "start", SOFT)

    def text(
        self, x: float, y: float, text: str, size: int = 13, anchor: str = "start", fill: str = INK
    ) -> None:
        """Write one line of text."""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
        )

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False, fill: str = INK
    ) -> None:
        """Draw a straight arrow."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{fill}" stroke-width="1.6" '
            f'marker-end="url(#head)"{dash}/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a thin line."""
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{SOFT}" stroke-width="1"/>')

    def save(self) -> None:
        """Write the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            'font-family="system-ui, sans-serif" role="img">'
            f"<title>{escape(self.title)}</title>"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
        )
        text = "\n".join([head, *self.parts, "</svg>\n"])
        (FOLDER / f"{self.name}.svg").write_text(text, encoding="utf-8")


def overview() -> None:
    d = Drawing("overview", 760, 300, "From a model or any Dask graph to the workers of a cluster")
    d.box(16, 30, 150, 48, "model.onnx", GREEN)
    d.box(16, 96, 150, 48, "tensor graph,\ngradients", GREEN)
    d.box(16, 200, 150, 48, "any Dask graph", GREY)
    d.box(216, 62, 150, 50, "bundles: as few\ntasks as pay", BLUE)
    for y in (54, 120):
        d.arrow(166, y, 214, 87)
    d.frame(416, 40, 150, 222, "Dask's scheduler")
    d.box(430, 60, 122, 50, "placement\nand stealing", ORANGE)
    d.box(430, 126, 122, 50, "elastic\ncontroller", ORANGE)
    d.box(430, 192, 122, 50, "record: pages,\nmetrics, traces", ORANGE)
    d.arrow(366, 87, 414, 87)
    d.arrow(166, 224, 414, 224)
    for i in range(3):
        d.box(626, 40 + 58 * i, 116, 42, f"worker {i + 1}\nONNX Runtime", BLUE, 12)
    d.box(626, 220, 116, 42, "batch system:\njobs", GREY, 12)
    d.arrow(566, 82, 624, 62)
    d.arrow(566, 92, 624, 118)
    d.arrow(566, 102, 624, 170)
    d.arrow(552, 156, 624, 236)
    d.text(684, 285, "starts and ends workers", 12, "middle", SOFT)
    d.text(291, 285, "ff.install: nothing in a program changes", 12, "middle", SOFT)
    d.save()


def bundles() -> None:
    d = Drawing("bundles", 760, 300, "Nodes of a model in bundles")
    d.text(16, 24, "The nodes of a model", 14)
    d.text(410, 24, "The same nodes as three Dask tasks", 14)
    for left in (16, 410):
        places = {
            "a": (left + 20, 70), "b": (left + 110, 70), "c": (left + 190, 70), "d": (left + 110, 190),
            "e": (left + 190, 190), "f": (left + 275, 130),
        }  # fmt: skip
        for one, other in ("ab", "ad", "bc", "de", "cf", "ef"):
            (x1, y1), (x2, y2) = places[one], places[other]
            d.arrow(x1 + 44, y1 + 16, x2 - 3, y2 + 16)
        for name, (x, y) in places.items():
            d.box(
                x, y, 42, 32, {"a": "Split", "f": "Add"}.get(name, "Conv"), BLUE if left < 100 else GREEN, 12
            )
    d.frame(424, 56, 230, 62, "bundle 1: worker 1")
    d.frame(516, 176, 140, 62, "bundle 2: worker 2")
    d.text(682, 122, "bundle 3", 12, "start", SOFT)
    d.text(16, 268, "Six tasks would cost 6 x 2.3 ms of CPU and 6 ms for each dependency", 12, "start", SOFT)
    d.text(
        16,
        286,
        "between two workers; branches are cut apart only where each is worth many times that.",
        12,
        "start",
        SOFT,
    )
    d.save()


def placement() -> None:
    d = Drawing(
        "placement", 760, 270, "A ready task goes to the worker on which it is projected to finish first"
    )
    d.box(16, 104, 110, 44, "ready task\n40 ms, input on A", ORANGE, 11)
    rows = (("A", 40, (70, 70, 70), 0), ("B", 120, (30,), 26), ("C", 200, (90, 60), 26))
    for name, y, queue, fetch in rows:
        d.text(196, y + 20, f"worker {name}", 13)
        x = 270.0
        for seconds in queue:
            d.box(x, y, 1.2 * seconds, 30, f"{seconds} ms", GREY, 11)
            x += 1.2 * seconds
        if fetch:
            d.box(x, y, 1.2 * fetch, 30, "", RED)
            x += 1.2 * fetch
        d.box(x, y, 48, 30, "task", ORANGE, 11)
        d.line(x + 48, y - 8, x + 48, y + 38)
        d.text(
            x + 56,
            y + 20,
            f"done after {sum(queue) + fetch + 40} ms",
            12,
            "start",
            SOFT if name != "B" else INK,
        )
    d.arrow(126, 126, 190, 134)
    d.text(
        270,
        256,
        "red: the input is fetched from A. B finishes first: the task goes there.",
        12,
        "start",
        SOFT,
    )
    d.save()


def stealing() -> None:
    d = Drawing("stealing", 760, 290, "A worker that will run dry takes tasks from the longest queue")
    d.text(16, 26, "before", 14)
    d.text(400, 26, "after", 14)
    for left, one, other in ((16, 6, 1), (400, 4, 3)):
        for y, name, count in ((50, "victim", one), (120, "thief", other)):
            d.text(left, y + 20, name, 13)
            for i in range(count):
                moved = (name == "victim" and left < 100 and i >= 4) or (
                    name == "thief" and left > 100 and i >= 1
                )
                label = f"{i + 1}" if name == "victim" else ("a", "5", "6")[i]
                d.box(left + 60 + 46 * i, y, 42, 30, label, ORANGE if moved else BLUE, 12)
    d.line(16, 176, 744, 176)
    for x, who in ((120, "thief"), (370, "scheduler"), (620, "victim")):
        d.text(x, 198, who, 13, "middle")
    d.text(300, 236, "projects: the thief runs dry soon", 12, "end", SOFT)
    d.text(495, 222, "return 5 and 6 if not started", 12, "middle", SOFT)
    d.arrow(382, 230, 608, 230)
    d.text(495, 258, "confirmed", 12, "middle", SOFT)
    d.arrow(608, 266, 382, 266)
    d.text(245, 258, "tasks 5 and 6", 12, "middle", SOFT)
    d.arrow(356, 266, 130, 266)
    d.save()


def leaving() -> None:
    d = Drawing("leaving", 760, 250, "The steps of a worker that leaves without losing results")
    steps = (
        ("warning", "walltime, scancel,\npreemption, idle", GREY),
        ("no new tasks", "waiting ones\ngo elsewhere", BLUE),
        ("running tasks", "end here", BLUE),
        ("results move", "those that only\nit holds", ORANGE),
        ("verified", "all of them\nhave arrived", GREEN),
        ("gone", "no task counts\nas failed", GREY),
    )
    for i, (name, what, fill) in enumerate(steps):
        x = 14 + 125 * i
        d.box(x, 50, 104, 40, name, fill, 13)
        for j, line in enumerate(what.split("\n")):
            d.text(x + 52, 112 + 16 * j, line, 12, "middle", SOFT)
        if i:
            d.arrow(x - 21, 70, x - 3, 70)
    d.arrow(441, 150, 441, 186, dashed=True)
    d.box(340, 190, 202, 36, "no room elsewhere: it stays", RED, 12)
    d.text(16, 26, "A worker leaves", 14)
    d.save()


if __name__ == "__main__":
    for draw in (overview, bundles, placement, stealing, leaving):
        draw()
