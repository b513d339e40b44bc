"""Job configurations: YAML files that describe the jobs of a site and the bounds of their number.

    jobqueue:
      slurm: {...}               # the keys of dask-jobqueue, and those of `ff.SLURMCluster`
    ferro:
      elastic: {...}             # minimum, maximum, other options of `ff.Elastic`, and settings of that section

This module finds the file for a name and checks that it is complete and spelled correctly; all errors are reported
together.  It does not judge what only the site knows: partitions, accounts, limits. Variables in values for the batch
system are replaced here; those in values for the job's shell are left to it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dask.config
import yaml

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.options import meant, options_of
from dask_ferro.runtime.elastic.options import scale_parameters
from dask_ferro.runtime.jobs import job_keys
from dask_ferro.sections import OPTIONS, ElasticOptions

_PACKAGE = Path(str(files("dask_ferro")))
# An installed wheel has the folder inside the package, the source tree beside it.
_FOLDERS = (_PACKAGE / "jobqueue_configs", _PACKAGE.parent / "jobqueue_configs")
_OF_ELASTIC = tuple(key for key, _ in options_of(ElasticOptions))
# Keys that are no options of `ff.Elastic`, but settings in Dask's configuration.
_SETTINGS = tuple(key for key in _OF_ELASTIC if key.startswith(("failures", "copy-")))


@dataclass(frozen=True)
class JobConfig:
    """A checked description of a site's jobs, with the bounds of their number.

    Attributes
    ----------
    path : Path
    keywords : mapping
        Keywords of `ff.SLURMCluster`.
    elastic : mapping
        Options of `ff.Elastic`; "minimum" and "maximum" count workers (processes).
    settings : mapping
        Settings for Dask's configuration, applied when the cluster is made.
    """

    path: Path
    keywords: Mapping[str, Any]
    elastic: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    def bounded(self, minimum: int | None = None, maximum: int | None = None) -> JobConfig:
        """Return a copy with the given bounds replaced.

        Raises
        ------
        ConfigError
            If there is no maximum, or one below the minimum.
        """
        given = {"minimum": minimum, "maximum": maximum}
        bounds = {
            "minimum": 0,
            **self.elastic,
            **{key: value for key, value in given.items() if value is not None},
        }
        if "maximum" not in bounds:
            raise ConfigError(
                f"{self.path}: key ferro.elastic.maximum is missing, and no maximum was given: a number of workers"
            )
        if bounds["minimum"] > bounds["maximum"]:
            raise ConfigError(
                f"{self.path}: at least {bounds['minimum']} workers, but at most {bounds['maximum']}; give both bounds"
            )
        return replace(self, elastic=bounds)

    def cluster(self, **keywords: object) -> Any:
        """Return a cluster with its own scheduler and no job yet; keywords override those of the file.

        Raises
        ------
        ConfigError
            If it cannot start here: a network interface or a port that this machine does not have.
        """
        dask.config.set(self.settings)
        with self._blamed("the cluster did not start"):
            return _cluster_class()(**self._with(keywords))

    def scripts(self) -> dict[str, str]:
        """Return the job script of each pool as the site would get it, except for the scheduler's address.

        Nothing is started; the log folder is created.

        Raises
        ------
        ConfigError
            If a job cannot be described with these keywords.
        """
        with self._blamed("no job can be described so"):
            return asyncio.run(self._scripts())

    async def _scripts(self) -> dict[str, str]:
        # On a running event loop, Dask's clusters start when they are awaited; this one never is.
        cluster = _cluster_class()(asynchronous=True, **self._with({}))
        try:
            return {pool.name: cluster.job_script(pool.name) for pool in cluster.pools()}
        finally:
            await cluster.close()

    @contextmanager
    def _blamed(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(f"{self.path}: {what}: {error}") from error

    def _with(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return the class's keywords, with the scheduler options of both sides merged."""
        options = {**self.keywords.get("scheduler_options", {}), **keywords.get("scheduler_options", {})}
        return {**self.keywords, **keywords, **({"scheduler_options": options} if options else {})}


def load(name_or_path: str | Path) -> JobConfig:
    """Load a job configuration by the name of a shipped one, or by the path of a file.

    Raises
    ------
    ConfigError
        With all errors: no such file; unknown, missing or invalid keys; unset variables.

    Examples
    --------
    >>> load("local-test").keywords["walltime"]
    '00:10:00'
    """
    _need_dask_jobqueue()
    path = find(name_or_path)
    tree = _read(path)
    section = _jobs(path, tree)
    given = _mapping(_mapping(tree.get("ferro")).get("elastic"))
    if problems := [*_strangers(tree), *job_keys.problems(section), *_elastic_problems(given)]:
        raise ConfigError(f"{path}: " + "; ".join(problems))
    elastic = job_keys.dashed(given)
    settings = {f"ferro.elastic.{key}": value for key, value in elastic.items() if key in _SETTINGS}
    # Keys set to null keep their defaults, so they are not passed on.
    options = {
        key.replace("-", "_"): value
        for key, value in elastic.items()
        if key not in _SETTINGS and value is not None
    }
    return JobConfig(path, job_keys.keywords(section), options, settings)


def shipped() -> dict[str, Path]:
    """Return the shipped configurations, by name."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def find(name_or_path: str | Path) -> Path:
    """Return the path for a name or a path.

    Raises
    ------
    ConfigError
        If there is no such file.
    """
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if not path.is_file():
            raise ConfigError(f"job configuration {text!r}: no such file")
        return path
    known = shipped()
    if text not in known:
        raise ConfigError(
            f"no job configuration {text!r}{meant(text, known)}; shipped are {', '.join(known)}; "
            "one of your own is named by its path, such as ./mine.yaml"
        )
    return known[text]


# ---- the file ----------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, of which the last would win silently."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise yaml.MarkedYAMLError(
                problem=f"{', '.join(twice)} stands twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        # A subclass of the safe loader, so `yaml.load` is safe here.
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{path}: section jobqueue is missing; a file starts with jobqueue: and below it slurm:"
        )
    return tree


def _jobs(path: Path, tree: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the section with the keys of a job."""
    sections = _mapping(tree.get("jobqueue"))
    if not isinstance(sections.get("slurm"), Mapping):
        got = ", ".join(map(str, sections)) or "nothing"
        raise ConfigError(
            f"{path}: below jobqueue stands {got}; wanted slurm, with the keys of a job: for another batch system"
            " give ff.Elastic to dask-jobqueue's own cluster"
        )
    return job_keys.dashed(sections["slurm"])


def _strangers(tree: Mapping[str, object]) -> Iterator[str]:
    """Yield an error for each section that is not read from this file."""
    for path, known in (((), ("jobqueue", "ferro")), (("jobqueue",), ("slurm",)), (("ferro",), ("elastic",))):
        section: Any = tree
        for key in path:
            section = _mapping(section.get(key))
        for key in section:
            if key not in known:
                dotted = ".".join((*path, str(key)))
                hint = meant(str(key), known) or ": put it into ~/.config/dask"
                yield f"section {dotted} is not read from here{hint}"


def _elastic_problems(given: Mapping[str, Any]) -> Iterator[str]:
    known, elastic = ("minimum", "maximum", *_OF_ELASTIC), job_keys.dashed(given)
    strange = [key for key in given if str(key).replace("_", "-") not in known]
    for key in strange:
        yield f"unknown key ferro.elastic.{key}{meant(str(key), known)}; wanted some of {', '.join(known)}"
    bounds = {key: elastic[key] for key in ("minimum", "maximum") if elastic.get(key) is not None}
    wrong = {key: value for key, value in bounds.items() if type(value) is not int or value < 0}
    for key, value in wrong.items():
        yield f"ferro.elastic.{key}: got {value!r}, wanted a whole number of workers"
    if strange or wrong:
        return
    for key, value in elastic.items():
        is_told = key in _SETTINGS or (key in _OF_ELASTIC and value is not None)
        if is_told and (fault := config.fault(OPTIONS[f"elastic.{key}"], value)):
            yield f"configuration ferro.elastic.{key}: {fault}"
    try:
        scale_parameters(elastic.get("minimum"), elastic.get("maximum"), {})
    except ConfigError as error:
        yield f"ferro.elastic: {error}"


def _mapping(section: object) -> Mapping[str, Any]:
    return section if isinstance(section, Mapping) else {}


# ---- the class ---------------------------------------------------------------------------------------------


def _need_dask_jobqueue() -> None:
    if find_spec("dask_jobqueue") is None:
        raise ConfigError(
            "a batch system needs dask-jobqueue, which is not installed: pip install 'dask_ferro[slurm]'"
        )


def _cluster_class() -> Any:
    # Imported here, since dask-jobqueue is an extra.
    from dask_ferro.runtime.slurm.cluster import SLURMCluster

    return SLURMCluster
