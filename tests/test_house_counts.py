"""The counters of `python -m tests.house` on small sources with known places, and the limits of the counts."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.house import counts, imports, limits
from tests.house.__main__ import judged, main
from tests.house.source import TOP, package

LONG = "def long():\n" + "    x = 1\n" * 40
DOCUMENTED = "def short():\n" + '    """What it does.\n' + "    more\n" * 40 + '    """\n    return 1\n'


def placed(counter, texts):
    """Return the places that a counter finds in sources, given by module name, as "module:line"."""
    sources = {f"dask_ferro/{name}.py": dedent(text) for name, text in texts.items()}
    return sorted(f"{p.module.removeprefix('dask_ferro.')}:{p.line}" for p in counter(package(sources)))


IMPORTS = [
    pytest.param({"a/x": "import dask_ferro.a.y", "a/y": "from dask_ferro.a import x"}, True, id="at the head"),
    pytest.param({"a/x": "from dask_ferro.a.y import f", "a/y": "from . import x"}, True, id="relative"),
    pytest.param({"a/x": "from .y import f", "a/y": "from ..a.x import g"}, True, id="relative, from a parent"),
    pytest.param({"a/x": "def f():\n    from dask_ferro.a.y import g", "a/y": "import dask_ferro.a.x"}, True,
        id="in a function"),
    pytest.param({"a/x": "if TYPE_CHECKING:\n    import dask_ferro.a.y", "a/y": "import dask_ferro.a.x"}, True,
        id="for a type"),
    pytest.param({"a/x": "import_module('dask_ferro.a.y').f()", "a/y": "import dask_ferro.a.x"}, True,
        id="by import_module"),
    pytest.param({"a/x": "importlib.import_module('dask_ferro.a.y')", "a/y": "import dask_ferro.a.x"}, True,
        id="of importlib"),
    pytest.param({"a/x": "load('dask_ferro.a.y')", "a/y": "import dask_ferro.a.x"}, False,
        id="a name in words is no import"),
    pytest.param({"a/x": "import dask_ferro.a.y", "a/y": "import os"}, False, id="one way"),
    pytest.param({"a/__init__": "from dask_ferro.a.x import f", "a/x": "from dask_ferro.b import y",
        "b/y": "from dask_ferro.a import x"}, True, id="of a module in a package, which is not the package"),
    pytest.param({"a/__init__": "from dask_ferro.a.x import f", "a/x": "import dask_ferro.a.y", "a/y": "import os"},
        False, id="that a package's __init__ runs first does not count"),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "found"), IMPORTS)
def test_what_makes_an_import_circle(texts, found):
    assert bool(placed(imports.in_circles, texts)) is found


def test_circles_are_told_apart_and_a_module_on_the_way_to_one_is_in_none():
    texts = {
        "dask_ferro/a/one.py": "import dask_ferro.a.two",
        "dask_ferro/a/two.py": "import dask_ferro.a.three",
        "dask_ferro/a/three.py": "import dask_ferro.a.one, dask_ferro.b.left",
        "dask_ferro/b/left.py": "import dask_ferro.b.right",
        "dask_ferro/b/right.py": "import dask_ferro.b.left, dask_ferro.b.end",
        "dask_ferro/b/end.py": "import os",
        "dask_ferro/b/begin.py": "import dask_ferro.b.left",
    }
    assert imports.circles(package(texts)) == [
        ["dask_ferro.a.one", "dask_ferro.a.three", "dask_ferro.a.two"],
        ["dask_ferro.b.left", "dask_ferro.b.right"],
    ]


MINE = "class Mine:\n    def __init__(self):\n        self._mine = 1\n"
COUNTED = [
    (counts.upstream_names, {"a/x": "scheduler._reschedule('x')"}, ["a.x:1"], "an attribute that nobody defines"),
    (counts.upstream_names, {"a/x": "class C(Cluster):\n    def f(self):\n        return self._adaptive"}, ["a.x:3"],
     "inherited from upstream"),
    (counts.upstream_names, {"a/x": "getattr(scheduler, '_reschedule', None)"}, ["a.x:1"], "by getattr"),
    (counts.upstream_names, {"a/x": "scheduler._reschedule = None"}, ["a.x:1"], "set"),
    (counts.upstream_names, {"a/upstream_x": "scheduler._reschedule()", "a/seams": "scheduler._reschedule()"}, [],
     "where they belong"),
    (counts.upstream_names, {"a/x": "from dask._task_spec import Task, List"}, ["a.x:1", "a.x:1"], "a private module"),
    (counts.upstream_names, {"a/x": "import distributed._version"}, ["a.x:1"], "a private module by import"),
    (counts.upstream_names, {"a/x": "from distributed.stealing import _CONFIRM"}, ["a.x:1"], "a private name"),
    (counts.upstream_names, {"a/x": "row._replace(n=1), os._exit(1), x.__class__, _"}, [], "public underscores"),
    (counts.upstream_names, {"a/x": MINE, "a/y": "other._mine"}, [], "a name of ours"),
    (counts.upstream_names, {"a/x": "class C:\n    _shared = 1\n    _typed: int\n    def _f(self): ...",
                             "a/y": "C._shared, C._typed, C()._f()"}, [], "a name of a class body"),
    (counts.upstream_names, {"a/x": "class C:\n    __slots__ = ('_slot',)", "a/y": "c._slot"}, [], "a slot of ours"),
    (counts.upstream_names, {"a/x": "_limit = 1", "a/y": "x._limit"}, [], "a module's value"),
    (counts.reached_through, {"a/x": MINE, "a/y": "other._mine"}, ["a.y:1"], "another module's"),
    (counts.reached_through, {"a/x": MINE, "a/y": "self._mine; cls._mine"}, [], "inherited from ours"),
    (counts.reached_through, {"a/x": MINE + "other._mine"}, [], "of the same module"),
    (counts.reached_through, {"a/x": MINE, "a/y": "self.run._mine"}, ["a.y:1"], "of something of self's"),
    (counts.reached_through, {"a/x": MINE, "a/y": "getattr(other, '_mine')"}, ["a.y:1"], "by getattr"),
    (counts.reached_through, {"a/x": MINE, "a/y": "getattr(self, '_mine')"}, [], "by getattr of self"),
    (counts.reached_through, {"a/x": MINE, "a/y": "scheduler._reschedule()"}, [], "upstream's"),
    (counts.reached_through, {"a/x": "def _f(): ...", "a/y": "from dask_ferro.a.x import _f, g"}, ["a.y:1"],
     "imported"),
    (counts.reached_through, {"a/x": "def _f(): ...", "a/y": "from .x import _f"}, ["a.y:1"], "a relative import"),
    (counts.reached_through, {"a/x": "from dask._task_spec import Task"}, [], "imported of upstream's"),
    (counts.upstream_names, {"a/x": "def _f(): ...", "a/y": "from dask_ferro.a.x import _f"}, [], "imported of ours"),
    (counts.classes_twice, {"a/x": "class Step: ...", "b/y": "class Step: ...\nclass Other: ..."}, ["a.x:1", "b.y:1"],
     "in two modules"),
    (counts.classes_twice, {"a/x": "class Step: ...", "b/y": "class _Step: ..."}, ["a.x:1", "b.y:1"],
     "with an underscore"),
    (counts.classes_twice, {"a/x": "if new:\n    class Step: ...\nelse:\n    class Step: ..."}, ["a.x:2", "a.x:4"],
     "twice in one module"),
    (counts.untyped, {"a/x": "def f(x: Any, *y: list[Any]) -> dict[str, Any]: ..."}, ["a.x:1"] * 3, "in a function"),
    (counts.untyped, {"a/x": "x: typing.Any = 1\nclass C:\n    y: Any"}, ["a.x:1", "a.x:3"], "of values and fields"),
    (counts.untyped, {"a/x": "async def f(**x: Any): ..."}, ["a.x:1"], "in a coroutine"),
    (counts.untyped, {"a/x": "from typing import Any\ny = cast(Any, x)\ndef f(x: int): ..."}, [], "elsewhere"),
    (counts.comments, {"a/x": "# one\nx = 1  # beside code\ny = '# text'\n    # two\n"}, ["a.x:1", "a.x:4"],
     "whole lines alone"),
    (counts.comments, {"a/x": 'x = """\n# in a text\n"""'}, [], "in a text"),
    (counts.nested_comprehensions, {"a/x": "[[y for y in x] for x in z]"}, ["a.x:1"], "one in another"),
    (counts.nested_comprehensions, {"a/x": "{y for x in z for y in x}"}, ["a.x:1"], "two loops"),
    (counts.nested_comprehensions, {"a/x": "{k: sum(y for y in x) for k, x in z}"}, ["a.x:1"], "a generator in a dict"),
    (counts.nested_comprehensions, {"a/x": "(x for x in [y for y in z])"}, ["a.x:1"], "in what is looped over"),
    (counts.nested_comprehensions, {"a/x": "[y for y in x]; f(z for z in x)"}, [], "one beside another"),
    (counts.long_functions, {"a/x": LONG}, ["a.x:1"], "of 41 lines"),
    (counts.long_functions, {"a/x": LONG.replace("def", "async def")}, ["a.x:1"], "coroutines too"),
    (counts.long_functions, {"a/x": LONG.removesuffix("    x = 1\n")}, [], "of 40"),
    (counts.long_functions, {"a/x": DOCUMENTED}, [], "a long docstring is none"),
    (counts.long_modules, {"a/x": "x = 1\n" * 501, "a/y": "x = 1\n" * 500}, ["a.x:1"], "of 501 lines"),
    (counts.modules, {"a/x": "", "a/__init__": "", "__init__": "", "top": ""}, ["a.x:1", "top:1"], "all but folders"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("counter", "texts", "found"),
    [pytest.param(*row[:3], id=f"{row[0].__name__}: {row[3]}") for row in COUNTED],
)
def test_a_counter_finds_its_places_and_no_others(counter, texts, found):
    assert placed(counter, texts) == found


def test_rooms_are_the_folders_right_below_the_package():
    found = package({"dask_ferro/__init__.py": "", "dask_ferro/lock.py": "", "dask_ferro/a/__init__.py": "",
                     "dask_ferro/a/b/c.py": ""})  # fmt: skip
    rooms = {"dask_ferro": TOP, "dask_ferro.lock": TOP, "dask_ferro.a": "a", "dask_ferro.a.b.c": "a"}
    assert {m.name: m.room for m in found.modules} == rooms


def test_lines_of_code_are_those_that_are_no_comment_no_docstring_and_not_empty():
    head, value = '"""Head.\n\nmore\n"""\n# why\n\n', 'x = """\ntext\n"""\n\n\n'
    text = head + value + 'def f():\n    """One."""\n    return (  # beside\n        1\n    )\n'
    assert package({"dask_ferro/a/x.py": text}).code_lines("a") == 7


def figures(texts):
    found = package({f"dask_ferro/{name}.py": text for name, text in texts.items()})
    return limits.figures_of(found, limits.places_of(found))


def test_the_fullest_folder_of_a_room_is_counted():
    texts = {"a/x": "", "a/y": "", "a/in/x": "", "a/in/y": "", "a/in/z": "", "b/x": "", "b/__init__": ""}
    assert figures(texts)["modules"] == {"a": 3, "b": 1}


def test_shares_are_of_a_hundred_lines_of_code():
    found = figures({"a/x": "# why\n" + "x = 1\n" * 49 + "[[y for y in x] for x in z]\n", "b/x": ""})
    assert found["comments"] == {"a": 2.0, "b": 0.0}
    assert found["nested"] == {"a": 2.0, "b": 0.0}
    assert found["code"] == {"a": 50, "b": 0}


@pytest.mark.parametrize(
    ("name", "figure", "limit"),
    [
        pytest.param("any", 7, 7, id="a number is its own limit"),
        pytest.param("comments", 1.79, 1.7, id="a floor is rounded down"),
        pytest.param("comments", 1.7, 1.7, id="and kept where it is round"),
        pytest.param("nested", 0.751, 0.76, id="a share is rounded up"),
        pytest.param("code", 12_801, 12_900, id="code to the next hundred"),
        pytest.param("code", 12_800, 12_800, id="which a round number is"),
    ],
)
def test_limits_are_todays_figures_rounded(name, figure, limit):
    assert limits.COUNTS[name].limit(figure) == limit


@pytest.mark.parametrize(
    ("name", "figure", "limit", "is_over"),
    [
        ("any", 8, 7, True),
        ("any", 7, 7, False),
        ("any", 6, 7, False),
        ("comments", 1.69, 1.7, True),
        ("comments", 1.75, 1.7, False),
    ],
)
def test_more_is_over_a_ceiling_and_less_under_a_floor(name, figure, limit, is_over):
    assert list(limits.over({name: {"a": figure}}, {name: {"a": limit}})) == (
        [(name, "a", figure, limit)] if is_over else []
    )


def test_a_room_without_a_limit_may_have_nothing():
    assert list(limits.over({"any": {"new": 1}}, {"any": {"a": 3}})) == [("any", "new", 1, 0)]


def test_what_is_over_its_limit_is_told_with_its_places():
    found = package({"dask_ferro/a/x.py": "x: Any = 1\n", "dask_ferro/b/x.py": "y: Any = 1\n"})
    places = limits.places_of(found)
    bounds = {name: {"a": 500, "b": 500} for name in limits.COUNTS if name != "comments"}
    bounds["any"] = {"a": 0, "b": 1}
    assert judged(limits.figures_of(found, places), bounds, places) == [
        "a: Any in annotations: 1, at most 0 (tests/house/limits.toml)",
        "    dask_ferro.a.x:1: Any",
    ]


def test_written_limits_are_read_as_what_they_were(tmp_path, monkeypatch):
    found = figures({"a/x": "x: Any = 1\n", "top": "y = 1\n"})
    monkeypatch.setattr(limits, "FILE", tmp_path / "limits.toml")
    limits.FILE.write_text(limits.as_text(found))
    assert limits.written()["any"] == {"a": 1, TOP: 0}
    assert list(limits.over(found, limits.written())) == []


def test_the_package_keeps_its_limits(capsys):
    assert main([]) == 0, capsys.readouterr().out
    assert "import circles" in capsys.readouterr().out


def test_a_limit_that_does_not_hold_is_the_exit_status(monkeypatch, capsys):
    bounds = {**limits.written(), "any": {}}
    monkeypatch.setattr(limits, "written", lambda: bounds)
    assert main([]) == 1
    assert "Any in annotations: " in capsys.readouterr().out


def test_places_are_listed_by_count_and_room(capsys):
    assert main(["--places", "modules", "policy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("dask_ferro.policy.") for line in lines)
    assert main(["--places", "circles", "policy"]) == 0
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        main(["--places", "nonsense"])
    assert "counts: modules, " in capsys.readouterr().err
