"""A cluster's journal: a file with the records of its jobs, from which a restarted cluster finds them.

    <file>               a line for each run, each change of a job, and each orderly end; JSON with a checksum
    <file>.scheduler     "ADDRESS RUN" during a run: a starting job finds its scheduler there, and the watchdog of a
                         killed run finds whether another run looks after its jobs
    <file>.ferro-lock    exists during a run, as for the sinks of `ff.run`

Each line has the complete record of a job, so that a lost line costs only one state.  The last line may be cut short;
a damaged line before it is skipped with a warning, since a cluster that refused to start would leave its jobs
unattended.  A file without any valid line is refused.  Each run starts by rewriting the file with the newest line of
each job.  Lines are not synced one by one: jobs lost by a crash of the machine are found by the run's tag in their
comments.  Points in time are epoch seconds.
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
# The key at the start of each line.
_KIND = "ferro"
_BEGINNING = b'{"ferro": "'
_RUN, _JOB, _END = "cluster-run", "cluster-job", "cluster-end"
# The most runs kept that ended in order, and of killed runs without known jobs; the newest are kept.
_RUNS = 100


class ClusterRun(NamedTuple):
    """One run of a cluster, identified by the tag in its jobs' comments."""

    tag: str
    job_name: str = ""
    began: float = 0.0
    ended: bool = False


class Told(NamedTuple):
    """The content of a journal.

    Attributes
    ----------
    runs : tuple of ClusterRun
        The runs, the newest last.
    records : tuple of JobRecord
        The newest record of each job, in the order of the requests.
    damaged : tuple of int
        The numbers of skipped lines, from 1.
    torn : bool
        Whether the last line was cut short.
    """

    runs: tuple[ClusterRun, ...] = ()
    records: tuple[JobRecord, ...] = ()
    damaged: tuple[int, ...] = ()
    torn: bool = False

    @property
    def open_runs(self) -> tuple[ClusterRun, ...]:
        """The runs that did not end in order, and may have left jobs."""
        return tuple(run for run in self.runs if not run.ended)

    @property
    def following(self) -> int:
        """The number of the next job."""
        return max((record.order for record in self.records), default=-1) + 1


def parsed(text: bytes) -> Told:
    """Parse the content of a journal.

    Raises
    ------
    ValueError
        If it is not empty and has no valid line.
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
    """Return a record, ended if its run ended in order: such a run has no jobs, even if a line is missing."""
    if record.is_over or run is None or not run.ended:
        return record
    return replace(record, state=ENDED, ended=record.seen, ending="unknown: its cluster ended")


def _taken(told: dict[str, object], runs: dict[str, ClusterRun], records: dict[str, JobRecord]) -> bool:
    """Add a line's content; return whether the line is valid."""
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
    """Read a journal; a missing file is an empty journal.

    Raises
    ------
    ConfigError
        If it cannot be read, or is not a journal.
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
        logger.warning("dask_ferro: journal %s: skipped damaged lines: %s", os.fspath(path), numbers)
    return told


class JobJournal:
    """The journal of the current run.

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
        """The file with the scheduler's address during the run."""
        return self.path + ADDRESS

    @property
    def is_late(self) -> bool:
        """Whether some records could not be written so far."""
        return bool(self._late)

    def begin(self, job_name: str, now: float) -> Told:
        """Lock the journal, and return its content from before this run.

        Raises
        ------
        ConfigError
            If another cluster uses it, if it is not a journal, or if it cannot be written.
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
        """Return the new content: the newest line of each job and run, and this run."""
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
        """Publish this run's scheduler address for jobs and watchdogs.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        try:
            put(self.address_file, f"{address} {self.run}\n".encode())
        except OSError as error:
            raise ConfigError(f"{self.address_file!r} cannot be written: {error.strerror}") from error

    def add(self, records: Iterable[JobRecord]) -> None:
        """Append records; those that the disk refuses are written with the next ones."""
        if self._hold is None or os.getpid() != self._pid:
            return
        failed = bool(self._late)
        # By name: for a job that changed twice while the disk was full, the newest line is complete.
        self._late.update((record.name, record) for record in records)
        if not self._late:
            return
        try:
            self._hold.check()
            append(self.path, b"".join(_job_line(one, self._job_name) for one in self._late.values()))
            self._late.clear()
        except ConfigError as error:
            logger.error("dask_ferro: %s; this cluster stops writing to it", error)
            self.release()
        except OSError as error:
            if not failed:
                logger.warning("dask_ferro: journal %s: %s; will retry", self.path, error)

    def end(self, now: float, *, jobs_left: bool) -> None:
        """Write the end of the run and release the journal; with jobs left, the run stays open for the next one."""
        if self._hold is None:
            return
        self.add(())
        if not self._is_ours():
            return
        if not jobs_left:
            self._write_ends([*(run.tag for run in self._former), self.run], now)
        # The address of another run that took over stays.
        with suppress(OSError):
            _, _, run = Path(self.address_file).read_text(errors="replace").strip().partition(" ")
            if run == self.run:
                os.unlink(self.address_file)
        self.release()

    def abandon(self, now: float) -> None:
        """Release the journal of a run that did not start, and mark it as without jobs."""
        if self._is_ours():
            self._write_ends([self.run], now)
            self.release()

    def drop(self, tags: Iterable[str], now: float) -> None:
        """Write that previous runs have no jobs left."""
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
        """Return whether the lock is still this run's; it may have been taken over while this process seemed dead."""
        if self._hold is None or os.getpid() != self._pid:  # a forked process has no journal
            return False
        try:
            self._hold.check()
        except ConfigError as error:
            logger.error("dask_ferro: %s; this cluster stops writing to it", error)
        # The owner is unknown, so nothing is written.
        except OSError as error:
            logger.warning("dask_ferro: journal %s: %s", self.path, error)
        else:
            return True
        self.release()
        return False

    def release(self) -> None:
        """Release the lock.  Idempotent."""
        self._hold = None
        if os.getpid() == self._pid:
            self._stack.close()


def _run_line(run: ClusterRun) -> bytes:
    return sealed({_KIND: _RUN, "run": run.tag, "job_name": run.job_name, "began": run.began})


def _job_line(record: JobRecord, job_name: str) -> bytes:
    return sealed({_KIND: _JOB, **record.as_dict(), "job_name": job_name})


def by_file(script: str, placeholder: str, address: str, path: str) -> str:
    """Return a job's script with code that reads its scheduler's address when it starts.

    Parameters
    ----------
    placeholder : str
        The text in the script that stands for the address.
    address : str
        The address to use if the file cannot be read: there is no shared file system, or the cluster is gone.
    path : str
        The file with the address.
    """
    file = shlex.quote(path)
    look = (
        f"FERRO_SCHEDULER={shlex.quote(address)}\n"
        f'if [ -r {file} ] && read -r ferro_found ferro_run <{file} && [ -n "$ferro_found" ]; then\n'
        '    FERRO_SCHEDULER="$ferro_found"\n'
        "fi\n"
    )
    # The script of a user's own class has no line before which to insert the code.
    if "FERRO_WORKER=" not in script:
        return script.replace(placeholder, address)
    return script.replace(placeholder, '"$FERRO_SCHEDULER"').replace(
        "FERRO_WORKER=", look + "FERRO_WORKER=", 1
    )


def names_of(runs: Sequence[ClusterRun]) -> tuple[str, ...]:
    """Return the job names of some runs."""
    return tuple(dict.fromkeys(run.job_name for run in runs if run.job_name))
