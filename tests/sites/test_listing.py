"""What a user says of a batch system's commands, and what those print: each form and each mistake is a row."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_ferro as ff
from dask_ferro.runtime.sites.commands import Template
from dask_ferro.runtime.sites.guard import heard, site_of
from dask_ferro.runtime.sites.listing import Listing
from tests.sites.conftest import COMMANDS

GRID_ENGINE = """job-ID  prior   name       user         state submit/start at     queue                          slots
-----------------------------------------------------------------------------------------------------------------
    12 0.55500 x          me           qw    09/14/2024 08:37:55                                    1
    13 0.55500 x          me           r     09/14/2024 08:37:55 all.q@n1                           1
    14 0.00000 x          me           hqw   09/14/2024 08:37:55                                    1
    15 0.55500 x          me           dr    09/14/2024 08:37:55 all.q@n1                           1
    16 0.00000 x          me           Eqw   09/14/2024 08:37:55                                    1
"""
LSF = "12 PEND ferro-1.a\n13 RUN ferro-1.b\n14 PSUSP -\n15 EXIT ferro-1.c\n16 DONE ferro-1.d\n"
OAR = json.dumps(
    {"12": {"state": "Waiting", "name": "x"}, "13": {"state": "Running"}, "14": {"state": "Error"}}
)
CONDOR = json.dumps(
    [{"ClusterId": 12, "JobStatus": 1}, {"ClusterId": 13, "JobStatus": 2}, {"ClusterId": 14, "JobStatus": 5}]
)


@pytest.mark.parametrize(
    ("described", "text", "phases"),
    [
        pytest.param(
            {"job_id": 0, "state": 4},
            GRID_ENGINE,
            {"12": "pending", "13": "started", "14": "held", "15": "ending", "16": "held"},
            id="columns",
        ),
        pytest.param(
            r"^(?P<job_id>\d+) (?P<state>\w+) (?P<tag>\S+)",
            LSF,
            {"12": "pending", "13": "started", "14": "held", "15": "over", "16": "over"},
            id="a regular expression",
        ),
        pytest.param(
            {"json": "", "state": "state"}, OAR, {"12": "pending", "13": "started", "14": "over"}, id="JSON by id"
        ),
        pytest.param(
            {"json": "", "job_id": "ClusterId", "state": "JobStatus"},
            CONDOR,
            {"12": "pending", "13": "started", "14": "held"},
            id="a JSON list",
        ),
        pytest.param(
            {"job_id": 1, "state": 0, "separator": "|"}, "R|12|x\nbroken\nQ|13", {"12": "started", "13": "pending"},
            id="columns with a separator",
        ),
    ],
)  # fmt: skip
def test_forms_of_listings(described: Any, text: str, phases: dict[str, str]) -> None:
    rows = Listing(described).rows(text)
    phases = {"job-ID": "started"} | phases if text is GRID_ENGINE else phases  # its header, which is no job
    assert {job_id: row.phase for job_id, row in rows.items()} == phases


def test_words_of_ones_own_win_over_the_common_ones() -> None:
    listing = Listing({"job_id": 0, "state": 1}, {"over": ["E"], "held": ["frozen"]})
    rows = listing.rows("1 E\n2 frozen\n3 R")
    assert [row.phase for row in rows.values()] == ["over", "held", "started"]


def test_a_reason_says_nothing_of_the_phase() -> None:
    """A job that waits may have any reason, "held" among its words."""
    listing = Listing(r"^(?P<job_id>\d+) (?P<state>\w+) (?P<reason>.*)")
    (row,) = listing.rows("12 PEND held back by a reservation").values()
    assert (row.phase, row.reason) == ("pending", "held back by a reservation")
    (row,) = listing.rows("12 HOLD by its user").values()
    assert row._replace(restarts=1).phase == "held"


HOSTILE = {
    "nothing": "",
    "half of JSON": "{",
    "an empty list": "[]",
    "null": "null",
    "a number for jobs": '{"Jobs": 7}',
    "records that are none": '{"Jobs": [1, null, {"id": {}}, {"id": "1", "s": true}, {"id": "1", "s": " "}]}',
    "brackets without end": "[" * 100_000,
    "binary": "\x00\xff",
    "too few columns": "1 2 3",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_job_is_left_out(text: str) -> None:
    forms: list[Any] = [
        {"json": "Jobs", "job_id": "id", "state": "s"}, {"json": "Jobs", "state": "s"}, {"job_id": 0, "state": 99},
        r"^(?P<job_id>\d+),(?P<state>\w+)",
    ]  # fmt: skip
    assert [Listing(form).rows(text) for form in forms] == [{}] * 4


@given(
    st.text(),
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
)
def test_no_answer_breaks_a_listing(text: str, tree: Any) -> None:
    Listing({"json": "", "job_id": "a", "state": "b"}).rows(json.dumps(tree))
    Listing({"json": "", "state": "b"}).rows(text)
    Listing({"job_id": 0, "state": 1}).rows(text)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"submit": None}, "submit must be given"),
        ({"submit": ""}, "submit: got '', wanted a command"),
        ({"submit": "qsub 'x"}, "submit: got .*No closing quotation"),
        ({"submit": "qsub {nmae}"}, r"\{nmae\} has no value; there are name, tag, script"),
        ({"cancel": "qdel"}, r"cancel: got 'qdel', wanted \{id\} or \{ids\} in it"),
        ({"list": 7}, "list: got 7, wanted a command"),
        ({"listed": 7}, "listed: got 7, wanted a regular expression"),
        ({"listed": "("}, "listed: got '\\(', which is not a regular expression"),
        ({"listed": "(?P<job_id>x)"}, r"without a group \(\?P<state>"),
        ({"listed": "(?P<job_id>x)(?P<state>y)(?P<colour>z)"}, "unknown group 'colour'"),
        ({"listed": {"job_id": 0}}, "listed: got"),
        ({"listed": {"job_id": 0, "state": -1}}, "columns from 0 on"),
        ({"listed": {"job_id": 0, "state": "S"}}, "columns from 0 on"),
        ({"listed": {"json": 7, "state": "S"}}, "listed: got"),
        ({"listed": {"job_id": 0, "state": 1, "separator": ""}}, "separator"),
        ({"submitted": r"\d+"}, r"submitted: .*without a group \(\?P<job_id>"),
        ({"nothing": "["}, "nothing: got '\\[', which is not a regular expression"),
        ({"states": {"running": ["R"]}}, "states: got"),
        ({"states": {"over": "E"}}, "states: got"),
        ({"walltime": "soon"}, "walltime='soon'"),
        ({"directives": "#X"}, "wanted a list of lines"),
        ({"cores": 0}, r"ff.BatchCluster: got cores=0"),
        ({"queue": "x"}, r"ff.BatchCluster: unknown option 'queue'"),
        ({"pools": {"a-1": {}}}, r"ff.BatchCluster: pool 'a-1'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_started(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ff.ConfigError, match=words):
        ff.BatchCluster(**({"cores": 1, "memory": "1GB", "walltime": "01:00:00"} | COMMANDS | wrong))


def test_values_stand_within_words_and_no_shell_takes_them_apart() -> None:
    template = Template("submit", "sub -N '{name} x' -A {tag}", ("name", "tag"))
    assert template.filled(name="a; rm b", tag="$(c)") == ["sub", "-N", "a; rm b x", "-A", "$(c)"]
    assert Template("cancel", "stop --jobs={ids}", ("ids",)).filled(ids=["1", "2"]) == ["stop", "--jobs=1,2"]


def test_the_watchdog_is_told_of_the_same_commands() -> None:
    given = {name: value for name, value in COMMANDS.items() if name not in ("directives", "grace")}
    made = site_of(json.dumps({"kind": "commands", "job_name": "x", "tag": "y", **given}))
    assert json.loads(json.dumps(made.described()))["submit"] == COMMANDS["submit"]
    assert (
        site_of(json.dumps({**made.described(), "job_name": "x", "tag": "y"})).described() == made.described()
    )
    assert heard(["job 1\n", "strange\n", "job 2\n"]) == ["1", "2"]
    assert heard(["job 1\n", "closed\n"]) is None
