"""What is wrong with a cluster, where, how severe that is, and what to do: of `ff.check_cluster`, the overview and
`top`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dask_ferro.words import list_names, pluralize

# "error": something fails there, or does not go on until something is done.  "warning": something may fail or stop, or
# figures may mislead.  "slow": it works, and takes longer than it has to.
SEVERITIES = ("error", "warning", "slow")


@dataclass(frozen=True)
class ClusterFinding:
    """Something that is wrong.

    Attributes
    ----------
    severity : str
        One of `SEVERITIES`.
    where : tuple of str
        "client", "scheduler", addresses or names of workers, pools, or tasks.
    what : str
        The subject in a word or two.
    sentence, remedy : str
        What is wrong, where and why; what to do.
    page : str
        The page of the dashboard that has the details, as an address relative to the overview's; "": none.
    output : str
        The last lines that a job printed; "": none.
    """

    severity: str
    where: tuple[str, ...]
    what: str
    sentence: str
    remedy: str
    page: str = ""
    output: str = ""

    def __str__(self) -> str:
        return f"{self.sentence}; {self.remedy}"


def fault(
    severity: str, what: str, got: Mapping[str, str], expected: str, remedy: str, page: str = ""
) -> Iterator[ClusterFinding]:
    """Yield the finding of what some places have in place of what is expected; none if there is no such place."""
    if got:
        sentence = (
            f"{list_names(got)}: {what}: got {list_names(dict.fromkeys(got.values()))}, wanted {expected}"
        )
        yield ClusterFinding(severity, tuple(got), what, sentence, remedy, page)


def sort_findings(findings: Iterable[ClusterFinding]) -> tuple[ClusterFinding, ...]:
    """Return findings, the most severe first, and otherwise in their order."""
    return tuple(sorted(findings, key=lambda one: SEVERITIES.index(one.severity)))


def summary(findings: Sequence[ClusterFinding]) -> str:
    """Return the numbers of findings in words."""
    counts = Counter(one.severity for one in findings)
    parts = [pluralize(counts[severity], severity) for severity in ("error", "warning") if counts[severity]]
    parts += [f"{counts['slow']} slow"] if counts["slow"] else []
    return ", ".join(parts) or "nothing is wrong"
