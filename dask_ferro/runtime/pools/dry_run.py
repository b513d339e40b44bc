"""The check whether SLURM would ever start a kind of job, made before jobs wait in vain.

`sbatch --test-only` reports the same errors as `sbatch`, and whether any node fits the request.  It has two blind
spots. A site that does not enforce its partitions' limits at submission (`EnforcePartLimits=NO`, SLURM's default)
accepts a time limit beyond the partition's; so the limits are compared here.  Nodes that are down or drained do not
count, so that maintenance looks like a wrong request; such a refusal is therefore believed only if all nodes of the
partition are up, or none of them is large enough.  In doubt nothing is refused.  Durations are seconds, memory MB.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from math import inf
from typing import NamedTuple

from dask_ferro.runtime.slurm import parsing
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.parsing import option

# The message of `sbatch --test-only` if no node fits, including nodes that are only unavailable for now.
_NO_NODE = "node configuration is not available"
# Messages of an sbatch without this option, or of a wrapper that does not know it.
_NO_OPTION = re.compile(r"unrecognized option|invalid option|test-only", re.IGNORECASE)
# States of nodes that come back, as abbreviated by `sinfo`, and the signs after them: no answer, maintenance, a
# reboot.
_AWAY = ("down", "drain", "drng", "fail", "maint", "unk", "boot", "pow", "resv", "futr", "inval")
_SIGNS = ("*", "$", "@", "^", "!", "%")
_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


class ScriptRequest(NamedTuple):
    """The request in a script's header, as far as it is compared; 0: not given.

    Attributes
    ----------
    partitions : tuple of str
        Alternatives; empty: the default partition.
    is_special : bool
        Whether it names a quality of service, a reservation or a minimal time, which change the limits.
    """

    partitions: tuple[str, ...] = ()
    seconds: float = 0.0
    nodes: int = 0
    cpus: int = 0
    memory: float = 0.0
    is_special: bool = False


class Partition(NamedTuple):
    """The limits of a partition; `has_qos`: its own quality of service may lift them."""

    name: str
    seconds: float = inf
    nodes: float = inf
    is_default: bool = False
    has_qos: bool = False


class PartitionNode(NamedTuple):
    """A node as a member of a partition."""

    partition: str
    cpus: int
    memory: float
    is_up: bool


def request(script: str) -> ScriptRequest:
    """Parse the request in a script's header.

    >>> request("#SBATCH -p cpu,gpu\\n#SBATCH --cpus-per-task=64\\n#SBATCH -t 5:00:00\\n#SBATCH --mem=2G")
    ScriptRequest(partitions=('cpu', 'gpu'), seconds=18000.0, nodes=0, cpus=64, memory=2048.0, is_special=False)
    """
    limit = parsing.duration(option(script, "t", "time"))
    nodes = re.match(r"\d+", option(script, "N", "nodes"))
    cpus = option(script, "c", "cpus-per-task")
    memory = re.fullmatch(r"(\d+)([KMGT]?)B?", option(script, "", "mem").upper())
    special = any(
        option(script, short, long) for short, long in (("q", "qos"), ("", "reservation"), ("", "time-min"))
    )
    return ScriptRequest(
        tuple(filter(None, option(script, "p", "partition").split(","))),
        0.0 if limit == inf else limit,
        int(nodes[0]) if nodes else 0,
        int(cpus) if cpus.isdecimal() else 0,
        float(memory[1]) * _MEGABYTES[memory[2] or "M"] if memory else 0.0,
        special,
    )


def partitions(text: str) -> tuple[Partition, ...]:
    """Parse the output of ``scontrol --oneliner show partition``."""
    return tuple(
        Partition(
            facts["PartitionName"],
            parsing.duration(facts.get("MaxTime", "")),
            int(most) if (most := facts.get("MaxNodes", "")).isdecimal() else inf,
            facts.get("Default") == "YES",
            facts.get("QoS", "N/A") not in ("N/A", ""),
        )
        for facts in parsing.partitions(text)
    )


# The format that `nodes` parses: each node in each of its partitions.
NODES = "%R|%c|%m|%t"


def nodes(text: str) -> tuple[PartitionNode, ...]:
    """Parse the output of ``sinfo --Node --format=NODES``.

    >>> nodes("cpu|4|4000+|idle")
    (PartitionNode(partition='cpu', cpus=4, memory=4000.0, is_up=True),)
    """
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        numbers = [cell.rstrip("+") for cell in cells[1:3]]
        if len(cells) == 4 and all(number.isdecimal() for number in numbers):
            away = cells[3].endswith(_SIGNS) or cells[3].startswith(_AWAY)
            found.append(PartitionNode(cells[0], int(numbers[0]), float(numbers[1]), not away))
    return tuple(found)


def excess(asked: ScriptRequest, limits: Collection[Partition], there: Iterable[PartitionNode]) -> str:
    """Return how a request exceeds each of its partitions, as text; empty: at least one may fit.

    The text begins with SLURM's name of the reason for which such a job waits.
    """
    known = {limit.name: limit for limit in limits}
    names = _named(asked, limits)
    nodes: dict[str, list[PartitionNode]] = {}
    for node in there:
        nodes.setdefault(node.partition, []).append(node)
    each = [_beyond(asked, known[name], nodes.get(name, [])) for name in names if name in known]
    return "; ".join(each) if each and len(each) == len(names) and all(each) else ""


def _named(asked: ScriptRequest, limits: Collection[Partition]) -> tuple[str, ...]:
    """Return the partitions that a request names, or the default one."""
    return asked.partitions or tuple(limit.name for limit in limits if limit.is_default)


def _beyond(asked: ScriptRequest, limit: Partition, there: list[PartitionNode]) -> str:
    where = f"partition {limit.name}"
    if not asked.is_special and not limit.has_qos:
        if asked.seconds > limit.seconds:
            return f"PartitionTimeLimit: asked for {clock(asked.seconds)}, MaxTime of {where} is {clock(limit.seconds)}"
        if asked.nodes > limit.nodes:
            return (
                f"PartitionNodeLimit: asked for {asked.nodes} nodes, MaxNodes of {where} is {limit.nodes:g}"
            )
    if not there:
        return ""
    if asked.nodes > len(there):
        return f"PartitionConfig: asked for {asked.nodes} nodes, {where} has {len(there)}"
    cpus, memory = max(node.cpus for node in there), max(node.memory for node in there)
    if asked.cpus > cpus:
        return f"PartitionConfig: asked for {asked.cpus} CPUs a task, the largest node of {where} has {cpus}"
    if asked.memory > memory > 1:  # sites that do not configure memory report 1
        return (
            f"PartitionConfig: asked for {asked.memory:g} MB, the largest node of {where} has {memory:g} MB"
        )
    return ""


def verdict(
    refused: str,
    kind: str,
    asked: ScriptRequest,
    limits: Collection[Partition],
    there: Iterable[PartitionNode],
) -> str:
    """Return why no job of a kind would ever start, as SLURM puts it; empty: it would, or it is unknown.

    Parameters
    ----------
    refused : str
        The message of a failed `sbatch --test-only`; empty: it accepted the script, or could not be run.
    kind : str
        The kind of that message by `parsing.refusal`.
    """
    there = tuple(there)
    beyond = excess(asked, limits, there)
    if not refused or kind != parsing.PERMANENT or _NO_OPTION.search(refused):
        return beyond
    if _NO_NODE in refused and not beyond:
        names = _named(asked, limits)
        own = [node for node in there if node.partition in names]
        return refused if own and all(node.is_up for node in own) else ""
    return "; ".join(filter(None, (refused, beyond)))


async def trial(ask: Callable[..., Awaitable[str]], job_name: str, script: str) -> str:
    """Ask SLURM why no job with a script would ever start; empty: it would, or it is unknown.

    Parameters
    ----------
    ask : callable
        Runs a command and returns its output.

    Raises
    ------
    Refused
        If SLURM does not report its partitions and nodes.
    """
    refused = words = ""
    try:
        await ask("sbatch", "--test-only", f"--job-name={job_name}", stdin=script)
    except Refused as error:
        refused, words = error.words, error.kind
    limits = partitions(await ask("scontrol", "--oneliner", "show", "partition"))
    there = nodes(await ask("sinfo", "--noheader", "--Node", f"--format={NODES}"))
    return verdict(refused, words, request(script), limits, there)


def clock(seconds: float) -> str:
    """Return a time limit in SLURM's notation.

    >>> clock(18000.0), clock(90061.0), clock(inf)
    ('05:00:00', '1-01:01:01', 'UNLIMITED')
    """
    if seconds == inf:
        return "UNLIMITED"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{rest:02}"
