"""Run a program with dask_ferro on an emulated system: `python -m tests.windows win32 PROGRAM`, or darwin.

The imports of dask_ferro lack the modules, system calls, signals and /proc that the system lacks.  All other packages
(Dask, NumPy, the standard library) see the real system, since they have builds for each.  This does not emulate
differences in behaviour; it shows that dask_ferro uses nothing that the system lacks.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import signal
import sys
import sysconfig
from types import FrameType, ModuleType
from typing import Any

_LINUX = {"os": ("memfd_create", "sched_getaffinity", "O_TMPFILE"), "ctypes": ("PyDLL",)}
_POSIX = {
    "os": (
        "fork", "register_at_fork", "getuid", "geteuid", "getgid", "setsid", "killpg", "getpgid", "pread", "pwrite",
        "fchmod", "mkfifo", "uname", "sysconf", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY",
    ),
    "signal": (
        "SIGKILL", "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTSTP", "SIGWINCH", "SIGCHLD",
        "pthread_sigmask", "sigwait", "setitimer", "SIG_BLOCK", "SIG_SETMASK",
    ),
    "ctypes": ("CDLL",),
}  # fmt: skip
# The modules, and names in modules, that each system lacks.
SYSTEMS: dict[str, tuple[frozenset[str], dict[str, tuple[str, ...]]]] = {
    "darwin": (frozenset(), _LINUX),
    "win32": (
        frozenset({"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog"}),
        {name: (*_POSIX.get(name, ()), *_LINUX.get(name, ())) for name in ("os", "signal", "ctypes")},
    ),
}
_STANDARD = os.path.dirname(os.__file__)
_PACKAGES = sysconfig.get_paths()["purelib"]


class Lacking(ModuleType):
    """A module without some of its names; `sys` names another platform."""

    def __init__(self, module: ModuleType, names: tuple[str, ...], platform: str) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _names=frozenset(names), _platform=platform)

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on {self._platform}")
        if name == "platform" and self._module is sys:
            return self._platform
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def is_ours(name: str) -> bool:
    """Return whether a module is dask_ferro's."""
    return name.partition(".")[0] == "dask_ferro"


def become(platform: str) -> None:
    """Emulate another system for dask_ferro, before any of it is imported."""
    modules, names = SYSTEMS[platform]
    real = builtins.__import__
    shown = {m.__name__: Lacking(m, names.get(m.__name__, ()), platform) for m in (os, signal, ctypes, sys)}

    def imported(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if not is_ours((globals or {}).get("__name__", "")) or level:
            return real(name, globals, locals, fromlist, level)
        if name in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return shown.get(name) or real(name, globals, locals, fromlist, level)

    builtins.__import__ = imported
    sys.addaudithook(_no_proc)


def _no_proc(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise FileNotFoundError when a module of ours opens a file below /proc."""
    if event != "open" or not str(arguments[0]).startswith("/proc"):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None and is_ours(frame.f_globals.get("__name__", "")):
        raise FileNotFoundError(2, "no /proc on this system", str(arguments[0]))


def _is_standard(file: str) -> bool:
    return file.startswith((_STANDARD, "<")) and not file.startswith(_PACKAGES)


if __name__ == "__main__":
    become(sys.argv[1])
    exec(compile(sys.argv[2], "program", "exec"), {"__name__": "__main__"})
