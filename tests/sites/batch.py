"""A small batch system for tests: it queues scripts, runs them as processes within a number of cores, and ends them.

The test's own process is the server, a thread with a socket; `qsub`, `qstat`, `qselect` and `qdel` are executables that
ask it, and so are `submit`, `jobs` and `stop` of another batch system, which prints other words.  It does as PBS does,
as far as its manual tells: SIGTERM to all of a job at `qdel`, SIGKILL after a delay, SIGKILL to what is left when the
job's shell has ended, states Q, R, E and F, "Unknown Job Id", lines that are cut at 79 columns.  It is no PBS: what a
real one does otherwise is not seen here.  A command fails, hangs, says nothing or what was true before, as a test says.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SERVER = "pbs01.test"
# Between two turns of the server, and from the end of a job's shell until it is finished.
_TURN, _EXITING = 0.03, 0.1

_CLIENT = """#!{python} -IS
import json, socket, sys, time
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
import os
asked = dict(command={name!r}, words=sys.argv[1:], folder=os.getcwd(), stdin="" if {quiet} else sys.stdin.read())
server.sendall(json.dumps(asked).encode() + b"\\n")
answer = json.loads(server.makefile().readline() or '{{"status": 1, "out": "", "err": "server is gone", "sleep": 0}}')
time.sleep(answer["sleep"])
sys.stdout.write(answer["out"])
sys.stderr.write(answer["err"])
sys.exit(answer["status"])
"""


@dataclass
class Job:
    """A job, as the server knows it."""

    number: int
    name: str
    script: str
    folder: str
    variables: str
    cores: int
    walltime: float | None
    queued: float = field(default_factory=time.time)
    state: str = "Q"
    comment: str = ""
    process: subprocess.Popen[bytes] | None = None
    started: float | None = None
    killed_at: float | None = None
    ended: float | None = None
    status: int | None = None
    terms: int = 0

    @property
    def id(self) -> str:
        return f"{self.number}.{SERVER}"


class Answer(Exception):
    """What a command prints, and its status."""

    def __init__(self, out: str = "", err: str = "", status: int = 0) -> None:
        super().__init__(out, err, status)
        self.out, self.err, self.status = out, err, status


class Batch:
    """The server."""

    def __init__(self, cores: int = 4, kill_delay: float = 8.0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ferro-batch-", dir="/tmp"))  # paths of sockets are short
        self.cores, self.kill_delay = cores, kill_delay
        self.queues: tuple[str, ...] = ("workq",)
        self.jobs: dict[int, Job] = {}
        self.does: dict[str, str] = {}
        self.calls: list[tuple[str, list[str]]] = []
        self._told: deque[tuple[float, dict[int, tuple[Any, ...]]]] = deque(maxlen=2000)
        self._lock = threading.RLock()
        self._is_over = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / "server"))
        self._listener.listen(64)
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        for name in ("qsub", "qstat", "qselect", "qdel", "submit", "jobs", "stop"):
            quiet = name not in ("qsub", "submit")
            address = str(self.folder / "server")
            path = self.bin / name
            path.write_text(_CLIENT.format(python=sys.executable, address=address, name=name, quiet=quiet))
            path.chmod(0o755)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._serve, self._run)]
        for thread in self._threads:
            thread.start()

    # -- what a test asks ----------------------------------------------------------------------------------------

    def states(self) -> dict[int, str]:
        """Return the state of each job, in truth."""
        with self._lock:
            return {number: job.state for number, job in self.jobs.items()}

    def alive(self) -> list[int]:
        """Return the jobs that are not finished."""
        return [number for number, state in self.states().items() if state != "F"]

    def count(self, command: str) -> int:
        """Return how often a command was called."""
        return sum(name == command for name, _ in self.calls)

    def close(self) -> None:
        """End all jobs and the server."""
        self._is_over = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in it
        self._listener.close()
        for thread in self._threads:
            thread.join(5.0)
        for job in self.jobs.values():
            if job.process is not None:
                self._signal(job, signal.SIGKILL)
                job.process.wait(10)
        subprocess.run(["rm", "-r", str(self.folder)], check=True, timeout=30)

    # -- the jobs ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            with self._lock:
                for job in self.jobs.values():
                    self._turn(job, time.time())
                self._told.append((time.time(), {n: self._fact(job) for n, job in self.jobs.items()}))
            time.sleep(_TURN)

    def _turn(self, job: Job, now: float) -> None:
        if job.state == "Q":
            used = sum(other.cores for other in self.jobs.values() if other.state in "RE")
            if job.cores > self.cores:
                what = f"(R: {job.cores} A: {self.cores} T: {self.cores})"
                job.comment = f"Can Never Run: Insufficient amount of resource: ncpus {what}"
            elif used + job.cores <= self.cores:
                self._start(job, now)
            else:
                job.comment = "Not Running: Insufficient amount of resource: ncpus"
        elif job.state == "R":
            assert job.process is not None
            assert job.started is not None
            if (status := job.process.poll()) is not None:
                self._signal(job, signal.SIGKILL)  # what its shell has left behind
                job.status = 256 - status if status < 0 else status
                job.state, job.ended = "E", now
            elif job.killed_at is None and job.walltime is not None and now > job.started + job.walltime:
                self._end(job, now)
            elif job.killed_at is not None and now > job.killed_at + self.kill_delay:
                self._signal(job, signal.SIGKILL)
        elif job.state == "E" and job.ended is not None and now > job.ended + _EXITING:
            job.state = "F"

    def _start(self, job: Job, now: float) -> None:
        path = self.folder / f"{job.number}.SC"
        path.write_text(job.script)
        path.chmod(0o755)
        given = dict(pair.partition("=")[::2] for pair in job.variables.split(",") if pair)
        environment = os.environ | given | {"PBS_JOBID": job.id, "PBS_O_WORKDIR": job.folder}
        out, err = self._outputs(job)
        with open(out, "ab") as stdout, open(err, "ab") as stderr:
            job.process = subprocess.Popen(
                [str(path)], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        job.state, job.started = "R", now
        job.comment = f"Job run at {time.ctime(now)} on (n1:ncpus={job.cores})"

    def _outputs(self, job: Job) -> tuple[str, str]:
        found = []
        for letter, ending in (("o", "OU"), ("e", "ER")):
            given = directive(job.script, letter)
            path = os.path.join(job.folder, given or f"{job.name}.{letter}{job.number}")
            found.append(os.path.join(path, f"{job.id}.{ending}") if path.endswith("/") else path)
        return found[0], found[1]

    def _end(self, job: Job, now: float) -> None:
        if job.state == "Q":
            job.state, job.ended = "F", now
        elif job.state == "R" and job.killed_at is None:
            job.killed_at = now
            job.terms += 1
            self._signal(job, signal.SIGTERM)

    @staticmethod
    def _signal(job: Job, number: int) -> None:
        assert job.process is not None
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, number)

    # -- the commands --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rw") as stream:
            asked = json.loads(stream.readline())
            with self._lock:
                answer = self._obey(asked)
            stream.write(json.dumps(answer) + "\n")

    def _obey(self, asked: dict[str, Any]) -> dict[str, Any]:
        name, does = asked["command"], self.does.get(asked["command"], "")
        self.calls.append((name, asked["words"]))
        answer, sleep = Answer(), 40 if does == "hang" else 0
        try:
            if does == "fail":
                raise Answer(err=f"{name}: cannot connect to server {SERVER}\n", status=1)
            if does not in ("hang", "empty"):
                getattr(self, f"_{name}")(asked | {"does": does})
        except Answer as given:
            answer = given
        except (ValueError, IndexError) as error:
            answer = Answer(err=f"usage: {name} ... ({error!r})\n", status=2)
        if does == "loses answer":  # it was done all the same, once
            self.does.pop(name)
            answer = Answer(err=f"{name}: End of File\n", status=1)
        return {"status": answer.status, "out": answer.out, "err": answer.err, "sleep": sleep}

    def _qsub(self, asked: dict[str, Any]) -> None:
        options, script = words(asked["words"], "Nv"), asked["stdin"]
        if directive(script, "q") not in ("", *self.queues):
            raise Answer(err="qsub: Unknown queue\n", status=170)
        limit = re.search(r"^#PBS -l walltime=(\d+):(\d+):(\d+)", script, re.MULTILINE)
        hours, minutes, seconds = map(int, limit.groups()) if limit else (0, 0, 0)
        cores = re.search(r"ncpus=(\d+)", script)
        job = self._queued(
            options["N"], script, asked["folder"], options.get("v", ""), int(cores[1]) if cores else 1,
            3600 * hours + 60 * minutes + seconds if limit else None,
        )  # fmt: skip
        raise Answer(f"{job.id}\n")

    def _queued(self, *facts: Any) -> Job:
        number = len(self.jobs) + 1
        self.jobs[number] = Job(number, *facts)
        return self.jobs[number]

    def _qselect(self, asked: dict[str, Any]) -> None:
        options = words(asked["words"], "uN")
        found = [job.id for job in self.jobs.values() if job.state != "F" and job.name == options["N"]]
        raise Answer("".join(f"{job_id}\n" for job_id in found))

    def _qstat(self, asked: dict[str, Any]) -> None:
        ids = [word for word in asked["words"] if not word.startswith("-")]
        if "-Q" in asked["words"]:
            delay = f"    kill_delay = {self.kill_delay:g}\n\n"
            raise Answer(f"Queue: workq\n    queue_type = Execution\n{delay}")
        out, err, status = "", "", 0
        facts = self._facts(asked["does"])
        if not ids:
            raise Answer("".join(self._long(n, fact) for n, fact in facts.items() if fact[0] != "F"))
        for job_id in ids:
            fact = facts.get(int(job_id.partition(".")[0]))
            if fact is None:
                err, status = err + f"qstat: Unknown Job Id {job_id}\n", 153
            elif fact[0] == "F" and "-x" not in asked["words"]:
                err, status = err + f"qstat: {job_id} Job has finished, use -x or -H\n", 35
            else:
                out += self._long(int(job_id.partition(".")[0]), fact)
        raise Answer(out, err, status)

    def _qdel(self, asked: dict[str, Any]) -> None:
        err = ""
        for job_id in asked["words"]:
            job = self.jobs.get(int(job_id.partition(".")[0]))
            if job is None:
                err += f"qdel: Unknown Job Id {job_id}\n"
            elif job.state == "F":
                err += f"qdel: Job has finished {job_id}\n"
            else:
                self._end(job, time.time())
        raise Answer(err=err, status=1 if err else 0)

    def _fact(self, job: Job) -> tuple[Any, ...]:
        return (job.state, job.started, job.status, job.comment)

    def _facts(self, does: str) -> dict[int, tuple[Any, ...]]:
        """What `qstat` knows: the truth, or that of some seconds ago."""
        if not does.startswith("old "):
            return {number: self._fact(job) for number, job in self.jobs.items()}
        at = time.time() - float(does.split()[1])
        return next((facts for told, facts in reversed(self._told) if told <= at), {})

    def _long(self, number: int, fact: tuple[Any, ...]) -> str:
        job, (state, started, status, comment) = self.jobs[number], fact
        limit = [] if job.walltime is None else [f"Resource_List.walltime = {clock(job.walltime)}"]
        ran = [] if started is None else [f"stime = {time.ctime(started)}", "exec_host = n1/0"]
        out, err = self._outputs(job)
        variables = f"PBS_O_HOME=/home/me,PBS_O_PATH={'/usr/bin:' * 9},PBS_O_QUEUE=workq,{job.variables}"
        facts = [
            f"Job_Name = {job.name}", "Job_Owner = me@login", f"job_state = {state}", "queue = workq",
            f"qtime = {time.ctime(job.queued)}", f"Error_Path = login:{err}", f"Output_Path = login:{out}",
            "Hold_Types = n", *limit, *ran, f"Variable_List = {variables}",
            *([f"comment = {comment}"] if comment else []),
            *([f"Exit_status = {status}"] if state == "F" and status is not None else []),
        ]  # fmt: skip
        lines = ["\n\t".join(cut(f"    {line}")) for line in facts]
        return "\n".join([f"Job Id: {job.id}", *lines]) + "\n\n"

    # -- another batch system's --------------------------------------------------------------------------------------

    def _submit(self, asked: dict[str, Any]) -> None:
        options = words(asked["words"], "JDn")
        script = Path(options["n"]).read_text() if "n" in options else asked["stdin"]
        job = self._queued(options["J"], script, asked["folder"], f"LABEL={options.get('D', '')}", 1, None)
        raise Answer(f"Job <{job.number}> is submitted to default queue <normal>.\n")

    def _jobs(self, asked: dict[str, Any]) -> None:
        names = {"Q": "PEND", "R": "RUN", "E": "RUN"}
        rows = [
            f"{job.number:<8}{names[job.state]:<6}{job.variables.removeprefix('LABEL='):<40}{job.name}"
            for job in self.jobs.values()
            if job.state in names
        ]
        if not rows:
            raise Answer(err="No unfinished job found\n")
        raise Answer("\n".join(["JOBID   STAT  LABEL" + " " * 35 + "NAME", *rows]) + "\n")

    def _stop(self, asked: dict[str, Any]) -> None:
        for number in map(int, asked["words"]):
            if number in self.jobs:
                self._end(self.jobs[number], time.time())
        raise Answer("".join(f"Job <{number}> is being terminated\n" for number in asked["words"]))


def words(given: list[str], letters: str) -> dict[str, str]:
    """Return options with values; others are an error, as they would be there."""
    found, rest = {}, list(given)
    while rest:
        option = rest.pop(0)
        if len(option) != 2 or option[0] != "-" or option[1] not in letters:
            raise ValueError(option)
        found[option[1]] = rest.pop(0)
    return found


def directive(script: str, letter: str) -> str:
    """Return an option of a script's directives."""
    lines = [shlex.split(line[5:]) for line in script.splitlines() if line.startswith("#PBS ")]
    return next((line[1] for line in lines if line[0] == f"-{letter}"), "")


def clock(seconds: float) -> str:
    """Return a walltime as PBS writes it."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"


def cut(line: str) -> list[str]:
    """Cut a line as `qstat` does, wherever it is full."""
    return [line[:79], *textwrap.wrap(line[79:], 71, break_on_hyphens=False, drop_whitespace=False)]
