"""`dask ferro top`: keys, order and screens as values, and the whole of it in a pseudo-terminal."""

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

import pytest
from distributed import Client, LocalCluster
from prompt_toolkit.input import create_pipe_input
from rich.console import Console

import dask_ferro as ff
from dask_ferro.errors import ConfigError
from dask_ferro.runtime.telemetry.top import look, where
from dask_ferro.views.terminal import console
from dask_ferro.views.top.choice import Choice, arranged, pressed
from dask_ferro.views.top.live import named
from dask_ferro.views.top.screen import screen, show_once
from tests.programs import ran
from tests.waiting import BOUND_S, until

NEW = Choice()
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
    ("sent", "wanted"),
    [
        pytest.param([b"sq"], ["s", "q"], id="characters"),
        pytest.param(
            [b"\x1b[A\x1bOB\x1b[5~\x1b[6~"], ["up", "down", "pageup", "pagedown"], id="arrows and pages"
        ),
        pytest.param([b"\x1b"], ["escape"], id="escape alone"),
        pytest.param([b"a\x7f\r"], ["a", "backspace", "enter"], id="what edits"),
        pytest.param([b"\x1b[Zs"], ["s"], id="unknown sequences are no keys"),
        pytest.param([b"\x1b[1;5As"], ["up", "s"], id="an arrow with a modifier is the arrow"),
        pytest.param(
            [b"\x01\x1b[1;5Pq\x1b[15~s"], ["q", "s"], id="what is no key of ours leaves nothing behind"
        ),
        pytest.param([b"\x1b[1~\x1b[4~\x1bOH"], ["home", "end", "home"], id="home and end, in all ways"),
        pytest.param(["é\xff".encode() + b"\xff"], ["é", "ÿ"], id="what is no text is no key"),
        pytest.param([b"\x80\x80\x80\x80s"], ["s"], id="nor is it kept"),
        pytest.param([b"s\x1b[1;", b"5A"], ["s", "up"], id="a sequence that is cut waits for its end"),
        pytest.param([b"a\xc3", b"\xa9"], ["a", "é"], id="so does a character that is cut"),
        pytest.param([b"\x1b[200~sq\x07\x1b[201~"], ["s", "q"], id="pasted text is its characters"),
    ],
)
def test_keys(sent, wanted):
    with create_pipe_input() as terminal:
        presses = []
        for data in sent:
            terminal.send_bytes(data)
            presses += terminal.read_keys()
        presses += terminal.flush_keys()
    assert [key for press in presses for key in named(press)] == wanted


@pytest.mark.parametrize(
    ("before", "typed", "wanted"),
    [
        pytest.param(Choice(), "s", Choice("worker", descending=False), id="s sorts by the next column"),
        pytest.param(Choice(), "sS", Choice(), id="S goes back"),
        pytest.param(Choice(), "r", Choice(descending=False), id="r reverses"),
        pytest.param(Choice(), "p", Choice(paused=True), id="p pauses"),
        pytest.param(Choice(), "pp", Choice(), id="p again goes on"),
        pytest.param(Choice(), "/gpq", Choice(wanted="gpq", typing=True), id="letters are text while typing"),
        pytest.param(
            Choice(), ["/", "a", "b", "backspace", "enter"], Choice(wanted="a"), id="enter keeps a filter"
        ),
        pytest.param(Choice(), ["/", "a", "escape"], Choice(), id="escape drops what is typed"),
        pytest.param(Choice(wanted="a"), ["escape"], Choice(), id="escape drops a filter"),
        pytest.param(Choice(), ["/", "enter"], Choice(), id="an empty filter is none"),
        pytest.param(Choice(), ["down", "down", "up"], Choice(first=1), id="arrows scroll"),
        pytest.param(Choice(), ["pagedown", "home"], Choice(), id="home is the first"),
        pytest.param(Choice(), ["up"], Choice(), id="there is nothing above the first"),
        pytest.param(
            Choice(first=3), "s", Choice("worker", descending=False), id="another order begins at its top"
        ),
        pytest.param(Choice(), "x\x1a", Choice(), id="other keys do nothing"),
    ],
)
def test_pressed(before, typed, wanted):
    choice = before
    for key in typed:
        choice = pressed(choice, key)
    assert choice == wanted


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        pytest.param(Choice(), ["w10", "w2", "w1"], id="by backlog, the most first"),
        pytest.param(Choice(descending=False), ["w1", "w2", "w10"], id="reversed"),
        pytest.param(Choice("worker", descending=False), ["w1", "w2", "w10"], id="names by their numbers"),
        pytest.param(Choice("thresh"), ["w2", "w10", "w1"], id="what is not known comes last"),
        pytest.param(Choice(wanted="W1"), ["w10", "w1"], id="filtered by name, in any case"),
        pytest.param(Choice(wanted="softmax"), ["w2"], id="filtered by what runs"),
        pytest.param(Choice(wanted="nothing"), [], id="nobody matches"),
    ],
)
def test_arranged(choice, wanted):
    workers = [
        worker("w1", backlog=0.1, threshold=None),
        worker("w10", backlog=3.0, threshold=0.001),
        worker("w2", backlog=2.0, running=["mlp-softmax 1"]),
    ]
    assert [row["name"] for row in arranged(workers, choice)] == wanted


def drawn(facts, choice=NEW, trouble="", columns=80, lines=24):
    """The screen as text, without its styles."""
    out = io.StringIO()
    rows = facts["workers"] if facts else []
    Console(file=out, width=columns, height=lines).print(screen(facts, rows, choice, trouble, columns, lines))
    return out.getvalue().rstrip("\n").split("\n")


def finding(severity, sentence, **facts):
    return {
        "severity": severity,
        "where": (),
        "what": "waits",
        "sentence": sentence,
        "remedy": "do it",
        **facts,
    }


def overview(*findings):
    doing = ["6 of 10 tasks done (60%), 2 running", "the rest takes 2.0 s", "2 workers"]
    return {"health": "5 errors", "doing": doing, "findings": list(findings), "gained": ""}


ELASTIC = {"wanted": {"a": 4}, "jobs": {"running": 1}, "queue_wait": {"a": 12.0}, "why": "wide"}


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (40, 10), (200, 50), (80, 6), (20, 4)])
@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(
            seen([worker(f"w{i}") for i in range(100)], elastic=ELASTIC), id="more workers than lines"
        ),
        pytest.param(
            seen([worker("w1")], overview=overview(*[finding("error", "much " * 60)] * 9)), id="much is stuck"
        ),
        pytest.param(seen([worker("w1")]), id="fewer"),
        pytest.param(seen([]), id="none"),
        pytest.param(seen([worker("w" * 300)], ferro=False), id="long names"),
        pytest.param(None, id="nothing seen yet"),
    ],
)
def test_a_screen_is_as_long_and_wide_as_the_terminal(facts, columns, lines):
    text = drawn(facts, NEW, "no scheduler answers" * 20, columns, lines)
    assert max(len(line) for line in text) <= columns
    assert len(text) == lines


def test_80_columns_hold_what_matters():
    text = drawn(seen([worker("w1", backlog=12.3, **{"in": 12_345})], elastic=ELASTIC))
    assert text[0].startswith("dask ferro top  tcp://10.0.0.1:8786  1 worker, 2 threads")
    assert text[1:7] == [
        "health   5 errors",
        "doing    6 of 10 tasks done (60%), 2 running; the rest takes 2.0 s",
        "tasks    4 processing",
        "steals   5 confirmed, 1 refused, 0 stale; stolen work 1.5 s, moved in 100 ms (i…",
        "ops      mlp-gemm 75.0 %, mlp-relu 25.0 %",
        "elastic  wanted 4 a; 1 running; queue wait 12 s; wide",
    ]
    assert " ".join(text[7].split()) == "worker state dev running tasks backlog thresh memory in out"
    assert " ".join(text[8].split()) == "w1 busy cpu mlp-gemm 0,3 4 12.3 s 5 ms 25 % 12.3k 1"


@pytest.mark.parametrize(
    ("findings", "wanted"),
    [
        pytest.param([], ["health   5 errors"], id="none"),
        pytest.param(
            [("error", "w1 hangs")],
            ["health   5 errors", "error    w1 hangs.", "         To do: do it"],
            id="one, with its remedy",
        ),
        pytest.param(
            [("error", "word " * 40)],
            [
                "health   5 errors",
                "error    " + "word " * 13 + "word",
                "         " + "word " * 12 + "word ...",
                "         To do: do it",
            ],
            id="two lines of a long one",
        ),
        pytest.param(
            [("error", str(i)) for i in range(4)] + [("slow", "4")],
            [
                "health   5 errors (2 of them are not shown)",
                *(line for i in range(3) for line in (f"error    {i}.", "         To do: do it")),
            ],
            id="three of many",
        ),
        pytest.param(
            [("slow", "\x1b[2J")],
            ["health   5 errors", "slow     ?[2J.", "         To do: do it"],
            id="as text",
        ),
    ],
)
def test_health_and_what_is_stuck_come_first(findings, wanted):
    text = drawn(seen([worker("w1")], overview=overview(*(finding(*one) for one in findings))))
    doing = "doing    6 of 10 tasks done (60%), 2 running; the rest takes 2.0 s"
    assert [line.rstrip() for line in text[1 : len(wanted) + 2]] == [*wanted, doing]


def test_a_table_for_scripts_says_all_that_is_stuck_and_what_to_do(capsys):
    findings = [finding("error", f"thing {i}") for i in range(5)]
    show_once(console(), seen([worker("w1")], overview=overview(*findings)), [worker("w1")])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:6] == [*(f"error  thing {i}; do it" for i in range(5)), "5 errors"]


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        pytest.param(None, "connecting", id="before the first look"),
        pytest.param(seen([]), "no workers yet", id="no workers"),
        pytest.param(
            seen([worker("w")], ferro=False), "dask_ferro is not installed", id="without the plugin"
        ),
    ],
)
def test_an_empty_screen_says_what_it_waits_for(facts, wanted):
    assert wanted in "\n".join(drawn(facts))


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
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        where(**arguments)()


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
        seen = client.run_on_scheduler(look)
        client.gather(futures)
        ff.uninstall(client)
        bare = client.run_on_scheduler(look)
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
    assert table.stdout.splitlines()[0].strip() == "nothing is wrong"
    assert table.stdout.splitlines()[2].split()[:2] == ["scheduler", address]
    assert [line.split()[:2] for line in table.stdout.splitlines()[-2:]] == [["0", "idle"], ["1", "idle"]]
    assert "\x1b" not in table.stdout
    assert {row["name"] for row in json.loads(as_json.stdout)["workers"]} == {"0", "1"}


class Display:
    """The text that a terminal shows: what is sent to it, carried out."""

    _SENT = re.compile("\x1b\\[([0-9;?]*)([A-Za-z])|\x1b[=>]|(\x1b(?:\\[[0-9;?]*)?\\Z)|(.)", re.DOTALL)

    def __init__(self):
        self.rows, self.row, self.column, self._rest = [], 0, 0, ""

    def resize(self, columns, lines):
        self.columns, self.lines = columns, lines
        self.rows = [row[:columns].ljust(columns) for row in [*self.rows, *[""] * lines][:lines]]
        self.row, self.column = min(self.row, lines - 1), min(self.column, columns)

    def write(self, text):
        text, self._rest = self._rest + text, ""
        for numbers, order, rest, character in self._SENT.findall(text):
            self._rest = rest  # of a sequence that is cut: the last one
            if order:
                self._obey(order, [int(number or 0) for number in numbers.lstrip("?").split(";")])
            elif character in ("\r", "\n", "\b"):
                self._move(character)
            elif character.isprintable():
                self._put(character)

    def _put(self, character):
        if self.column == self.columns:
            self._move("\r")
            self._move("\n")
        row = self.rows[self.row]
        self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
        self.column += len(character)

    def _move(self, character):
        if character == "\n" and self.row == self.lines - 1:
            self.rows = [*self.rows[1:], " " * self.columns]
        elif character == "\n":
            self.row += 1
        else:
            self.column = 0 if character == "\r" else max(self.column - 1, 0)

    def _obey(self, order, numbers):
        first = numbers[0]
        blank = " " * self.columns
        if order == "H":
            self.row, self.column = max(first, 1) - 1, max(numbers[-1], 1) - 1 if len(numbers) > 1 else 0
        elif order in "AB":
            self.row += max(first, 1) * (1 if order == "B" else -1)
        elif order in "CD":
            self.column += max(first, 1) * (1 if order == "C" else -1)
        elif order == "K" or (order == "J" and first == 0):
            self.rows[self.row] = self.rows[self.row][: self.column].ljust(self.columns)
        # No order leads out of the screen: one that was sent for another size ends at its edge.
        if order in "HABCD":
            self.row = min(max(self.row, 0), self.lines - 1)
            self.column = min(max(self.column, 0), self.columns - 1)
        if order == "J":
            below = 0 if first == 2 else self.row + 1
            self.rows[below:] = [blank] * (self.lines - below)


class Terminal:
    """A program in a pseudo-terminal: what it shows, as the text of its newest frame."""

    def __init__(self, command, columns=80, lines=24):
        self._master, slave = pty.openpty()
        self.display = Display()
        self.resize(columns, lines)
        self._before = termios.tcgetattr(slave)
        self._slave = slave
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.program = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
            # The kernel sends signals to those whose controlling terminal it is.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.raw = ""

    def resize(self, columns, lines):
        self.display.resize(columns, lines)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, text):
        os.write(self._master, text.encode())

    def frame(self):
        return [line.rstrip() for line in self.display.rows]

    def until(self, predicate, seconds=30):
        """Read until a frame is as wanted; return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self._master], [], [], 0.05)[0]:
                said = os.read(self._master, 65536).decode(errors="replace")
                self.raw += said
                self.display.write(said)
            elif predicate(self.frame()):
                return self.frame()
        frame = "\n".join(self.frame())
        raise AssertionError(f"waited {seconds:g} s for a frame as wanted; last seen:\n{frame}")

    def shell(self):
        """Wait for the shell, and have it prompt as nothing else does."""
        self.types("PS1=rea''dy'> '")
        self.until(lambda _: self.raw.endswith("ready> "))

    def types(self, line):
        """Begin anew, with a line and enter."""
        self.raw = ""
        self.press(line + "\n")

    def is_plain(self):
        """Whether a program has left its screen, and shows the cursor."""
        on, off = (self.raw.rfind(code) for code in ("\x1b[?1049h", "\x1b[?1049l"))
        return on < off and not self.hides_cursor()

    def hides_cursor(self):
        return self.raw.rfind("\x1b[?25h") < self.raw.rfind("\x1b[?25l")

    def status(self):
        """Return the status of the shell's last program, and whether it has given the terminal back."""
        self.until(lambda _: self.raw.endswith("ready> "))
        self.press("echo status-$?-; stty -a; echo that-$((1))-\n")
        self.until(lambda _: "that-1-" in self.raw)
        reads_lines = re.search(r"[^-]icanon", self.raw) is not None
        return int(re.search(r"status-(\d+)-", self.raw)[1]), self.is_plain() and reads_lines

    def kill_child(self):
        """Send SIGTERM to the program in the foreground."""
        os.killpg(os.tcgetpgrp(self._master), signal.SIGTERM)

    def ended(self):
        """Return the exit status, and whether the terminal is as it was."""
        status = self.program.wait(20)
        return status, termios.tcgetattr(self._slave) == self._before

    def hang_up(self):
        """Close the terminal's end that a person sits at."""
        os.close(self._slave)
        os.close(self._master)
        self._slave = self._master = None

    def close(self):
        if self.program.poll() is None:
            self.program.kill()
            self.program.wait(BOUND_S)
        if self._master is not None:
            self.hang_up()


@pytest.fixture
def terminals():
    """Starts programs in terminals; none outlives its test."""
    opened = []

    def start(command):
        opened.append(Terminal(command))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def is_whole(frame):
    """Whether a screen has its first line first and its last line last."""
    return frame[0].startswith("dask ferro top") and frame[-1].startswith("q quit")


def has(text):
    return lambda frame: any(text in line for line in frame)


@pytest.mark.cluster
def test_it_is_driven_by_keys_and_survives_a_resize_and_the_clusters_absence(terminals):
    with cluster() as client:
        address = client.scheduler.address
        terminal = terminals([*COMMAND, "--scheduler", address, "--interval", "0.2"])
        frame = terminal.until(has("q quit"))
        frame = terminal.until(has("2 workers, 2 threads"))
        assert (is_whole(frame), terminal.hides_cursor()) == (True, True)
        assert [line.split()[0] for line in frame[7:9]] == ["0", "1"]
        terminal.press("sr")
        frame = terminal.until(has("sort: worker down"))
        assert [line.split()[0] for line in frame[7:9]] == ["1", "0"]
        terminal.press("r")
        terminal.press("/zzq")
        terminal.until(has("no worker matches the filter"))
        terminal.press("\x1b")
        terminal.until(lambda frame: frame[7:8] and frame[7].startswith("0"))
        terminal.press("p")
        terminal.until(has("PAUSED"))
        terminal.press("p")
        terminal.resize(150, 12)
        terminal.until(lambda frame: is_whole(frame) and "address" in frame[6] and not has("PAUSED")(frame))
        terminal.resize(80, 24)
    terminal.until(has("no answer from the scheduler for"))
    with cluster(port=int(address.rpartition(":")[2])):
        terminal.until(lambda frame: has("2 workers")(frame) and not has("no scheduler answers")(frame))
        terminal.press("q")
        assert terminal.ended() == (0, True)


@pytest.mark.cluster
def test_a_terminal_that_is_closed_ends_it(terminals):
    terminal = terminals([*COMMAND, "--scheduler", "tcp://127.0.0.1:9"])
    terminal.until(has("no answer from the scheduler for"))
    terminal.hang_up()
    assert terminal.program.wait(20) is not None


@pytest.mark.cluster
def test_it_can_be_stopped_and_goes_on_in_a_shell_and_ends_by_signals(terminals):
    terminal = terminals(["bash", "--norc", "--noprofile", "-i"])
    terminal.shell()
    asks = shlex.join([*COMMAND, "--scheduler", "tcp://127.0.0.1:9"])
    terminal.types(asks)
    terminal.until(has("no answer from the scheduler for"))
    terminal.resize(60, 10)  # the kernel signals the process group in the foreground
    terminal.until(lambda frame: is_whole(frame) and frame[1].endswith("…"))
    terminal.press("\x1a")  # Ctrl-Z
    terminal.until(has("Stopped"))
    assert terminal.is_plain()
    terminal.types("fg")
    terminal.until(lambda frame: has("no answer from the scheduler for")(frame) and is_whole(frame))
    terminal.press("\x03")  # Ctrl-C
    assert terminal.status() == (130, True)
    terminal.types(asks)
    terminal.until(lambda frame: has("no answer from the scheduler for")(frame) and is_whole(frame))
    terminal.kill_child()
    assert terminal.status() == (143, True)
    terminal.types("exit 0")
    assert terminal.program.wait(20) == 0
