"""What each rule of placement, stealing, scaling and replication is for: all of it on, and each rule off in turn.

    python benchmarks/ablation.py --json benchmarks/results/ablation.json > ablation.md
    python benchmarks/ablation.py --rules stealing --workloads cholesky --seeds 2
    python benchmarks/ablation.py --quick

`ablation_rules.py` says what each rule is and how it is off, `ablation_workloads.py` where.  Rules of scaling run on
jobs that come and go, the others on all of the fixed clusters and on those jobs whose workers end, grow or shrink.
Whatever chance a run has follows its seed, so a run with a rule off is compared with that of the same seed with all
rules on.  Where the first two seeds show no change by 1 % (of the moves by a quarter), the others are not run.
Ctrl-C prints the table of what was run so far.

No figure shows the memory of hosts, the scheduler's own time, a preemption without warning, or restrictions of tasks.
Waits of jobs are drawn only where a queue is uncertain: other elastic runs differ little from seed to seed.

makespan, job-hours   off over on: the geometric mean over seeds.
moves                 confirmed steals, on to off.
lost                  results computed again, and MB that a device was short of: the mean off less the mean on.
changes nothing       "nothing": no figure changes by 2 % on any workload, and what is seen elsewhere without the rule;
                      "moves only"; "better off": what changes is
                      an improvement; a figure that gets worse: empty.  A change is one of more than 2 % and of more
                      than three standard errors over the seeds.

The table is Markdown, progress goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import exp, inf, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
from ablation_rules import RULES, Rule  # noqa: E402
from ablation_workloads import QUICK, WORKLOADS, Figures, Setup  # noqa: E402

# As many seeds show whether a rule has any say: by this share of a makespan or of job-hours, of the moves, or anything
# lost.
FIRST, SAY, SAY_OF_MOVES = 2, 0.01, 0.25
# What counts as a change, and by how many standard errors.
LEAST, ERRORS = 0.02, 3.0
MB = 1e6
# Elastic workloads of rules that are not scaling's: workers end, join and leave there.
SHARED = ("lives", "data", "grow", "shrink")
FIGURES = ("makespan", "job-hours", "moves", "lost", "MB short")
Note = Callable[[str], None]


class Change(NamedTuple):
    """One figure of one workload with a rule off: a ratio, or for what may be 0 a difference.

    Attributes
    ----------
    off, on : float
        Means over the seeds.
    size : float
        The ratio, or the difference.
    is_seen : bool
        Whether it is a change, by 2 % and by three standard errors.
    """

    off: float
    on: float
    size: float
    is_seen: bool
    is_worse: bool


def compared(off: Sequence[Figures], on: Sequence[Figures]) -> dict[str, Change]:
    """Return the change of each figure that the workload has."""
    stuck = sum(one.stuck for one in off) - sum(one.stuck for one in on)
    if stuck:
        return {"makespan": Change(inf, fmean(one.makespan for one in on), inf, True, stuck > 0)}
    pairs = list(zip(off, on, strict=True))
    found = {"makespan": _ratio([(a.makespan, b.makespan) for a, b in pairs])}
    if on[0].node_seconds:
        found["job-hours"] = _ratio([(a.node_seconds / 3600, b.node_seconds / 3600) for a, b in pairs])
    found["moves"] = _difference([(a.moves, b.moves) for a, b in pairs])
    found["lost"] = _difference([(a.lost, b.lost) for a, b in pairs])
    found["MB short"] = _difference([(a.short / MB, b.short / MB) for a, b in pairs])
    return found


def _ratio(pairs: Sequence[tuple[float, float]]) -> Change:
    logs = [log(off / on) for off, on in pairs]
    size = exp(fmean(logs))
    seen = abs(size - 1.0) > LEAST and abs(fmean(logs)) > ERRORS * _error(logs)
    return Change(fmean(off for off, _ in pairs), fmean(on for _, on in pairs), size, seen, size > 1.0)


def _difference(pairs: Sequence[tuple[float, float]]) -> Change:
    more = [off - on for off, on in pairs]
    off, on, size = fmean(off for off, _ in pairs), fmean(on for _, on in pairs), fmean(more)
    seen = abs(size) > LEAST * max(on, 1.0) and abs(size) > ERRORS * _error(more)
    return Change(off, on, size, seen, size > 0.0)


def _error(numbers: Sequence[float]) -> float:
    """Return the standard error of a mean."""
    return stdev(numbers) / sqrt(len(numbers)) if len(numbers) > 1 else 0.0


class Ablation:
    """Runs with one rule off, beside those with all on, which run once."""

    def __init__(self, names: Sequence[str], seeds: int) -> None:
        self.names, self.seeds = names, seeds
        self._on: dict[tuple[str, int], Figures] = {}

    def without(self, rule: Rule) -> dict[str, dict[str, Change]]:
        """Return the changes on each workload on which the rule had a say."""
        found = {}
        for name in self.names:
            if not _concerns(rule, name):
                continue
            on = [self._with_all(name, seed) for seed in range(min(FIRST, self.seeds))]
            off = [_run(rule, name, seed) for seed in range(len(on))]
            if not _has_a_say(off, on):
                continue
            for seed in range(len(on), self.seeds):
                on.append(self._with_all(name, seed))
                off.append(_run(rule, name, seed))
            found[name] = compared(off, on)
        return found

    def _with_all(self, name: str, seed: int) -> Figures:
        if (name, seed) not in self._on:
            self._on[name, seed] = WORKLOADS[name].run(Setup(), seed)
        return self._on[name, seed]


def _has_a_say(off: Sequence[Figures], on: Sequence[Figures]) -> bool:
    def differs(name: str, share: float, least: float = 0.0) -> bool:
        sums = [sum(getattr(one, name) for one in some) for some in (off, on)]
        return abs(sums[0] - sums[1]) > max(share * sums[1], least)

    return (
        differs("makespan", SAY)
        or differs("node_seconds", SAY)
        or differs("moves", SAY_OF_MOVES, least=4.0)
        or differs("lost", 0.0)
        or differs("short", LEAST)
    )


def _concerns(rule: Rule, name: str) -> bool:
    if rule.area == "scaling":
        return WORKLOADS[name].elastic
    return not WORKLOADS[name].elastic or any(word in name for word in SHARED)


def _run(rule: Rule, name: str, seed: int) -> Figures:
    with rule.switched_off() as setup:
        return WORKLOADS[name].run(setup, seed)


# ---- the table ---------------------------------------------------------------------------------------------


def verdict(changes: Mapping[str, Mapping[str, Change]]) -> str:
    """Return what the last column says of a rule."""
    seen = [(name, c) for of in changes.values() for name, c in of.items() if c.is_seen]
    costs = [change for name, change in seen if name != "moves"]
    if any(change.is_worse for change in costs):
        return ""
    return "better off" if costs else "moves only" if seen else "nothing"


def largest(changes: Mapping[str, Mapping[str, Change]], figure: str) -> str:
    """Return the largest change of a figure for the worse, and for the better, as the table shows them."""
    rows = [(of[figure], name) for name, of in changes.items() if figure in of and of[figure].is_seen]
    worse = max((row for row in rows if row[0].is_worse), key=lambda row: row[0].size, default=None)
    better = min((row for row in rows if not row[0].is_worse), key=lambda row: row[0].size, default=None)
    return "; ".join(_shown(change, name, figure) for change, name in filter(None, (worse, better)))


def _shown(change: Change, name: str, figure: str) -> str:
    if figure in ("makespan", "job-hours"):
        return f"{'stuck' if change.size == inf else f'{change.size:.2f}'} ({name})"
    if figure == "moves":
        return f"{change.on:.0f} to {change.off:.0f} ({name})"
    return f"{change.size:+.0f} ({name})"


def table(rows: Sequence[tuple[Rule, Mapping[str, Mapping[str, Change]]]]) -> list[str]:
    """Return the lines of the Markdown table."""
    columns = ("off", "the rule", *FIGURES[:4], "changes nothing by 2 %")
    lines = [" | ".join(("", *columns, "")).strip(), "|" + "---|" * len(columns)]
    for area in dict.fromkeys(rule.area for rule, _ in rows):
        lines.append(f"| **{area}** |" + " |" * (len(columns) - 1))
        for rule, changes in rows:
            if rule.area == area:
                lines.append(f"| {' | '.join(_cells(rule, changes))} |")
    return lines


def _cells(rule: Rule, changes: Mapping[str, Mapping[str, Change]]) -> list[str]:
    if rule.unseen:
        return [rule.name, rule.says, "", "", "", "", f"not simulated: {rule.unseen}"]
    cells = {figure: largest(changes, figure) for figure in FIGURES}
    short = cells.pop("MB short")
    if short:
        cells["lost"] = "; ".join(filter(None, (cells["lost"], f"MB {short}")))
    what = verdict(changes)
    return [rule.name, rule.says, *cells.values(), f"nothing; {rule.held}" if what == "nothing" else what]


# ---- all of it ---------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = argparse.ArgumentParser(description="Each rule of the policies off in turn, in the simulator.")
    parser.add_argument("--seeds", type=int, default=8, help="runs of each workload (8)")
    parser.add_argument("--rules", action="append", metavar="TEXT", help="only rules of this area or name")
    parser.add_argument(
        "--workloads", action="append", metavar="TEXT", help="only workloads with this in their name"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed of a few small workloads, to see that it runs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to this file")
    parser.add_argument("--quiet", action="store_true", help="print only the table")
    options = parser.parse_args(arguments)
    note: Note = (
        (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    )
    rules = [r for r in RULES if _asked(options.rules, r.area, r.name)]
    names = [name for name in (QUICK if options.quick else WORKLOADS) if _asked(options.workloads, name)]
    ablation = Ablation(names, 1 if options.quick else options.seeds)
    record = measure.provenance(seeds=ablation.seeds, quick=options.quick, workloads=names)
    rows, record["rules"] = [], {}
    with suppress(KeyboardInterrupt):
        for number, rule in enumerate(rules, 1):
            changes = {} if rule.unseen else ablation.without(rule)
            rows.append((rule, changes))
            recorded = record["rules"][f"{rule.area}: {rule.name}"] = _recorded(rule, changes)
            note(f"{number} of {len(rules)}: {rule.area}: {rule.name}: {recorded['verdict']}")
            if options.json:
                measure.write(options.json, record)
    print("\n".join(table(rows)))
    return record


def _recorded(rule: Rule, changes: Mapping[str, Mapping[str, Change]]) -> dict[str, Any]:
    """Return the figures that a rule changes in JSON's types; a run that never ends has none."""
    figures = {
        name: {
            figure: [None if value == inf else round(value, 4) for value in change[:3]] + [change.is_seen]
            for figure, change in of.items()
            if change.off != change.on
        }
        for name, of in changes.items()
    }
    what = f"not simulated: {rule.unseen}" if rule.unseen else verdict(changes) or "needed"
    return {"says": rule.says, "verdict": what, "off, on, change, seen": figures}


def _asked(words: Sequence[str] | None, *names: str) -> bool:
    return not words or any(word in name for word in words for name in names)


if __name__ == "__main__":
    main()
