"""The project's rules: import layers, the cost of imports, the contents of the package, words banned from its files."""

import ast
import doctest
import importlib
import importlib.metadata
import json
import os
import pkgutil
import re
import sys
import tomllib
from pathlib import Path

import dask.config
import pytest
import yaml

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro import config
from tests.each import each
from tests.house.names import poor_names
from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BIN = Path(sys.executable).parent

HEAVY = ("dask", "distributed", "onnx", "onnx_ir", "onnxruntime", "numpy", "rich", "click")


def _python(code: str, **environment: str) -> str:
    done = ran([sys.executable, "-c", code], check=True, env=environment, cwd=ROOT)
    return done.stdout


def _loaded_by(statement: str) -> set[str]:
    return set(json.loads(_python(f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))")))


def _shipped() -> list[Path]:
    """Return the text files of the project, tracked by git or not ignored."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = ran(words, cwd=ROOT, check=True).stdout
    binary = {".onnx", ".npy", ".npz", ".data", ".gz", ".png", ".pb"}
    paths = (ROOT / name for name in listed.split("\0") if name)
    return sorted(p for p in paths if p.is_file() and p.suffix not in binary)


# ---- floors and imports -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        pytest.param("import dask_ferro", set(), id="the package loads nothing heavy"),
        pytest.param("import dask_ferro; dir(dask_ferro)", set(), id="neither does listing its names"),
        pytest.param("from dask_ferro import ModelError", set(), id="nor do its errors"),
        pytest.param("import dask_ferro.cli", {"click"},
            id="the command line loads click alone, for `dask` loads it always"),
        pytest.param("import dask_ferro.graph.model.load", {"numpy", "onnx", "onnx_ir"},
            id="graphs load neither dask nor an engine"),
        pytest.param("import dask_ferro.lower.model.collection", {"numpy", "onnx", "onnx_ir", "onnxruntime", "dask"},
            id="the collection does without distributed"),
        pytest.param("import dask_ferro.scheduler.preload", {"click", "dask", "distributed", "numpy"},
            id="a scheduler with the plugin loads neither models nor engines"),
        pytest.param("import dask_ferro.scheduler.worker_plugin, dask_ferro.scheduler.calibration",
            {"click", "dask", "distributed", "numpy"}, id="nor does a worker that joins, while others have tasks"),
    ],
)  # fmt: skip
def test_imports_are_lean(statement, allowed):
    assert _loaded_by(statement) & set(HEAVY) <= allowed


def test_a_scheduler_without_a_dashboard_loads_no_bokeh():
    options = 'n_workers=0, processes=False, dashboard_address=":0", scheduler_kwargs={"dashboard": False}'
    loaded = _loaded_by(f"import dask_ferro as ff; ff.LocalCluster({options}).close()")
    assert "dask_ferro.views.pages" in loaded
    assert "bokeh" not in loaded


def test_no_module_is_named_in_words_from_a_floor_below():
    """The linter sees no `import_module("dask_ferro.views")`, and no other way to look a module up by its name."""
    layers = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    height = {room: -n for n, rooms in enumerate(layers) for room in re.findall(r"\w+", rooms)}
    named = []
    for path in (ROOT / "dask_ferro").glob("*/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if name.startswith("dask_ferro.") and name.split(".")[1] in height:
                named.append((path.relative_to(ROOT / "dask_ferro").parts[0], name))
    assert named
    assert [(room, name) for room, name in named if height[room] < height[name.split(".")[1]]] == []


def test_every_public_name_is_there():
    missing = [name for name in ff.__all__ if not hasattr(ff, name)]
    assert missing == []
    assert set(ff.__all__) == set(dir(ff))


# ---- what is shipped --------------------------------------------------------------------------------------


def test_the_version_is_one():
    assert ff.__version__ == PROJECT["project"]["version"] == importlib.metadata.version("dask-ferro")


def test_examples_in_docstrings_hold():
    def holds(name):
        assert doctest.testmod(importlib.import_module(name)).failed == 0

    each([module.name for module in pkgutil.walk_packages(ff.__path__, "dask_ferro.")], holds)


def test_extras_that_messages_name_exist():
    extras = set(PROJECT["project"]["optional-dependencies"])
    pattern = re.compile(r"dask[-_]ferro\[([\w, ]+)\]|'\.\[([\w, ]+)\]'")
    paths = (*ROOT.glob("dask_ferro/**/*.py"), ROOT / "README.md", ROOT / "Makefile")
    groups = {"".join(group) for path in paths for group in pattern.findall(path.read_text(encoding="utf-8"))}
    named = {extra for group in groups for extra in re.split(r"[, ]+", group)}
    assert named <= extras, f"no such extra: {named - extras}"


@pytest.mark.parametrize("program", [("dask-ferro",), ("dask", "ferro")], ids=" ".join)
def test_the_command_line_is_installed(program):
    done = ran([BIN / program[0], *program[1:], "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert {"inspect", "top"} <= set(re.findall(r"^  (\w+) ", done.stdout, re.MULTILINE))


# ---- configuration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("cache.bytes", "2 GiB", 2 * 2**30),
        ("cache.bytes", 1024, 1024),
        ("bundle.workers", "auto", None),
        ("bundle.workers", 3, 3),
        ("onnxruntime.prepack", False, False),
    ],
)
def test_values_are_read_with_their_types(key, value, wanted):
    with dask.config.set({f"ferro.{key}": value}):
        assert config.value(key) == wanted


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cache.bytes", "lots", "DASK_FERRO__CACHE__BYTES"),
        ("cache.bytes", -1, "at least 0"),
        ("cache.bytes", None, "got None"),
        ("bundle.workers", 0, "at least 1"),
        ("bundle.workers", True, "got True"),
        ("bundle.workers", "many", "'many'"),
        ("onnxruntime.prepack", "maybe", "DASK_FERRO__ONNXRUNTIME__PREPACK"),
    ],
)
def test_a_wrong_value_names_its_key(key, value, said):
    with dask.config.set({f"ferro.{key}": value}), pytest.raises(ff.InputError) as caught:
        config.value(key)
    assert f"ferro.{key}" in str(caught.value)
    assert said in str(caught.value)


# ---- the files --------------------------------------------------------------------------------------------


@pytest.mark.needs("git")
def test_files_hold_no_leftovers():
    leftovers = re.compile(
        "|".join([r"\bTO" + "DO\\b", r"\bFIX" + "ME\\b", r"\bXX" + "X\\b", "/wo" + "rk/", "^<{7} ", "^>{7} "])
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _shipped()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if leftovers.search(line)
    ]
    assert found == []


def test_files_that_the_makefile_names_exist():
    named = re.findall(r"[\w/]+\.py\b", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert [name for name in named if not any((ROOT / room / name).exists() for room in (".", "tests"))] == []


@pytest.mark.needs("make")
def test_make_help_lists_every_target_that_is_no_file():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())
    listed = ran(["make", "help"], check=True, cwd=ROOT).stdout
    assert set(re.findall(r"make ([\w-]+)", listed)) == phony


# ---- what a project's visitors look for --------------------------------------------------------------------

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
SETTINGS = (WORKFLOW, ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff", ROOT / "mkdocs.yml")


def _settings(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_files_of_settings_parse():
    each(
        SETTINGS,
        lambda path: isinstance(_settings(path), dict) or pytest.fail("no mapping"),
        lambda path: path.name,
    )


def test_targets_that_are_named_exist():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[
        1
    ].split()
    pages = (ROOT / ".github" / "pull_request_template.md", ROOT / "CONTRIBUTING.md", ROOT / "README.md")
    texts = [
        path.read_text(encoding="utf-8") for path in (WORKFLOW, ROOT / ".pre-commit-config.yaml", *pages)
    ]
    named = {name for text in texts for name in re.findall(r"(?:run: |`|^)make ([\w-]+)", text, re.MULTILINE)}
    assert {"check", "quick", "docs"} <= named <= set(phony)


def test_the_workflow_has_the_supported_pythons_and_systems():
    jobs = _settings(WORKFLOW)["jobs"]
    lowest, below = re.search(r">=3\.(\d+),<3\.(\d+)", PROJECT["project"]["requires-python"]).groups()
    pythons = [f"3.{minor}" for minor in range(int(lowest), int(below))]
    assert jobs["test"]["strategy"]["matrix"]["python"] == pythons
    assert jobs["quick"]["strategy"]["matrix"]["os"] == ["macos-latest", "windows-latest"]
    scripts = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {name for script in scripts for name in re.findall(r"^\.\S+$", script)} == {".ci/run"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_local_hooks_are_modules_of_the_project():
    repositories = _settings(ROOT / ".pre-commit-config.yaml")["repos"]
    hooks = [
        hook for repository in repositories if repository["repo"] == "local" for hook in repository["hooks"]
    ]
    (entry,) = (hook["entry"] for hook in hooks)
    assert (ROOT / (entry.split()[-1].replace(".", "/") + ".py")).is_file()


def test_the_citation_names_this_release():
    citation = _settings(ROOT / "CITATION.cff")
    assert (citation["version"], citation["license"]) == (ff.__version__, PROJECT["project"]["license"])
    assert re.search(
        rf"^## \[{re.escape(ff.__version__)}\]",
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )


# ---- make -------------------------------------------------------------------------------------------------


@pytest.mark.needs("make")
def test_make_refuses_an_old_python_in_one_line(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = ran(["make", "demo", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"], cwd=ROOT)
    assert done.returncode != 0
    assert "needs Python 3.11" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.needs("dot", "chromium", "slurm", "git", "c++", "make")  # it installs what is missing
@pytest.mark.parametrize(
    ("check", "test", "status"),
    [
        pytest.param(3, 0, 3, id="a failed check fails"),
        pytest.param(0, 2, 2, id="failed tests fail"),
    ],
)
def test_continuous_integration_runs_both_and_ends_in_pytests_line(tmp_path, check, test, status):
    closing = "===== 3 passed in 1.20s ====="
    make = f'#!/bin/sh\ncase $1 in check) exit {check};; test) echo "{closing}"; echo "make: ***"; exit {test};; esac\n'
    for name, script in {"make": make, "dot": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    done = ran([ROOT / ".ci" / "run"], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == closing


def test_the_tensors_functions_are_public_by_their_names():
    from dask_ferro.graph.tensor import namespace

    assert {*namespace.__all__} < {*ft.__all__}
    assert all(getattr(ft, name) is getattr(namespace, name) for name in namespace.__all__)


@pytest.mark.parametrize(
    ("words", "status"), [("--help", 0), ("cluster --help", 0), ("cluster --config slurm-cpu --dry-run", 2)]
)
def test_a_missing_extra_is_named_when_it_is_needed_and_not_before(words, status):
    program = (
        "import sys; sys.modules['dask_jobqueue'] = None\n"
        "from dask_ferro import *\n"
        "from dask_ferro.cli import main\n"
        f"main({words.split()})"
    )
    done = ran([sys.executable, "-c", program])
    remedy = "ff.SLURMCluster needs dask-jobqueue, which is not installed: pip install 'dask-ferro[slurm]'"
    assert (done.returncode, done.stderr) == (status, f"dask ferro: {remedy}\n" if status else "")


def test_a_name_that_is_a_participle_a_preposition_or_a_pronoun_is_reported() -> None:
    text = """
class Held: ...
class SentReply: ...
def find(): ...
def __getattr__(name): ...
def _of(): ...
read, _MOST = 1, 2
if read:
    MARKED: int = 1
"""
    found = [*poor_names({ROOT / "named.py": ast.parse(text), ROOT / "embed.py": ast.parse("any = 1")}, ROOT)]
    assert [where.partition(": ")[0] for where in found] == [
        "named.py",
        *(f"named.py:{n}" for n in (2, 6, 7, 9)),
    ]
    assert found[2] == "named.py:6: _of: a preposition alone: name a function with a verb"
