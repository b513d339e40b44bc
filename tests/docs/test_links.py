"""Links of the documentation and of the README: files and headings that exist, and addresses that are well formed."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ET
from urllib.parse import urlsplit

from markdown.extensions.toc import slugify

from tests.each import each
from tests.pages import ROOT, prose

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
DRAWN = ("overview", "bundles", "placement", "stealing", "leaving")
# A page with a larger picture is slow to open.
MOST_BYTES = 80_000
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def _headings(page):
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    given = re.findall(r"\{ *#([\w-]+) *\}", text)
    return {*given, *(slugify(re.sub(r"[`*]|\{.*\}", "", title).strip(), "-") for title in titles)}


def test_links_lead_somewhere():
    def leads_somewhere(link):
        page, target = link
        address = urlsplit(target)
        if address.scheme:
            assert address.scheme in ("http", "https", "mailto")
            assert address.netloc or address.path
            return
        file = (page.parent / address.path).resolve() if address.path else page
        assert file.is_file()
        if address.fragment and "reference" not in file.parts:  # headings of the reference are generated
            assert address.fragment in _headings(file)

    links = [(page, target) for page in PAGES for target in _LINK.findall(prose(page))]
    each(links, leads_somewhere, lambda link: f"{link[0].relative_to(ROOT)}: {link[1]}")


def test_pictures_are_drawings_that_parse():
    drawings = sorted((ROOT / "docs" / "drawings").glob("*.svg"))
    assert len(drawings) >= 5
    for drawing in drawings:
        assert ET.parse(drawing).getroot().find("{http://www.w3.org/2000/svg}title").text
        assert any(drawing.name in page.read_text(encoding="utf-8") for page in PAGES), drawing.name


def test_screenshots_are_small_and_shown():
    pictures = sorted((ROOT / "docs").rglob("*.png"))
    assert len(pictures) >= 4
    for picture in pictures:
        assert picture.stat().st_size < MOST_BYTES, picture.name
        assert any(picture.name in page.read_text(encoding="utf-8") for page in PAGES), picture.name


def test_pictures_are_as_the_script_draws_them(tmp_path, monkeypatch):
    script = runpy.run_path(str(ROOT / "docs" / "drawings" / "draw.py"))
    monkeypatch.setitem(script["Drawing"].save.__globals__, "FOLDER", tmp_path)
    for name in DRAWN:
        script[name]()
        drawn = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == (ROOT / "docs" / "drawings" / f"{name}.svg").read_text(encoding="utf-8"), name
    assert sorted(path.stem for path in (ROOT / "docs" / "drawings").glob("*.svg")) == sorted(DRAWN)


def test_pages_load_nothing_from_elsewhere():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in config
    for page in PAGES:
        assert re.findall(r"!\[[^\]]*\]\(https?:", prose(page)) == []
