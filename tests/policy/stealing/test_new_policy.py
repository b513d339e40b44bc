"""A new policy is one module and one line: then it runs in the simulator, the plugin, and the tests of every policy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.programs import ran

ROOT = Path(__file__).resolve().parents[3]

LINE = """
from dask_ferro.policy.stealing.policies import POLICIES
from tests.policy.stealing.random_victims import RandomVictims
POLICIES["random"] = RandomVictims
"""

SIMULATOR = """
import sys
sys.path.append("benchmarks")
from dask_ferro.simulate.engine import simulate
from tests.simulate.test_engine import LATE, hoard
trace = simulate(hoard(200), LATE, policy="random")
assert trace.counts["confirmed"] > 0, trace.counts
"""

PLUGIN_AND_REPLAY = """
import os, tempfile, time
from click.testing import CliRunner
from distributed import Client, LocalCluster
import dask_ferro as ff
from dask_ferro.commands.replay import replay
path = os.path.join(tempfile.mkdtemp(), "run.decisions")
with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
    with Client(cluster) as client:
        ff.install(client, stealing="random", record=path)
        where = {"workers": [min(cluster.scheduler.workers)], "allow_other_workers": True}
        futures = client.map(lambda i: time.sleep(0.02) or i, range(30), pure=False, **where)
        assert client.gather(futures) == list(range(30))
        stealing = cluster.scheduler.extensions["stealing"]
        ff.uninstall(client)
assert stealing.settings.stealing == "random"
assert stealing.counts["confirmed"] > 0, stealing.counts
done = CliRunner().invoke(replay, [path])
assert done.exit_code == 0, done.output
assert "are the same" in done.output, done.output
assert '"policy":"random"' in open(path).read()
"""

PROPERTIES = """
import pytest
tests = ["tests/policy/stealing/test_policy_properties.py", "tests/policy/test_scheduling_core.py"]
tests += ["tests/policy/stealing/test_decisions.py", "tests/simulate/test_starvation.py"]
assert pytest.main([*tests, "-q", "-k", "random", "-p", "no:cacheprovider"]) == 0
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(SIMULATOR + PLUGIN_AND_REPLAY, id="simulator, plugin and replay"),
        pytest.param(PROPERTIES, id="tests of every policy"),
    ],
)
def test_random_victims(script: str) -> None:
    """In a process of its own: elsewhere the registry was read already."""
    done = ran([sys.executable, "-c", LINE + script], cwd=ROOT, seconds=540)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    if script == PROPERTIES:
        assert "passed" in done.stdout, done.stdout[-2000:]
