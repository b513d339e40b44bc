"""Whether SLURM would ever start a kind of job: asked once, before its jobs have waited for what never comes.

`sbatch --test-only` says what `sbatch` says, and whether any node has what is asked for.  It has two blind spots.  A
site that does not enforce its partitions' limits at submission (`EnforcePartLimits=NO`, SLURM's default) accepts a time
limit that the partition does not grant; so the limits are compared here.  Nodes that are down or drained count as none
for it, which would make maintenance look like a wrong request; so such a refusal holds where all nodes of the partition
are up, or none of them is large enough.  What is not known for sure refuses nothing.  Durations are seconds, memory MB.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from math import inf
from typing import NamedTuple

from dask_ferro.runtime.slurm import parsing
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.parsing import option

# What `sbatch --test-only` says of a request that no node has, and of nodes that are only away for now.
_NO_NODE = "node configuration is not available"
# An sbatch that has no such option, or a wrapper that does not know it.
_NO_OPTION = re.compile(r"unrecognized option|invalid option|test-only", re.IGNORECASE)
# States of nodes that come back, in `sinfo`'s short words, and the signs after them: no answer, maintenance, a reboot.
_AWAY = ("down", "drain", "drng", "fail", "maint", "unk", "boot", "pow", "resv", "futr", "inval")
_SIGNS = ("*", "$", "@", "^", "!", "%")
_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


class ScriptRequest(NamedTuple):
    """What a script's header asks for, as far as it is compared; 0: it does not say.

    Attributes
    ----------
    partitions : tuple of str
        Any of them will do; empty: the default one.
    is_special : bool
        It names a quality of service, a reservation or a least time, for which other limits hold.
    """

    partitions: tuple[str, ...] = ()
    seconds: float = 0.0
    nodes: int = 0
    cpus: int = 0
    memory: float = 0.0
    is_special: bool = False


class Partition(NamedTuple):
    """The limits of a partition; `has_qos`: a quality of service of its own may lift them."""

    name: str
    seconds: float = inf
    nodes: float = inf
    is_default: bool = False
    has_qos: bool = False


class PartitionNode(NamedTuple):
    """A node as a partition has it."""

    partition: str
    cpus: int
    memory: float
    is_up: bool


def request(script: str) -> ScriptRequest:
    """Return what a script's header asks for.

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
    """Return the partitions that ``scontrol --oneliner show partition`` told of."""
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


# What `nodes` reads: of each node in each of its partitions.
NODES = "%R|%c|%m|%t"


def nodes(text: str) -> tuple[PartitionNode, ...]:
    """Return the nodes that ``sinfo --Node --format=NODES`` told of.

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
    """Return what a request asks for beyond what each of its partitions has, in words; empty: one may have it all.

    The words begin with the reason by which SLURM lets such a job wait.
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
    if asked.memory > memory > 1:  # 1 is what a site has that does not say it
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
    """Return why no job of a kind would ever start, in SLURM's words; empty: it would, or nobody knows.

    Parameters
    ----------
    refused : str
        What `sbatch --test-only` said when it failed; empty: it accepted the script, or could not be asked.
    kind : str
        What `parsing.refusal` makes of that.
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
    """Ask SLURM, and return why no job of a script would ever start; empty: it would, or nobody knows.

    Parameters
    ----------
    ask : callable
        Returns what a command prints.

    Raises
    ------
    Refused
        When SLURM does not tell of its partitions and nodes.
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
    """Return a time limit as SLURM writes it.

    >>> clock(18000.0), clock(90061.0), clock(inf)
    ('05:00:00', '1-01:01:01', 'UNLIMITED')
    """
    if seconds == inf:
        return "UNLIMITED"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{rest:02}"
