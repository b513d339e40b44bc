"""Job configurations of a batch system that is described by its commands, as the documentation has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dask_ferro as ff
from dask_ferro.runtime.jobs import job_config

ROOT = Path(__file__).resolve().parents[2]
(BLOCK,) = re.findall(
    r"```yaml\n(.*?)```", (ROOT / "docs" / "howto" / "sites.md").read_text(encoding="utf-8"), re.DOTALL
)
# The page's, with a pool.
LSF = (
    BLOCK
    + """\
    scheduler-options: {dashboard_address: ':0'}
    pools:
      long: {walltime: '10:00:00', maximum: 2}
ferro:
  elastic: {maximum: 4}
"""
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(text: str) -> job_config.JobConfig:
    Path("lsf.yaml").write_text(text)
    return job_config.load("./lsf.yaml")


def test_its_directives_are_those_of_the_user_with_the_shape_of_each_pool() -> None:
    scripts = loaded(LSF).scripts()
    heads = {
        pool: [line for line in text.splitlines() if line[:5] == "#BSUB"] for pool, text in scripts.items()
    }
    assert heads == {
        pool: ["#BSUB -n 2", f"#BSUB -W {minutes}", "#BSUB -o dask-logs/", "#BSUB -q normal"]
        for pool, minutes in {"default": 90, "long": 600}.items()
    }
    assert 'FERRO_WORKER="long-0"' in scripts["long"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    cancel: bkill {ids}\n", "", "key jobqueue.batch.cancel is missing: the command that ends jobs"),
        ("    cancel:", "    cancle:", "unknown key jobqueue.batch.cancle, did you mean cancel?"),
        ("    name: ferro", "    queue: normal", "unknown key jobqueue.batch.queue"),
        ("    listed: ^", "    listed: 7 #", "jobqueue.batch.listed: got 7, wanted a regular expression"),
        ("    listed: ^", "    listed: ^(", "which is not a regular expression"),
        ("['#BSUB -n {cores}'", "'#BSUB' #", "jobqueue.batch.directives: got '#BSUB', wanted a list of text"),
        ("'01:30:00'", "'01:30'", "wanted hours:minutes:seconds"),
        ("      long: {", "      long: {cancel: x, ", "unknown key jobqueue.batch.pools.long.cancel"),
    ],
)
def test_what_is_wrong_is_told_by_its_key(old: str, new: str, words: str) -> None:
    assert old in LSF
    with pytest.raises(ff.ConfigError) as raised:
        loaded(LSF.replace(old, new)).scripts()
    assert words in str(raised.value)
