"""`dask ferro top`: the order of workers and screens as values, and the whole of it in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
from distributed import Client, LocalCluster
from rich.console import Console
from rich.screen import Screen

import dask_ferro as ff
from dask_ferro.commands.top import Choice, screen, show_once, sort_workers
from dask_ferro.errors import InputError
from dask_ferro.observe.top import address_source, take_snapshot
from dask_ferro.scheduler.flow_log import FlowRow
from dask_ferro.views.terminal import console
from tests.programs import ran
from tests.waiting import BOUND_S, until

COMMAND = [sys.executable, "-m", "dask", "ferro", "top"]


def worker(name, **facts):
    return {
        "address": f"tcp://10.0.0.1:{4000 + len(name)}",
        "name": name,
        "state": "busy",
        "device": "cpu",
        "threads": 2,
        "cpu": 50.0,
        "running": ["mlp-gemm 0,3"],
        "tasks": 4,
        "ops": [["mlp-gemm", 4]],
        "memory": 2**30,
        "memory_limit": 2**32,
        "spilled": 0,
        "backlog": 0.5,
        "threshold": 0.005,
        "in": 3,
        "out": 1,
        **facts,
    }


def seen(workers, **facts):
    return {
        "address": "tcp://10.0.0.1:8786",
        "time": 0.0,
        "ferro": True,
        "stealing": "informed",
        "tasks": {"processing": 4},
        "ops": [["mlp-gemm", 3], ["mlp-relu", 1]],
        "steals": {"confirmed": 5, "refused": 1, "seconds_worked": 1.5, "seconds_moving": 0.1},
        "elastic": {},
        "overview": overview(),
        "workers": workers,
        **facts,
    }


@pytest.mark.parametrize(
    ("field", "text", "wanted"),
    [
        pytest.param("backlog", "", ["w10", "w2", "w1"], id="by backlog, the most first"),
        pytest.param("name", "", ["w1", "w2", "w10"], id="names by their numbers"),
        pytest.param("threshold", "", ["w2", "w10", "w1"], id="what is not known comes last"),
        pytest.param("running", "", ["w1", "w10", "w2"], id="by what runs, and then by name"),
        pytest.param("backlog", "W1", ["w10", "w1"], id="filtered by name, in any case"),
        pytest.param("backlog", "softmax", ["w2"], id="filtered by what runs"),
        pytest.param("backlog", "nothing", [], id="nobody matches"),
    ],
)
def test_arranged(field, text, wanted):
    workers = [
        worker("w1", backlog=0.1, threshold=None),
        worker("w10", backlog=3.0, threshold=0.001),
        worker("w2", backlog=2.0, running=["mlp-softmax 1"]),
    ]
    assert [row["name"] for row in sort_workers(workers, Choice(field, text))] == wanted


def drawn(facts, trouble="", columns=80, lines=24, wanted=""):
    """The screen as text, without its styles."""
    out = io.StringIO()
    drawing = screen(facts, Choice("backlog", wanted), trouble, columns, lines)
    # `Live` draws it as a whole screen.
    Console(file=out, width=columns, height=lines).print(Screen(drawing), end="")
    text = out.getvalue().split("\n")
    assert len(text) <= lines
    return [line.rstrip() for line in "\n".join(text).rstrip().split("\n")]


def finding(severity, sentence):
    return {"severity": severity, "where": (), "what": "waits", "sentence": sentence, "remedy": "do it"}


def flow(name, **facts):
    row = FlowRow(
        name, 2, 600, "runs", seconds=1.5, workers=("w1", "w2"), values=1196, nbytes=35_000, waited=0.2
    )
    return asdict(replace(row, **facts))


def overview(*findings, flows=()):
    doing = ["6 of 10 tasks done (60%), 2 running", "the rest takes 2.0 s", "2 workers"]
    return {
        "health": "5 errors",
        "doing": doing,
        "findings": list(findings),
        "gained": "",
        "flows": list(flows),
    }


ELASTIC = {"wanted": {"a": 4}, "jobs": {"running": 1}, "queue_wait": {"a": 12.0}, "why": "wide"}


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(seen([worker(f"w{i}") for i in range(100)], elastic=ELASTIC), id="many workers"),
        pytest.param(
            seen([worker("w1")], overview=overview(*[finding("error", "much " * 60)] * 9)), id="much is stuck"
        ),
        pytest.param(seen([worker("w" * 300)], ferro=False), id="long names"),
        pytest.param(seen([worker("w1")], overview=overview(flows=[flow("f" * 300)] * 9)), id="flows"),
        pytest.param(None, id="nothing seen yet"),
    ],
)
def test_no_line_is_wider_than_the_terminal(facts, columns):
    assert max(len(line) for line in drawn(facts, "no scheduler answers" * 20, columns)) <= columns


def test_80_columns_hold_what_matters():
    text = drawn(seen([worker("w1", backlog=12.3, **{"in": 12_345})], elastic=ELASTIC))
    assert text[0].startswith("dask ferro top  tcp://10.0.0.1:8786  1 worker, 2 threads")
    assert text[1:8] == [
        "health   5 errors",
        "doing    6 of 10 tasks done (60%), 2 running; the rest takes 2.0 s",
        "tasks    4 processing",
        "steals   5 confirmed, 1 refused, 0 stale; stolen work 1.5 s, moved in 100 ms",
        "         (informed)",
        "ops      mlp-gemm 75.0 %, mlp-relu 25.0 %",
        "elastic  wanted 4 a; 1 running; queue wait 12 s; wide",
    ]
    assert " ".join(text[8].split()) == "worker state running tasks backlog thresh memory in out dev"
    assert " ".join(text[9].split()) == "w1 busy mlp-gemm 0,3 4 12.3 s 5 ms 25 % 12.3k 1 cpu"


def test_what_is_stuck_comes_first_three_of_many_and_as_text():
    found = [finding("error", "\x1b[2J"), finding("slow", "1"), *[finding("slow", "others")] * 3]
    assert drawn(seen([worker("w1")], overview=overview(*found)))[1:5] == [
        "error  ?[2J; do it",
        "slow   1; do it",
        "slow   others; do it",
        "health  5 errors (2 of them are not shown)",
    ]


FLOWS = [flow("step\x1b[2J"), *[flow("add+sum", state="ended", voids=1)] * 5]


def test_the_newest_flows_are_above_the_workers():
    text = drawn(seen([worker("w1")], overview=overview(flows=FLOWS)), columns=100)
    assert [" ".join(line.split()) for line in text[6:10]] == [
        "flow state for members tasks values sent stolen waited voids",
        "step?[2J runs 1.5 s 2 600 1.2 k 34.18 kiB 0 200 ms 0",
        *["add+sum ended 1.5 s 2 600 1.2 k 34.18 kiB 0 200 ms 1"] * 2,
    ]


def test_a_table_for_scripts_has_all_flows(capsys):
    show_once(console(), seen([worker("w1")], overview=overview(flows=FLOWS)), [worker("w1")])
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("flows")
    assert [line.split()[0] for line in lines[first + 1 : first + 8]] == [
        "flow",
        "step?[2J",
        *["add+sum"] * 5,
    ]


def test_a_table_for_scripts_says_all_that_is_stuck_and_what_to_do(capsys):
    findings = [finding("error", f"thing {i}") for i in range(5)]
    show_once(console(), seen([worker("w1")], overview=overview(*findings)), [worker("w1")])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:6] == [*(f"error  thing {i}; do it" for i in range(5)), "health     5 errors"]


@pytest.mark.parametrize(
    ("facts", "text", "wanted"),
    [
        pytest.param(None, "", "connecting", id="before the first look"),
        pytest.param(seen([]), "", "no workers yet", id="no workers"),
        pytest.param(seen([worker("w")]), "x", "no worker matches the filter", id="none that matches"),
        pytest.param(
            seen([worker("w")], ferro=False), "", "dask_ferro is not installed", id="without the plugin"
        ),
    ],
)
def test_an_empty_screen_says_what_it_waits_for(facts, text, wanted):
    assert wanted in "\n".join(drawn(facts, wanted=text))


def test_names_cannot_command_the_terminal():
    text = "\n".join(drawn(seen([worker("\x1b[2Jevil[bold]", running=["\x07\n"])])))
    assert "?[2Jevil" in text
    assert not set(text) & {"\x1b", "\x07"}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        pytest.param({"address": "nonsense"}, "wanted for instance tcp://host:8786", id="no address"),
        pytest.param({"address": "foo://host:1"}, "unknown address scheme", id="no protocol"),
        pytest.param({"address": "tcp://h:1", "scheduler_file": "f"}, "either", id="both"),
        pytest.param({}, "DASK_SCHEDULER_ADDRESS", id="neither"),
    ],
)
def test_what_names_no_scheduler_is_refused(arguments, wanted):
    with pytest.raises(InputError, match=re.escape(wanted)):
        address_source(**arguments)()


@pytest.mark.cluster
def test_nobody_answers_is_one_line_and_status_2():
    done = ran([*COMMAND, "--scheduler", "tcp://127.0.0.1:9", "--once"])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("dask ferro: no scheduler answers")


# ---- on clusters -------------------------------------------------------------------------------------------


@contextmanager
def cluster(port=0):
    """Two workers in this process, reached by TCP, with the plugin on."""
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            protocol="tcp",
            scheduler_port=port,
            dashboard_address=":0",
            silence_logs=50,
        ) as started,
        Client(started, set_as_default=False) as client,
    ):
        ff.install(client)
        yield client


@pytest.mark.cluster
def test_a_look_tells_what_the_workers_do():
    with cluster() as client:
        futures = client.map(time.sleep, [0.3] * 6, key=[("nap", i) for i in range(6)], pure=False)
        until(lambda: client.run_on_scheduler(_has_done_one), "the first nap's end", every=0.01)
        seen = client.run_on_scheduler(take_snapshot)
        client.gather(futures)
        ff.uninstall(client)
        bare = client.run_on_scheduler(take_snapshot)
    assert (seen["ferro"], seen["stealing"], seen["ops"][0][0]) == (True, "informed", "nap")
    for row in seen["workers"]:
        assert (row["state"], row["device"], row["threads"], row["threshold"]) == ("busy", "cpu", 1, 0.005)
        assert row["running"][0].startswith("nap ")
        assert 0 < row["backlog"] < 5
    assert (bare["ferro"], bare["stealing"], bare["steals"]) == (False, None, {})
    assert {(row["state"], row["threshold"], row["in"]) for row in bare["workers"]} == {("idle", None, None)}


def _has_done_one(dask_scheduler):
    return (
        dask_scheduler.task_prefixes["nap"].states["memory"] >= 1
        if "nap" in dask_scheduler.task_prefixes
        else 0
    )


@pytest.mark.cluster
def test_once_prints_a_table_or_json_and_finds_the_scheduler_in_every_way(tmp_path):
    with cluster() as client:
        address = client.scheduler.address
        file = tmp_path / "scheduler.json"
        client.write_scheduler_file(str(file))
        named = {**os.environ, "DASK_SCHEDULER_ADDRESS": address}
        table = subprocess.run([*COMMAND, "--once"], env=named, capture_output=True, text=True, timeout=60)
        as_json = ran([*COMMAND, "--json", "--scheduler-file", str(file)])
    assert (table.stderr, table.returncode) == ("", 0)
    assert table.stdout.split(maxsplit=1)[1].startswith("nothing is wrong")
    assert table.stdout.splitlines()[1].split()[:2] == ["scheduler", address]
    assert [line.split()[:2] for line in table.stdout.splitlines()[-2:]] == [["0", "idle"], ["1", "idle"]]
    assert "\x1b" not in table.stdout
    assert {row["name"] for row in json.loads(as_json.stdout)["workers"]} == {"0", "1"}


# ---- in a terminal -----------------------------------------------------------------------------------------

_IN_ORDER = re.compile(r"^0 +idle.*^1 +idle", re.MULTILINE | re.DOTALL)
_STYLE = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A shell in a pseudo-terminal, and the text that it was sent."""

    def __init__(self, columns=80, lines=24):
        self._master, slave = pty.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
            # The kernel sends signals to those whose controlling terminal it is.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.raw = ""
        self.types("PS1=rea''dy'> '")
        self.until(lambda: self.raw.endswith("ready> "), "the shell")

    def press(self, text):
        os.write(self._master, text.encode())

    def types(self, line):
        """Begin anew, with a line and enter."""
        self.raw = ""
        self.press(line + "\n")

    def until(self, is_it, what):
        def read():
            if select.select([self._master], [], [], 0.05)[0]:
                self.raw += os.read(self._master, 65536).decode(errors="replace")
            return is_it()

        until(read, what, every=0, seen=self.frame)

    def frame(self):
        """The text of the newest screen, which begins with an order to go to the first place."""
        return _STYLE.sub("", self.raw.rpartition("\x1b[H")[2])

    def shows(self, text):
        self.until(lambda: text in self.frame(), text)

    def is_plain(self):
        """Whether a program has left its screen, and shows the cursor."""
        on, off, hidden, there = (
            self.raw.rfind(f"\x1b[?{code}") for code in ("1049h", "1049l", "25l", "25h")
        )
        return on < off and hidden < there

    def status(self):
        """Return the status of the shell's last program, and whether it has given the terminal back."""
        self.until(lambda: self.raw.endswith("ready> "), "the prompt")
        self.press("echo status-$?-; echo that-$((1))-\n")
        self.until(lambda: "that-1-" in self.raw, "the status")
        return int(re.search(r"status-(\d+)-", self.raw)[1]), self.is_plain()

    def kill_child(self):
        """Send SIGTERM to the program in the foreground."""
        os.killpg(os.tcgetpgrp(self._master), signal.SIGTERM)

    def close(self):
        if self.shell.poll() is None:
            self.shell.kill()
            self.shell.wait(BOUND_S)
        os.close(self._master)


@pytest.fixture
def terminal():
    opened = Terminal()
    yield opened
    opened.close()


@pytest.mark.cluster
def test_it_shows_workers_and_survives_the_clusters_absence(terminal):
    with cluster() as client:
        address = client.scheduler.address
        terminal.types(
            shlex.join([*COMMAND, "--scheduler", address, "--interval", "0.2", "--sort", "worker"])
        )
        terminal.shows("2 workers, 2 threads")
        assert "1049h" in terminal.raw
        terminal.until(lambda: _IN_ORDER.search(terminal.frame()), "both workers, in order")
    terminal.shows("no answer from the scheduler for")
    assert "2 workers" in terminal.frame()
    with cluster(port=int(address.rpartition(":")[2])):
        terminal.until(
            lambda: "2 workers" in terminal.frame() and "no answer" not in terminal.frame(), "an answer"
        )
        terminal.press("\x03")
        assert terminal.status() == (130, True)


@pytest.mark.cluster
def test_a_signal_ends_it_and_gives_the_terminal_back(terminal):
    terminal.types(shlex.join([*COMMAND, "--scheduler", "tcp://127.0.0.1:9"]))
    terminal.shows("no answer from the scheduler for")
    terminal.kill_child()
    assert terminal.status() == (143, True)
