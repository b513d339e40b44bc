"""The site is built with warnings as errors, and asks no other host for anything."""

from __future__ import annotations

import re
import sys

import pytest

from tests.pages import ROOT
from tests.programs import ran

pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'dask-ferro[docs]'")
pytest.importorskip("material", reason="needs mkdocs-material: pip install 'dask-ferro[docs]'")
_LOADED = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?:[^"]*)"')


def test_the_site_is_built_without_warnings(tmp_path):
    built = ran(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING -" not in built.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= 30
    for page in pages:
        assert _LOADED.findall(page.read_text(encoding="utf-8")) == [], page.name
    for source in sorted((ROOT / "docs" / "reference").glob("*.md")):
        # A name that griffe finds elsewhere, or not at all, has no example on its page.
        wanted = source.read_text(encoding="utf-8").count("\n::: ")
        page = (tmp_path / "site" / "reference" / f"{source.stem}.html").read_text(encoding="utf-8")
        assert page.count("Examples:") >= wanted, source.name
    reference = (tmp_path / "site" / "reference" / "functions.html").read_text(encoding="utf-8")
    for example in ("ft.matmul([[1, 2], [3, 4]], [1, 1]).compute()", "ft.exp([0.0, 1.0]).compute().round(3)"):
        assert example in re.sub(r"<[^>]*>", "", reference)
    cluster = (tmp_path / "site" / "reference" / "cluster.html").read_text(encoding="utf-8")
    assert "retire_before" in cluster


@pytest.mark.needs("make")
def test_make_builds_it_and_hides_no_warning():
    commands = ran(["make", "-n", "docs"], cwd=ROOT, check=True).stdout
    assert "mkdocs build --strict" in commands
    assert "--quiet" not in commands.partition("mkdocs")[2]  # strict counts only warnings that are shown
