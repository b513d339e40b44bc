"""The tool that measures the suite's peak memory counts grandchildren, and fails if a bound is exceeded."""

import sys

import pytest

from tests import peak

pytestmark = pytest.mark.needs("/proc")
# A child that holds 200 MiB for the time of a few samples.
HOLDS = "import time; held = b'1' * (200 << 20); time.sleep(2)"
PROGRAM = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDS!r}], timeout=60)"


@pytest.mark.parametrize(
    ("total", "each", "status"),
    [
        pytest.param("6000", "1500", 0, id="within both bounds"),
        pytest.param("150", "1500", 3, id="all together hold too much"),
        pytest.param("6000", "150", 3, id="one holds too much"),
    ],
)
def test_what_grandchildren_hold_is_seen(capsys, monkeypatch, total, each, status):
    monkeypatch.setenv("FERRO_PEAK_TOTAL", total)
    monkeypatch.setenv("FERRO_PEAK_EACH", each)
    assert peak.main([sys.executable, "-c", PROGRAM]) == status
    assert "largest processes" in capsys.readouterr().out


def test_the_commands_own_failure_is_told():
    assert peak.main([sys.executable, "-c", "raise SystemExit(7)"]) == 7
