"""The named schedules, each as a rule for the actions of a stage.

A rule returns a stage's list as (chunk, kind), without micro-batches: all these schedules take the micro-batches in
order, so the k-th action of a chunk and a kind is of micro-batch k.  There are p stages, m micro-batches and v chunks
per stage; s is the stage, from 0.

    gpipe        all forwards, then all backwards                                     keeps m activations
    1f1b         p - s forwards, then backward and forward in turn                    p - s
    interleaved  1f1b over several chunks per stage, in turn                          about p + (p - 1) / v
    zb-h1        1f1b, its weight gradients s micro-batches late, in the bubbles      p
    zb-v         two chunks per stage, down and up again like a V; no bubble          p of whole stages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.options import is_count

# A chunk, and the kind of the action.
Step = tuple[int, str]

# Chunks per stage by default; the other schedules have one.
_CHUNKS = {"interleaved": 2, "zb-v": 2}


def usual_chunks(name: str) -> int:
    """Return the default number of chunks per stage of a named schedule."""
    return _CHUNKS.get(name, 1)


def known(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """Return the schedule with a name.

    Parameters
    ----------
    name : str
        "gpipe", "1f1b", "interleaved", "zb-h1" or "zb-v".
    stages, micro_batches : int
        At least one of each; "interleaved" takes micro-batches in multiples of the stages.
    chunks : int, optional
        Pieces of the model on each stage: two or more for "interleaved" (2 by default), two for "zb-v", one for the
        others.

    Raises
    ------
    ConfigError
        There is no such schedule, or not with these numbers.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> print(ff.schedule("1f1b", stages=2, micro_batches=3))
    stage 0  0F0 0F1   . 0B0 0F2 0B1   . 0B2
    stage 1    . 1F0 1B0 1F1 1B1 1F2 1B2
    """
    if name not in NAMES:
        raise ConfigError(f"schedule: got {name!r}, wanted one of {', '.join(NAMES)}, or a list of your own")
    for what, number in (("stages", stages), ("micro_batches", micro_batches)):
        if not is_count(number):
            raise ConfigError(f"schedule {name!r}: {what}: got {number!r}, wanted a whole number above 0")
    usual = usual_chunks(name)
    each = usual if chunks is None else chunks
    if name == "interleaved":
        _check_rounds(stages, micro_batches, each)
    elif each != usual:
        raise ConfigError(f"schedule {name!r}: chunks: got {chunks!r} a stage, wanted {usual}")
    rows = (_numbered(_RULES[name](s, stages, micro_batches, each), micro_batches) for s in range(stages))
    return Schedule(tuple(rows), name)


def _check_rounds(stages: int, micro_batches: int, chunks: int) -> None:
    where = "schedule 'interleaved'"
    if not is_count(chunks, 2):
        raise ConfigError(f"{where}: chunks: got {chunks!r} a stage, wanted 2 or more; 1 is called 1f1b")
    if micro_batches % stages:
        wanted = f"wanted a multiple of the {stages} stages"
        raise ConfigError(f"{where}: micro_batches: got {micro_batches}, {wanted}")


def _numbered(steps: Iterable[Step], micro_batches: int) -> tuple[Action, ...]:
    """Return steps as actions with micro-batches in order; steps beyond the last micro-batch are left out."""
    taken: Counter[Step] = Counter()
    row = []
    for step in steps:
        if taken[step] < micro_batches:
            row.append(Action(*step, taken[step]))
            taken[step] += 1
    return tuple(row)


def _gpipe(s: int, p: int, m: int, v: int) -> list[Step]:
    """Return GPipe's list of a stage (Huang et al., arXiv 1811.06965); backwards are in the forwards' order."""
    return [(s, FORWARD)] * m + [(s, BACKWARD)] * m


def _one_forward_one_backward(s: int, p: int, m: int, v: int) -> list[Step]:
    """Return 1F1B's list of a stage (Narayanan et al., arXiv 2006.09503): warm-up, then one of each in turn."""
    ahead = min(p - s, m)
    level = [(s, BACKWARD), (s, FORWARD)] * (m - ahead)
    return [(s, FORWARD)] * ahead + level + [(s, BACKWARD)] * ahead


def _zb_h1(s: int, p: int, m: int, v: int) -> list[Step]:
    """Return ZB-H1's list of a stage (Qi et al., arXiv 2401.10241, figure 3): W(i) directly after I(i + s).

    Stage s would wait s times in the cool-down: its s delayed weight gradients fill these bubbles.
    """
    # With few micro-batches (m < p) fewer of them run ahead or are delayed.
    ahead, late = min(p - s, m), min(s, m)
    steps: list[Step] = [(s, FORWARD)] * ahead
    for i in range(m):
        steps.append((s, INPUT_GRAD))
        # A bool counts as 0 or 1: the list is the action or empty.
        steps += [(s, WEIGHT_GRAD)] * (i >= late) + [(s, FORWARD)] * (i + ahead < m)
    return steps + [(s, WEIGHT_GRAD)] * late


def _interleaved(s: int, p: int, m: int, v: int) -> list[Step]:
    """Return interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2): p micro-batches a chunk in turn.

    Chunk c of stage s is chunk c p + s of the model.  The warm-up of a stage is the way to the last stage and back,
    and a round over all its chunks but one.
    """
    total = m * v
    turns = [turn // p % v for turn in range(total)]
    forwards = [(turn * p + s, FORWARD) for turn in turns]
    backwards = [((v - 1 - turn) * p + s, BACKWARD) for turn in turns]
    ahead = min((v - 1) * p + 2 * (p - 1 - s) + 1, total)
    level = chain.from_iterable(zip(backwards, forwards[ahead:], strict=False))
    return [*forwards[:ahead], *level, *backwards[total - ahead :]]


def _zb_v(s: int, p: int, m: int, v: int) -> list[Step]:
    """Return ZB-V's list of a stage (Qi et al., arXiv 2405.15362, and arXiv 2401.10241, section 6).

    Stage s has chunk s on the way down and chunk 2p - 1 - s on the way up, so the first stage has the input and the
    loss, and the first gradient is ready when p micro-batches are in memory.  The list is made for at least 2p - 1
    micro-batches and then shortened, since with fewer the pipeline is never full.
    """
    # `_numbered` drops the micro-batches beyond m.
    full = max(m, 2 * p - 1)
    down, up, left = s, 2 * p - 1 - s, p - s
    fill = [(down, FORWARD)] * (2 * left - 1) + [(up, FORWARD), (down, FORWARD)] * s
    turn = [(up, FORWARD), (up, INPUT_GRAD), (up, WEIGHT_GRAD)]
    level = [(down, FORWARD), (down, INPUT_GRAD), (down, WEIGHT_GRAD), *turn] * (full - p)
    drain = [(down, INPUT_GRAD), (up, INPUT_GRAD)] * s + [(down, INPUT_GRAD), (down, WEIGHT_GRAD)] * left
    return [*fill, *turn * left, *level, *drain, *[(up, WEIGHT_GRAD)] * s, *[(down, WEIGHT_GRAD)] * s]


_RULES: dict[str, Callable[[int, int, int, int], list[Step]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
}
NAMES = tuple(_RULES)
