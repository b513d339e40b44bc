"""Job configurations: files of Dask's configuration with dask-jobqueue's section, shipped or of the user's own.

    jobqueue:
      slurm: {...}               # the keys of dask-jobqueue, and the keywords of `ff.SLURMCluster`
    ferro:
      elastic: {...}             # minimum, maximum, and other options

Such a file lies in ~/.config/dask, or is named on the command line.  `ff.SLURMCluster` reads and checks the section.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import dask.config

from dask_ferro.errors import ConfigError, did_you_mean

_PACKAGE = Path(str(files("dask_ferro")))
# An installed wheel has the folder inside the package, the source tree beside it.
_FOLDERS = (_PACKAGE / "jobqueue_configs", _PACKAGE.parent / "jobqueue_configs")


def use(name_or_path: str | Path) -> Path:
    """Merge a file, by its path or the name of a shipped one, over the configuration of this process; return its path.

    Raises
    ------
    ConfigError
        If there is no such file, or Dask cannot read it.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix not in (".yaml", ".yml") and len(path.parts) == 1:
        known = shipped_configs()
        if path.name not in known:
            raise ConfigError(
                f"no job configuration {path.name!r}{did_you_mean(path.name, known)}; shipped are {', '.join(known)}. "
                "Name your own file by its path, such as ./mine.yaml"
            )
        path = known[path.name]
    try:
        trees = list(dask.config.collect_yaml([str(path)]))
    except ValueError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not trees:
        raise ConfigError(f"job configuration {str(path)!r}: no such file, or it is empty or cannot be read")
    dask.config.update(dask.config.config, trees[0])
    return path


def shipped_configs() -> dict[str, Path]:
    """Return the shipped configurations, by name."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}
