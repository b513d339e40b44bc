"""A cluster's journal: the record of its jobs in a file, by which a cluster that is started again finds them.

    <file>               a line for each run, each change of a job, and each end in order; JSON with a checksum
    <file>.scheduler     "ADDRESS RUN" while a run is on: a job that starts finds its scheduler there, and the watchdog
                         of a run that was killed finds whether another one looks after its jobs
    <file>.ferro-lock    there while a run is on, as for the sinks of `ff.run`

Each line tells all of its job, so that a line that is lost costs one look at it: the last line may be cut short, and a
damaged one before it is left out, with a warning, for a cluster that refused to start over it would leave its jobs to
nobody.  A file without any line of ours is refused.  Each run begins by putting the newest line of each job in place of
the old ones.  Lines are not forced onto the disk one by one: what a crash of the machine takes is found again by the
run's tag in the jobs' comments.  Points in time are epoch seconds.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.lines import append, opened, put, sealed
from dask_ferro.lock import Hold, Words, held
from dask_ferro.runtime.records.record import ENDED, KEPT, JobRecord, is_said

logger = logging.getLogger(__name__)

ADDRESS = ".scheduler"
_WORDS = Words("journal", "kept", "cluster")
# What each line begins with.
_KIND = "ferro"
_BEGINNING = b'{"ferro": "'
_RUN, _JOB, _END = "cluster-run", "cluster-job", "cluster-end"
# Runs that ended in order, of which the newest are kept; and of those that were killed and of which no job is known.
_RUNS = 100


class ClusterRun(NamedTuple):
    """One run of a cluster, known by the tag in its jobs' comments."""

    tag: str
    job_name: str = ""
    began: float = 0.0
    ended: bool = False


class Told(NamedTuple):
    """What a journal tells.

    Attributes
    ----------
    runs : tuple of ClusterRun
        The newest last.
    records : tuple of JobRecord
        The newest of each job, in the order in which they were asked for.
    damaged : tuple of int
        The numbers of lines that were left out, from 1.
    torn : bool
        Whether the last line was cut short.
    """

    runs: tuple[ClusterRun, ...] = ()
    records: tuple[JobRecord, ...] = ()
    damaged: tuple[int, ...] = ()
    torn: bool = False

    @property
    def open_runs(self) -> tuple[ClusterRun, ...]:
        """Those that did not end in order: there may be jobs of theirs."""
        return tuple(run for run in self.runs if not run.ended)

    @property
    def following(self) -> int:
        """The number of the next job."""
        return max((record.order for record in self.records), default=-1) + 1


def parsed(text: bytes) -> Told:
    """Return what the content of a journal tells.

    Raises
    ------
    ValueError
        When there is something, and it has no line of ours.
    """
    runs: dict[str, ClusterRun] = {}
    records: dict[str, JobRecord] = {}
    damaged, torn = [], False
    lines = text.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        record = opened(line)
        if record is None or not _taken(record, runs, records):
            torn = number == len(lines)
            if not torn:
                damaged.append(number)
    is_first_line = torn and not damaged and (text.startswith(_BEGINNING) or _BEGINNING.startswith(text))
    if text.strip() and not runs and not records and not is_first_line:
        raise ValueError("it has no line of a journal")
    known = tuple(_with_end(record, runs.get(record.run)) for record in records.values())
    return Told(tuple(runs.values()), known, tuple(damaged), torn)


def _with_end(record: JobRecord, run: ClusterRun | None) -> JobRecord:
    """Return a record as it must be: a run that ended in order has no jobs, if the line of an end is missing."""
    if record.is_over or run is None or not run.ended:
        return record
    return replace(record, state=ENDED, ended=record.seen, ending="unknown: its cluster ended")


def _taken(told: dict[str, object], runs: dict[str, ClusterRun], records: dict[str, JobRecord]) -> bool:
    """Take in a line; return whether it is one of ours."""
    kind, tag, name = told.get(_KIND), told.get("run"), told.get("job_name", "")
    if not isinstance(name, str):
        return False
    if kind == _JOB:
        try:
            record = JobRecord.from_dict(told)
        except ValueError:
            return False
        records[record.name] = record
        # Its run's own line may be the damaged one.
        if record.run:
            runs.setdefault(record.run, ClusterRun(record.run, name))
        return True
    if kind not in (_RUN, _END) or not isinstance(tag, str) or not tag:
        return False
    if kind == _END:
        runs[tag] = runs.get(tag, ClusterRun(tag))._replace(ended=True)
    else:
        began = told.get("began", 0.0)
        if isinstance(began, bool) or not isinstance(began, int | float) or not is_said(began):
            return False
        runs[tag] = ClusterRun(tag, name, float(began))
    return True


def read(path: str | os.PathLike[str]) -> Told:
    """Return what a journal tells; one that is not there tells nothing.

    Raises
    ------
    ConfigError
        When it cannot be read, or is none.
    """
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        return Told()
    except OSError as error:
        raise ConfigError(f"journal {os.fspath(path)!r} cannot be read: {error.strerror}") from error
    try:
        told = parsed(text)
    except ValueError as error:
        raise ConfigError(f"journal {os.fspath(path)!r}: {error}; choose another file") from error
    if told.damaged:
        numbers = ", ".join(map(str, told.damaged[:10])) + (", ..." if len(told.damaged) > 10 else "")
        logger.warning("dask_ferro: journal %s: left out what is damaged: line %s", os.fspath(path), numbers)
    return told


class JobJournal:
    """The journal of a run that is on.

    Parameters
    ----------
    path : str or path
    run : str
        The run's tag.
    """

    def __init__(self, path: str | os.PathLike[str], run: str) -> None:
        self.path = os.path.realpath(os.path.expanduser(os.fspath(path)))
        self.run = run
        self._job_name = ""
        self._stack = ExitStack()
        self._pid = os.getpid()
        self._hold: Hold | None = None
        self._late: dict[str, JobRecord] = {}
        self._former: tuple[ClusterRun, ...] = ()

    @property
    def address_file(self) -> str:
        """Where the scheduler's address stands while the run is on."""
        return self.path + ADDRESS

    @property
    def is_late(self) -> bool:
        """Whether the disk did not take something so far."""
        return bool(self._late)

    def begin(self, job_name: str, now: float) -> Told:
        """Take the journal, and return what it told before this run.

        Raises
        ------
        ConfigError
            When another cluster has it, or it is none, or cannot be written.
        """
        self._job_name = job_name
        (self._hold,) = self._stack.enter_context(held([self.path], _WORDS))
        try:
            told = read(self.path)
            self._former = told.open_runs
            try:
                put(self.path, self._text(told, job_name, now))
            except OSError as error:
                raise ConfigError(f"journal {self.path!r} cannot be written: {error.strerror}") from error
        except BaseException:
            self.release()
            raise
        return told

    def _text(self, told: Told, job_name: str, now: float) -> bytes:
        """The newest of each, and this run."""
        over = [record for record in told.records if record.is_over][-KEPT:]
        live = [record for record in told.records if not record.is_over]
        asked = {record.run for record in live}
        ended = [run for run in told.runs if run.ended][-_RUNS:]
        idle = [run for run in told.open_runs if run.tag not in asked][-_RUNS:]
        busy = [run for run in told.open_runs if run.tag in asked]
        lines = [_run_line(run) for run in (*ended, *busy, *idle)]
        lines += [sealed({_KIND: _END, "run": run.tag}) for run in ended]
        names = {run.tag: run.job_name for run in told.runs}
        for record in sorted([*over, *live], key=lambda one: one.order):
            lines.append(_job_line(record, names.get(record.run, "")))
        return b"".join([*lines, _run_line(ClusterRun(self.run, job_name, now))])

    def announce(self, address: str) -> None:
        """Tell jobs and watchdogs who looks after them now.

        Raises
        ------
        ConfigError
            When that cannot be written.
        """
        try:
            put(self.address_file, f"{address} {self.run}\n".encode())
        except OSError as error:
            raise ConfigError(f"{self.address_file!r} cannot be written: {error.strerror}") from error

    def add(self, records: Iterable[JobRecord]) -> None:
        """Append records; what the disk does not take now goes with the next ones."""
        if self._hold is None or os.getpid() != self._pid:
            return
        failed = bool(self._late)
        # By name: of a job that changed twice while the disk was full, the newest line says all.
        self._late.update((record.name, record) for record in records)
        if not self._late:
            return
        try:
            self._hold.check()
            append(self.path, b"".join(_job_line(one, self._job_name) for one in self._late.values()))
            self._late.clear()
        except ConfigError as error:
            logger.error("dask_ferro: %s; this cluster writes no more into it", error)
            self.release()
        except OSError as error:
            if not failed:
                logger.warning("dask_ferro: journal %s: %s; it is tried again", self.path, error)

    def end(self, now: float, *, jobs_left: bool) -> None:
        """Write that the run ended, and let the journal go; where jobs are left, the next run finds it unfinished."""
        if self._hold is None:
            return
        self.add(())
        if not self._is_ours():
            return
        if not jobs_left:
            self._write_ends([*(run.tag for run in self._former), self.run], now)
        # Another run that took over has written its own address, which stays.
        with suppress(OSError):
            _, _, run = Path(self.address_file).read_text(errors="replace").strip().partition(" ")
            if run == self.run:
                os.unlink(self.address_file)
        self.release()

    def abandon(self, now: float) -> None:
        """Let the journal go, of a run that did not start; it has no jobs, so that nobody has to look for them."""
        if self._is_ours():
            self._write_ends([self.run], now)
            self.release()

    def drop(self, tags: Iterable[str], now: float) -> None:
        """Write that runs before this one have no jobs left."""
        gone = set(tags)
        if gone and self._is_ours() and self._write_ends(sorted(gone), now):
            self._former = tuple(run for run in self._former if run.tag not in gone)

    def _write_ends(self, tags: Iterable[str], now: float) -> bool:
        try:
            append(self.path, b"".join(sealed({_KIND: _END, "run": tag, "at": now}) for tag in tags))
        except OSError as error:
            logger.warning("dask_ferro: journal %s: %s", self.path, error)
            return False
        return True

    def _is_ours(self) -> bool:
        """Whether the lock is still this run's; it may have been taken over, as this process seemed to be dead."""
        if self._hold is None or os.getpid() != self._pid:  # a forked process has no journal
            return False
        try:
            self._hold.check()
        except ConfigError as error:
            logger.error("dask_ferro: %s; this cluster writes no more into it", error)
        # Nobody knows whose it is, so that nothing is touched.
        except OSError as error:
            logger.warning("dask_ferro: journal %s: %s", self.path, error)
        else:
            return True
        self.release()
        return False

    def release(self) -> None:
        """Let others have the journal.  Idempotent."""
        self._hold = None
        if os.getpid() == self._pid:
            self._stack.close()


def _run_line(run: ClusterRun) -> bytes:
    return sealed({_KIND: _RUN, "run": run.tag, "job_name": run.job_name, "began": run.began})


def _job_line(record: JobRecord, job_name: str) -> bytes:
    return sealed({_KIND: _JOB, **record.as_dict(), "job_name": job_name})


def by_file(script: str, placeholder: str, address: str, path: str) -> str:
    """Return a job's script that looks for its scheduler's address when it starts.

    Parameters
    ----------
    placeholder : str
        What stands for the address in the script.
    address : str
        Where no such file can be read: it is on no shared file system, or the cluster is gone.
    path : str
        The file.
    """
    file = shlex.quote(path)
    look = (
        f"FERRO_SCHEDULER={shlex.quote(address)}\n"
        f'if [ -r {file} ] && read -r ferro_found ferro_run <{file} && [ -n "$ferro_found" ]; then\n'
        '    FERRO_SCHEDULER="$ferro_found"\n'
        "fi\n"
    )
    # A script of the user's own class: it has no line before which to look.
    if "FERRO_WORKER=" not in script:
        return script.replace(placeholder, address)
    return script.replace(placeholder, '"$FERRO_SCHEDULER"').replace(
        "FERRO_WORKER=", look + "FERRO_WORKER=", 1
    )


def names_of(runs: Sequence[ClusterRun]) -> tuple[str, ...]:
    """Return the names that the jobs of some runs have."""
    return tuple(dict.fromkeys(run.job_name for run in runs if run.job_name))
