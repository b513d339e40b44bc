"""The schedules that have a name, each as one small rule that says what a stage does next.

A rule writes a stage's list without numbers, as (chunk, kind); the k-th of a chunk's forwards is micro-batch k, and so
for each kind: every one of these takes the micro-batches in order.  p stages, m micro-batches, s the stage, from 0.

    gpipe        all forwards, then all backwards                                     keeps m activations
    1f1b         p - s forwards, then backward and forward in turn                    p - s
    interleaved  1f1b over several chunks a stage, dealt out in turn                  about p + (p - 1) / chunks
    zb-h1        1f1b, its weight gradients s micro-batches late, in the bubbles      p
    zb-v         two chunks a stage, down and up again like a V; no bubble            p of whole stages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.schedule import Schedule

Step = tuple[int, str]  # a chunk, and what is computed of it

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
_CHUNKS = {"interleaved": 2, "zb-v": 2}  # a stage, where nobody says; the others have one


def usual_chunks(name: str) -> int:
    """Return how many pieces of the model a stage has in the schedule of a name, where nobody says otherwise."""
    return _CHUNKS.get(name, 1)


def known(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """Return the schedule of a name.

    Parameters
    ----------
    name : str
        "gpipe", "1f1b", "interleaved", "zb-h1" or "zb-v".
    stages, micro_batches : int
        At least one of each; "interleaved" takes micro-batches in multiples of the stages.
    chunks : int, optional
        Pieces of the model on each stage: two or more for "interleaved" (2 if not given), two for "zb-v", one for
        the others.

    Raises
    ------
    ConfigError
        For a name or a number that there is no such schedule for.

    Examples
    --------
    >>> print(known("1f1b", stages=2, micro_batches=3))
    stage 0  0F0 0F1   . 0B0 0F2 0B1   . 0B2
    stage 1    . 1F0 1B0 1F1 1B1 1F2 1B2
    """
    if name not in NAMES:
        raise ConfigError(f"schedule: got {name!r}, wanted one of {', '.join(NAMES)}, or a list of your own")
    for what, number in (("stages", stages), ("micro_batches", micro_batches)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"schedule {name!r}: {what}: got {number!r}, wanted a whole number above 0")
    usual = usual_chunks(name)
    each = usual if chunks is None else chunks
    if name == "interleaved":
        _check_rounds(stages, micro_batches, each)
    elif each != usual:
        raise ConfigError(f"schedule {name!r}: chunks: got {chunks!r} a stage, wanted {usual}")
    rule = _interleaved(each) if name == "interleaved" else _RULES[name]
    rows = (_numbered(rule(s, stages, micro_batches), micro_batches) for s in range(stages))
    return Schedule(tuple(rows), name)


def _check_rounds(stages: int, micro_batches: int, chunks: int) -> None:
    where = "schedule 'interleaved'"
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 2:
        raise ConfigError(f"{where}: chunks: got {chunks!r} a stage, wanted 2 or more; 1 is called 1f1b")
    if micro_batches % stages:
        wanted = f"wanted a multiple of the {stages} stages"
        raise ConfigError(f"{where}: micro_batches: got {micro_batches}, {wanted}")


def _numbered(steps: Iterable[Step], micro_batches: int) -> tuple[Action, ...]:
    """Steps as actions, each kind of each chunk through the micro-batches in order; what exceeds them is left out."""
    taken: Counter[Step] = Counter()
    row = []
    for step in steps:
        if taken[step] < micro_batches:
            row.append(Action(*step, taken[step]))
            taken[step] += 1
    return tuple(row)


def _gpipe(s: int, p: int, m: int) -> list[Step]:
    """Huang et al., GPipe, arXiv 1811.06965; backwards in the order of the forwards, as their gradients arrive."""
    return [(s, FORWARD)] * m + [(s, BACKWARD)] * m


def _one_forward_one_backward(s: int, p: int, m: int) -> list[Step]:
    """Narayanan et al., PipeDream-Flush, arXiv 2006.09503: a stage fills the way to the end, then keeps level."""
    ahead = min(p - s, m)
    level = [(s, BACKWARD), (s, FORWARD)] * (m - ahead)
    return [(s, FORWARD)] * ahead + level + [(s, BACKWARD)] * ahead


def _zb_h1(s: int, p: int, m: int) -> list[Step]:
    """Qi et al., Zero Bubble, arXiv 2401.10241, figure 3: W(i) directly after I(i + s).

    Stage s would wait s times on the way out: it then has s weight gradients left to fill that with.
    """
    ahead, late = min(p - s, m), min(s, m)
    steps: list[Step] = [(s, FORWARD)] * ahead
    for i in range(m):
        steps.append((s, INPUT_GRAD))
        steps += [(s, WEIGHT_GRAD)] * (i >= late) + [(s, FORWARD)] * (i + ahead < m)
    return steps + [(s, WEIGHT_GRAD)] * late


def _interleaved(chunks: int) -> Callable[[int, int, int], list[Step]]:
    """Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2: p micro-batches through a chunk, then the next.

    Chunk c of stage s is chunk c p + s of the model.  A stage is ahead by the way to the end and back, and by all
    its chunks but one.
    """

    def rule(s: int, p: int, m: int) -> list[Step]:
        total = m * chunks
        turns = [turn // p % chunks for turn in range(total)]
        forwards = [(turn * p + s, FORWARD) for turn in turns]
        backwards = [((chunks - 1 - turn) * p + s, BACKWARD) for turn in turns]
        ahead = min((chunks - 1) * p + 2 * (p - 1 - s) + 1, total)
        level = chain.from_iterable(zip(backwards, forwards[ahead:], strict=False))
        return [*forwards[:ahead], *level, *backwards[total - ahead :]]

    return rule


def _zb_v(s: int, p: int, m: int) -> list[Step]:
    """Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, and arXiv 2401.10241, section 6.

    Stage s has chunk s on the way down and chunk 2p - 1 - s on the way up, so the loss is where the data came in, and
    the first gradient comes after p micro-batches of memory.  The list is made for 2p - 1 micro-batches at least:
    with fewer the pipeline is never full, and the rest is left out.
    """
    full = max(m, 2 * p - 1)
    down, up, left = s, 2 * p - 1 - s, p - s
    fill = [(down, FORWARD)] * (2 * left - 1) + [(up, FORWARD), (down, FORWARD)] * s
    turn = [(up, FORWARD), (up, INPUT_GRAD), (up, WEIGHT_GRAD)]
    level = [(down, FORWARD), (down, INPUT_GRAD), (down, WEIGHT_GRAD), *turn] * (full - p)
    drain = [(down, INPUT_GRAD), (up, INPUT_GRAD)] * s + [(down, INPUT_GRAD), (down, WEIGHT_GRAD)] * left
    return [*fill, *turn * left, *level, *drain, *[(up, WEIGHT_GRAD)] * s, *[(down, WEIGHT_GRAD)] * s]


_RULES: dict[str, Callable[[int, int, int], list[Step]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
}
