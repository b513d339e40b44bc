"""Every code block of the documentation runs, or has a title that says what it needs.

The Python blocks of a page and its hidden tests run in order in one namespace, in a temporary folder with the models
that the page copies.  The extras and packages that a page installs suffice for its code.  Commands of `dask ferro` in
other blocks are checked: they exist, and have the options.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

import click
import dask
import pytest
from distributed import Client
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dask_ferro.cli import main
from tests.each import each
from tests.pages import ROOT, Block, blocks

PAGES = sorted((ROOT / "docs").rglob("*.md"))
RUN = [page for page in PAGES if any(block.runs for block in blocks(page))]
# Blocks that need what these tests do not have: SLURM, PBS, Ray, transformers, a bucket, a client.  Three of them, in
# the tutorial of SLURM, run in tests/on_slurm/test_tutorial.py.  The number goes down, or up with a reason.
MOST_NOT_RUN = 13
INSTALLED = {canonicalize_name(found.name) for found in metadata.distributions()}


def _name(page: Path) -> str:
    return page.relative_to(ROOT / "docs").as_posix()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, which is the current one; what a page configures is undone."""
    monkeypatch.chdir(tmp_path)
    with dask.config.set({"ferro.bundle.costs": None}):
        yield tmp_path


@pytest.mark.parametrize("page", RUN, ids=_name)
def test_the_blocks_of_a_page_run(page, folder):
    namespace = {"__name__": "page"}
    for block in blocks(page):
        if block.language == "sh":
            for models in re.findall(r"^cp (examples/models/\S+) \.", block.text, re.MULTILINE):
                for model in ROOT.glob(models):
                    shutil.copy(model, folder)
        if block.runs:
            # Lines of an error are those of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            exec(code, namespace)
    clients = [value for value in namespace.values() if isinstance(value, Client)]
    assert [client.status for client in clients if client.status != "closed"] == [], (
        "a page closes its clients"
    )


# Packages that a page's code uses without an import of its own, by what its text has.
USED = {
    "aiohttp": r"https://[^\n]*\.onnx",
    "dask-jobqueue": r"ff\.SLURMCluster",
    "pandas": r"dask\.dataframe|as_frame=",
    "prometheus-client": r"/metrics",
    "pyarrow": r"dask\.dataframe|\.parquet|\.csv",
    "s3fs": r"s3://",
    "zarr": r"\.zarr",
}


def test_the_packages_that_a_page_installs_suffice():
    by_module = metadata.packages_distributions() | {"dask_ferro": ["dask-ferro"]}

    def is_enough(page):
        python = [block for block in blocks(page) if block.language == "python"]
        used = {name for name, sign in USED.items() for block in python if re.search(sign, block.text)}
        for block in python:
            # The title of a block that is not run may name a package.
            modules = {name for name in _imports(block) if name not in block.title.lower()}
            used |= {canonicalize_name(by_module[name][0]) for name in modules}
        assert used - _packages(_requirements(page)) == set()

    each(PAGES, is_enough, _name)


def _imports(block: Block) -> set[str]:
    """Return the modules that a block imports, without those of Python."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def _requirements(page: Path) -> list[str]:
    """Return what the commands of a page install: at least the library."""
    commands = "".join(block.text for block in blocks(page) if block.language in ("console", "sh"))
    words = shlex.split(" ".join([".", *re.findall(r"pip install ([^#&\n]*)", commands)]))
    return [re.sub(r"^\.", "dask-ferro", word) for word in words if not word.startswith("-")]


def _packages(requirements: list[str]) -> set[str]:
    """Return the packages that pip installs for some requirements."""
    pairs: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        text, parent_extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": parent_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in pairs and name in INSTALLED:
                waiting += [(needed, extra) for needed in metadata.requires(name) or ()]
            pairs.add((name, extra))
    return {name for name, _ in pairs}


def test_a_page_runs_as_a_script():
    # Worker processes import the script, which would start a cluster in each of them.
    clusters = [
        (_name(page), cluster)
        for page in PAGES
        for block in blocks(page)
        if block.runs
        for cluster in re.findall(r"LocalCluster\([^)]*", block.text)
    ]
    assert [found for found in clusters if not re.search(r"processes=False|\*\*", found[1])] == []


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
