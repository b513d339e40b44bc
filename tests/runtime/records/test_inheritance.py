"""What becomes of the jobs of a run before, of what SLURM says of them."""

from __future__ import annotations

import pytest

from dask_ferro.runtime.records.inheritance import ADOPT, ASK, END, GONE, verdict
from dask_ferro.runtime.records.record import JobRecord
from dask_ferro.runtime.slurm.parsing import UNTOLD, QueueRow

RECORD = JobRecord("a-1", "a", "7", state="pending", submitted=1000.0, kind="k", run="ferro-1")
OURS = "mine ferro-1.abc"


@pytest.mark.parametrize(
    ("row", "kind", "what", "why"),
    [
        pytest.param(QueueRow("7", "PENDING", comment=OURS), "k", ADOPT, "it waits", id="it waits: it is adopted"),
        pytest.param(QueueRow("7", "PENDING", restarts=1, comment=OURS), "k", ADOPT, "it waits",
            id="also where it was requeued"),
        pytest.param(QueueRow("7", "PENDING", submitted=1003.0), "k", ADOPT, "it waits", id="known by its submission"),
        pytest.param(QueueRow("7", "PENDING", comment=OURS), "other", END, "otherwise now", id="its pool has changed"),
        pytest.param(QueueRow("7", "PENDING", comment=OURS), None, END, "no pool 'a'", id="its pool is gone"),
        pytest.param(QueueRow("7", "RUNNING", comment=OURS), "k", END, "has started", id="its workers end in any case"),
        pytest.param(QueueRow("7", "PENDING", reason="JobHeldAdmin", comment=OURS), "k", END, "held",
            id="somebody holds it"),
        pytest.param(QueueRow("7", "CANCELLED", comment=OURS), "k", GONE, "CANCELLED", id="the watchdog was quicker"),
        pytest.param(QueueRow("7", "COMPLETING", comment=OURS), "k", GONE, "COMPLETING", id="it ends"),
        pytest.param(QueueRow("7", "PENDING", submitted=9e5, comment="ferro-2.abc"), "k", GONE, "another",
            id="another of its number"),
        pytest.param(QueueRow("7", "RUNNING", submitted=1061.0), "k", GONE, "another", id="another of the same user"),
        pytest.param(QueueRow("7", "RUNNING", UNTOLD), "k", ASK, "when it was", id="accounting tells too little"),
        pytest.param(QueueRow("7", "FAILED", UNTOLD), "k", GONE, "FAILED", id="over by accounting"),
    ],
)  # fmt: skip
def test_a_job_of_before_is(row: QueueRow, kind: str | None, what: str, why: str) -> None:
    found = verdict(RECORD, row, False, ["ferro-1"], kind, 0.0)
    assert found.what == what
    assert why in found.why


@pytest.mark.parametrize(
    ("facts", "kind", "since", "what"),
    [
        pytest.param({"is_connected": True}, "k", 9.0, ADOPT, id="it found this scheduler and works"),
        pytest.param({"is_connected": True}, "other", 9.0, END, id="it did, and is described otherwise now"),
        pytest.param({"is_new": True}, "k", 9.0, ASK, id="its workers may come"),
        pytest.param({"is_new": True}, "k", 61.0, END, id="they did not"),
        pytest.param({}, "k", 9.0, END, id="its scheduler is gone"),
    ],
)
def test_a_job_that_runs_is(facts: dict[str, bool], kind: str, since: float, what: str) -> None:
    row = QueueRow("7", "RUNNING", comment=OURS)
    assert verdict(RECORD, row, False, ["ferro-1"], kind, since, **facts).what == what


@pytest.mark.parametrize(("answered", "what"), [(True, GONE), (False, ASK)])
def test_without_a_row_it_is_gone_only_if_slurm_said_so(answered: bool, what: str) -> None:
    assert verdict(RECORD, None, answered, ["ferro-1"], "k", 0.0).what == what


def test_what_nobody_knows_for_a_minute_is_none_of_ours() -> None:
    assert verdict(RECORD, QueueRow("7", "RUNNING", UNTOLD), False, ["ferro-1"], "k", 61.0).what == GONE
