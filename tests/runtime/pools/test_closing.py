"""The checks of each pool with SLURM when a cluster starts, and the messages to the user."""

from __future__ import annotations

import asyncio

import pytest

from dask_ferro.runtime.pools.closing import Closings
from dask_ferro.runtime.slurm.commands import Refused
from tests.runtime.pools.test_pool import built


class Slurm:
    """SLURM's commands at the edge: what each prints, or raises; without one, there is no answer."""

    job_name = "test"

    def __init__(self, **answers: str | Refused) -> None:
        self.answers, self.calls = answers, []

    async def ask(self, *words: str, stdin: str = "") -> str:
        self.calls.append(words[0])
        answer = self.answers.get(words[0], Refused(f"{words[0]} did not answer", "transient"))
        if isinstance(answer, Refused):
            raise answer
        return answer


SCRIPT = "#SBATCH -p cpu\n#SBATCH --cpus-per-task=8"
TELLS = {"scontrol": "PartitionName=cpu MaxTime=UNLIMITED Default=YES", "sinfo": "cpu|4|4000|idle"}
NEVER = Refused("invalid partition specified: cpu", "permanent")


@pytest.mark.parametrize(
    ("answers", "script", "said"),
    [
        pytest.param(TELLS | {"sbatch": ""}, "#SBATCH -p cpu", "", id="it would start it"),
        pytest.param(TELLS | {"sbatch": NEVER}, "#SBATCH -p cpu", NEVER.words, id="it says that it would not"),
        pytest.param(
            TELLS | {"sbatch": ""}, SCRIPT,
            "PartitionConfig: asked for 8 CPUs a task, the largest node of partition cpu has 4",
            id="it does not say so, and no node is large enough",
        ),
        pytest.param({"sbatch": ""}, SCRIPT, None, id="nobody tells of the partitions"),
        pytest.param({"sbatch": NEVER}, SCRIPT, None, id="nor whether that is a refusal"),
    ],
)  # fmt: skip
async def test_asks_slurm(answers: dict, script: str, said: str | None) -> None:
    assert (await Closings(Slurm(**answers), lambda pool: script, None, None).trial(script)) == said


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        pytest.param(TELLS | {"sbatch": ""}, [1, 1, 1], id="one that it would start: no more"),
        pytest.param(TELLS | {"sbatch": NEVER}, [1, 2, 3], id="one that it would not: whenever there are jobs"),
        pytest.param({}, [1, 2, 2], id="nobody answered: once more"),
    ],
)  # fmt: skip
async def test_each_pool_is_asked_for_at_the_start_and_then_with_its_jobs(
    answers: dict, asked: list[int]
) -> None:
    slurm = Slurm(**answers)
    closings = Closings(slurm, lambda pool: "#SBATCH -p cpu", None, lambda pool, words: False)
    pool, counts = built(), []
    closings.foresee(pool)
    assert await closings.settled() == []  # no task waits for it
    await asyncio.sleep(0.05)
    counts.append(slurm.calls.count("sbatch"))
    for _ in range(2):
        closings.check(pool)
        assert await closings.settled() == []  # no jobs were requested that were refused
        counts.append(slurm.calls.count("sbatch"))
    assert (counts) == asked


async def test_a_dry_run_that_is_not_over_is_waited_for_with_the_first_jobs() -> None:
    slurm = Slurm(**TELLS, sbatch=NEVER)
    closings = Closings(slurm, lambda pool: "", None, lambda pool, words: True)
    pool = built()
    closings.foresee(pool)
    closings.check(pool)
    assert await closings.settled() == [f"SLURM would never start jobs of pool 'cpu': {NEVER.words}"]
    assert slurm.calls.count("sbatch") == 1
