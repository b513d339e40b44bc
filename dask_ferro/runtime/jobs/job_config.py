"""Job configurations: files of Dask's configuration with dask-jobqueue's section, shipped or of the user's own.

    jobqueue:
      slurm: {...}               # the keys of dask-jobqueue, and the keywords of `ff.SLURMCluster`
    ferro:
      elastic: {...}             # minimum, maximum, and other options

Such a file lies in ~/.config/dask, or is named on the command line.  `ff.SLURMCluster` reads and checks the section.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import dask.config

from dask_ferro.errors import ConfigError, did_you_mean

_PACKAGE = Path(str(files("dask_ferro")))
# An installed wheel has the folder inside the package, the source tree beside it.
_FOLDERS = (_PACKAGE / "jobqueue_configs", _PACKAGE.parent / "jobqueue_configs")


def use(name_or_path: str | Path) -> Path:
    """Merge a file over the configuration of this process, and return its path.

    Raises
    ------
    ConfigError
        If there is no such file, or Dask cannot read it.
    """
    path = find(name_or_path)
    try:
        trees = list(dask.config.collect_yaml([str(path)]))
    except ValueError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not trees:
        raise ConfigError(f"{path}: it is empty, or cannot be read")
    dask.config.update(dask.config.config, trees[0])
    return path


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
            f"no job configuration {text!r}{did_you_mean(text, known)}; shipped are {', '.join(known)}; "
            "one of your own is named by its path, such as ./mine.yaml"
        )
    return known[text]
