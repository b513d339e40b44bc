"""Every code block of the documentation runs, or has a title that says what it needs.

The Python blocks of a page and its hidden tests run in order in one namespace, in a temporary folder with the models of
the examples.  Commands of `dask ferro` in other blocks are checked: they exist, and have the options.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import dask
import pytest
from distributed import Client

from dask_ferro.cli import main
from tests.each import each
from tests.pages import ROOT, Block, blocks

PAGES = sorted((ROOT / "docs").rglob("*.md"))
RUN = [page for page in PAGES if any(block.runs for block in blocks(page))]
# Blocks that need what these tests do not have: SLURM, PBS, Ray, transformers, a bucket, a client.  Three of them, in
# the tutorial of SLURM, run in tests/on_slurm/test_tutorial.py.  The number goes down, or up with a reason.
MOST_NOT_RUN = 13


def _name(page: Path) -> str:
    return page.relative_to(ROOT / "docs").as_posix()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the trained models, which is the current one; what a page configures is undone."""
    for model in (ROOT / "examples" / "models").glob("digits_*.onnx"):
        shutil.copy(model, tmp_path)
    monkeypatch.chdir(tmp_path)
    with dask.config.set({"ferro.bundle.costs": None}):
        yield tmp_path


@pytest.mark.parametrize("page", RUN, ids=_name)
def test_the_blocks_of_a_page_run(page, folder):
    namespace = {"__name__": "page"}
    for block in blocks(page):
        if block.runs:
            # Lines of an error are those of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            exec(code, namespace)
    clients = [value for value in namespace.values() if isinstance(value, Client)]
    assert [client.status for client in clients if client.status != "closed"] == [], (
        "a page closes its clients"
    )


def test_few_blocks_are_not_run():
    python = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    assert len([block for block in python if not block.runs]) <= MOST_NOT_RUN
    assert len([block for block in python if block.runs]) >= 30


def test_readers_see_no_asserts():
    shown = {
        _name(page)
        for page in PAGES
        for block in blocks(page)
        if block.is_shown
        and block.language == "python"
        and re.search(r"^ *assert ", block.text, re.MULTILINE)
    }
    assert shown == set(), "asserts are in comments `<!-- test`"


def test_a_block_that_is_not_run_parses():
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python" and not block.runs:
                compile(block.text, str(page), "exec")


def _commands(block: Block) -> list[list[str]]:
    """Return the words of each `dask ferro` command of a block, without comments."""
    if block.language not in ("console", "sh", ""):
        return []
    lines = re.sub(r"\\\n", " ", block.text).splitlines()
    found = []
    for line in lines:
        at = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*dask[ -]ferro (.*)", line.strip())
        if at:
            found.append(shlex.split(at[1].partition("  #")[0]))
    return found


def test_commands_exist_with_their_options():
    pages = [*PAGES, ROOT / "README.md"]
    each([words for page in pages for block in blocks(page) for words in _commands(block)], _check, " ".join)


def _check(words: list[str]) -> None:
    command: click.Command = main
    for word in words:
        if word in ("|", ">", "&"):
            break
        options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        if word.startswith("-"):
            assert word.partition("=")[0] in options | {"-h", "--help"}, f"{command.name} has no {word}"
        elif isinstance(command, click.Group):
            command = command.get_command(click.Context(command), word) or command
    assert command is not main or words[0].startswith("-"), "no command"
