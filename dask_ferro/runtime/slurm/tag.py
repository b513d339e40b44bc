"""The tag of a cluster: a word in the comment of each of its jobs, which names the process that looks after them.

    ferro-<machine>-<process>-<cluster>.<submission>

A listing of the queue is the record of all clusters' jobs.  A job whose process is gone belongs to nobody, and any
other cluster of the same user, machine and job name cancels it.  A process on another machine cannot be judged: its
jobs are left alone.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from contextlib import suppress
from functools import cache

import xxhash

_TAG = re.compile(r"\bferro-([0-9a-f]{8})-(\d{1,9})-[0-9a-f]{8}\.")


def new_tag() -> str:
    """Return the tag of a cluster of this process."""
    return f"ferro-{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def is_orphan(comment: str) -> bool:
    """Return whether a job's comment has the tag of a process of this machine that is gone."""
    tag = _TAG.search(comment)
    if tag is None or tag[1] != _machine():
        return False
    try:
        os.kill(int(tag[2]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # the number is another user's process now
        return False
    return False


@cache
def _machine() -> str:
    """Return a digest of this machine's name and its space of process numbers: a container has its own."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return xxhash.xxh32_hexdigest(f"{socket.gethostname()} {space}".encode())
