"""The named schedules, each as a rule for the actions of a stage.

A rule returns a stage's list as (chunk, kind), without micro-batches: all these schedules take the micro-batches in
order, so the k-th forward of a chunk is of micro-batch k, and so are its k-th backward and its k-th weight gradient.
There are p stages, m micro-batches and v chunks per stage; s is the stage, from 0.

    gpipe        all forwards, then all backwards
    1f1b         p - s forwards, then backward and forward alternately
    interleaved  1f1b over several chunks per stage, alternately
    zb-h1        1f1b, its weight gradients s micro-batches late, in the bubbles
    zb-v         two chunks per stage, down and up again like a V, without a bubble
    dualpipe-v   the same V; a forward of one chunk with a backward of the other
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain

from dask_ferro.errors import InputError, did_you_mean, is_count
from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.schedule import Schedule

# A chunk, and the kind of the action.
Step = tuple[int, str]

# Chunks per stage by default; the other schedules have one.
_CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}
# Instead of the chunk of a weight gradient: the oldest input gradient without a weight gradient, of any chunk.
_OLDEST = -1


def usual_chunks(name: str) -> int:
    """Return the default number of chunks per stage of a named schedule."""
    return _CHUNKS.get(name, 1)


def make_schedule(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """Return the schedule with a name.

    There are p stages, m micro-batches and v chunks per stage.  F, I and W are the seconds of a whole stage for one
    micro-batch (B = I + W):

    ===========  ==================================  =========================  ===============================
    name         makespan                            activations of stage s     source
    ===========  ==================================  =========================  ===============================
    gpipe        (m + p - 1) (F + B)                 m                          Huang et al., arXiv 1811.06965
    1f1b         (m + p - 1) (F + B)                 p - s                      Narayanan et al., 2006.09503
    interleaved  m (F + B) + (p - 1) (F + B) / v     (v - 1) r + 2 (p - s) - 1  Narayanan et al., 2104.04473
    zb-h1        m (F + B) + (p - 1) (F + I - W)     p                          Qi et al., arXiv 2401.10241
    zb-v         m (F + B) + (p - 1) F / 2           2 p                        Qi et al., arXiv 2405.15362
    dualpipe-v   m (F + B) + (p - 1) F / 2           2 p + 1                    DeepSeek-V3, arXiv 2412.19437
    ===========  ==================================  =========================  ===============================

    Activations are counted for one chunk and one micro-batch; r is the number of micro-batches of the longest round:
    p if m is a multiple of p, else between p and 2 p.  The makespans hold for m >= p, the makespan of zb-h1 for
    weight gradients no longer than F and I, and the last two for F = I = W and 2 p micro-batches or more.

    Parameters
    ----------
    name : str
        A name of the table.
    stages, micro_batches : int
        At least one of each, in any combination.
    chunks : int, optional
        Pieces of the model on each stage: two or more for "interleaved" (2 by default), two for "zb-v" and
        "dualpipe-v", one for the others.

    Raises
    ------
    InputError
        If there is no such schedule, or not with these numbers.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.parallel as fp
    >>> print(fp.make_schedule("1f1b", stages=2, micro_batches=3))
    stage 0  0F0 0F1   . 0B0 0F2 0B1   . 0B2
    stage 1    . 1F0 1B0 1F1 1B1 1F2 1B2
    >>> fp.make_schedule("dualpipe-v", stages=4, micro_batches=8)
    <Schedule 'dualpipe-v': 4 stages, 8 chunks, 8 micro-batches, 150 actions>
    """
    if name not in NAMES:
        raise InputError(
            f"schedule: got {name!r}, wanted one of {', '.join(NAMES)}, or a list of your own"
            f"{did_you_mean(str(name).lower(), NAMES)}"
        )
    for what, number in (("stages", stages), ("micro_batches", micro_batches)):
        if not is_count(number):
            raise InputError(f"schedule {name!r}: {what}: got {number!r}, wanted a whole number above 0")
    usual = usual_chunks(name)
    each = usual if chunks is None else chunks
    if name == "interleaved" and not is_count(each, 2):
        raise InputError(
            f"schedule {name!r}: chunks: got {each!r} a stage, wanted 2 or more; 1 is called 1f1b"
        )
    if name != "interleaved" and each != usual:
        raise InputError(f"schedule {name!r}: chunks: got {each!r} a stage, wanted {usual}")
    rows = (_number_steps(_RULES[name](s, stages, micro_batches, each), micro_batches) for s in range(stages))
    return Schedule(tuple(rows), name)


def rounds(stages: int, micro_batches: int) -> list[int]:
    """Return the micro-batches that interleaved schedules send through a chunk before the next chunk, round by round.

    A round is at least as long as there are stages, if that many micro-batches exist: its first micro-batch is then
    back from the other stages when its last one has left.  Lengths differ by at most one.  A short last round would
    make stages wait: with 4 of them of two chunks, and 9 micro-batches, 37 seconds after rounds of 4, 4 and 1, and
    31.5 after 5 and 4, if a stage's forward takes 1 second and its backward 2.

    Examples
    --------
    >>> rounds(4, 8), rounds(4, 11), rounds(4, 3)
    ([4, 4], [6, 5], [3])
    """
    count = max(1, micro_batches // stages)
    return [micro_batches // count + (i < micro_batches % count) for i in range(count)]


def _number_steps(steps: Iterable[Step], micro_batches: int) -> tuple[Action, ...]:
    """Return steps as actions with micro-batches in order; steps beyond the last micro-batch are left out."""
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    # Input gradients without a weight gradient so far.
    waiting: list[tuple[int, int]] = []
    row = []
    for chunk, kind in steps:
        # A weight gradient has the micro-batch of its input gradient, which may be steps before.
        if kind == WEIGHT_GRAD:
            at = next(i for i, (other, _) in enumerate(waiting) if chunk in (other, _OLDEST))
            row.append(Action(waiting[at][0], kind, waiting[at][1]))
            del waiting[at]
            continue
        counts = forwards if kind == FORWARD else backwards
        row.append(Action(chunk, kind, counts[chunk]))
        if kind == INPUT_GRAD:
            waiting.append((chunk, counts[chunk]))
        counts[chunk] += 1
    return tuple(action for action in row if action.micro_batch < micro_batches)


def _gpipe(s: int, p: int, m: int, v: int) -> list[Step]:
    """Return GPipe's list of a stage; backwards are in the forwards' order of micro-batches."""
    return [(s, FORWARD)] * m + [(s, BACKWARD)] * m


def _one_forward_one_backward(s: int, p: int, m: int, v: int) -> list[Step]:
    """Return 1F1B's list of a stage: warm-up, then forwards and backwards alternately."""
    ahead = min(p - s, m)
    level = [(s, BACKWARD), (s, FORWARD)] * (m - ahead)
    return [(s, FORWARD)] * ahead + level + [(s, BACKWARD)] * ahead


def _interleave(s: int, p: int, m: int, v: int) -> list[Step]:
    """Return interleaved 1F1B's list of a stage (section 2.2): a round of micro-batches for each chunk alternately.

    Chunk c of stage s is chunk c p + s of the model.  The warm-up of a stage is the way to the last stage and back,
    and a round over all its chunks but one.
    """
    turns: list[int] = []
    for length in rounds(p, m):
        turns += chain.from_iterable([chunk] * length for chunk in range(v))
    total = len(turns)
    forwards = [(turn * p + s, FORWARD) for turn in turns]
    backwards = [((v - 1 - turn) * p + s, BACKWARD) for turn in turns]
    ahead = min((v - 1) * rounds(p, m)[0] + 2 * (p - 1 - s) + 1, total)
    level = chain.from_iterable(zip(backwards, forwards[ahead:], strict=False))
    return [*forwards[:ahead], *level, *backwards[total - ahead :]]


def _zero_bubble(s: int, p: int, m: int, v: int) -> list[Step]:
    """Return ZB-H1's list of a stage (figure 3): W(i) after I(i + s).

    Stage s would wait s times in the cool-down: its s delayed weight gradients fill these bubbles.
    """
    # If there are few micro-batches (m < p), fewer of them run ahead or are delayed.
    ahead, late = min(p - s, m), min(s, m)
    steps = [(s, FORWARD)] * ahead
    for i in range(m):
        steps.append((s, INPUT_GRAD))
        steps += [(s, WEIGHT_GRAD)] * (i >= late) + [(s, FORWARD)] * (i + ahead < m)
    return steps + [(s, WEIGHT_GRAD)] * late


def _zb_v(s: int, p: int, m: int, v: int) -> list[Step]:
    """Return ZB-V's list of a stage.

    Stage s has chunk s on the way down and chunk 2p - 1 - s on the way up, so the first stage has the input and the
    loss, and the first gradient is ready when p micro-batches are in memory.  The list is built for at least 2p - 1
    micro-batches and then shortened, since with fewer the pipeline is never full.
    """
    # `_number_steps` drops the micro-batches beyond m.
    full = max(m, 2 * p - 1)
    down, up, left = s, 2 * p - 1 - s, p - s
    fill = [(down, FORWARD)] * (2 * left - 1) + [(up, FORWARD), (down, FORWARD)] * s
    turn = [(up, FORWARD), (up, INPUT_GRAD), (up, WEIGHT_GRAD)]
    level = [(down, FORWARD), (down, INPUT_GRAD), (down, WEIGHT_GRAD), *turn] * (full - p)
    drain = [(down, INPUT_GRAD), (up, INPUT_GRAD)] * s + [(down, INPUT_GRAD), (down, WEIGHT_GRAD)] * left
    return [*fill, *turn * left, *level, *drain, *[(up, WEIGHT_GRAD)] * s, *[(down, WEIGHT_GRAD)] * s]


def _dualpipe_v(s: int, p: int, m: int, v: int) -> list[Step]:
    """Return DualPipeV's list of a stage: on each, a forward of one chunk alternates with a backward of the other.

    The V is the same as in ZB-V, like DualPipe cut in half.  Backwards are whole if no other stage waits for them:
    only the backwards of the first and the last micro-batches are split.  The list is built for at least 2p
    micro-batches.
    """
    # Like in ZB-V, `_number_steps` drops the micro-batches beyond m.
    full = max(m, 2 * p)
    down, up, left = s, 2 * p - 1 - s, p - s - 1
    fill = [(down, FORWARD)] * (2 * left) + [(down, FORWARD), (up, FORWARD)] * (s + 1)
    first = [(up, INPUT_GRAD), (up, WEIGHT_GRAD), (up, FORWARD)] * left
    pair = [(up, BACKWARD), (up, FORWARD), (down, BACKWARD)]
    level = [(down, FORWARD), *pair] * (full - 2 * p + s + 1)
    last = [(up, BACKWARD), (down, BACKWARD)] * (s + 1)
    split = [(chunk, INPUT_GRAD) for chunk, _ in last[s + 1 :]]
    drain = [(_OLDEST, WEIGHT_GRAD), (down, INPUT_GRAD)] * left
    ends = [*last[: s + 1], *split, *drain, *[(_OLDEST, WEIGHT_GRAD)] * (s + 1)]
    return [*fill, *first, *level, *pair * left, *ends]


_RULES: dict[str, Callable[[int, int, int, int], list[Step]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleave,
    "zb-h1": _zero_bubble,
    "zb-v": _zb_v,
    "dualpipe-v": _dualpipe_v,
}
NAMES = tuple(_RULES)
