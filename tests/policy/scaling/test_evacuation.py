"""Where the data of leavers goes, as claims; what holds of any items and receivers follows as properties."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.policy.scaling.evacuation import spread

ITEMS = st.lists(
    st.tuples(
        st.one_of(st.integers(), st.text(max_size=3), st.tuples(st.text(max_size=2), st.integers())),
        st.integers(0, 1000),
    ),
    max_size=40,
    unique_by=lambda item: item[0],
)
FREE = st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 5000), max_size=8)


def filled(items: list, found: dict) -> Counter[str]:
    """Bytes by receiver."""
    sizes = dict(items)
    taken: Counter[str] = Counter()
    for key, address in found.items():
        taken[address] += sizes[key]
    return taken


@pytest.mark.parametrize(
    ("items", "free", "wanted"),
    [
        pytest.param([], {}, {}, id="nothing needs nobody"),
        pytest.param([("x", 1)], {}, {}, id="something needs somebody"),
        pytest.param([("x", 0)], {"a": 0}, {"x": "a"}, id="an item without bytes fits anywhere"),
        pytest.param([("x", 6)], {"a": 5, "b": 5}, {}, id="an item is not split over two"),
        pytest.param([("x", 5)], {"a": 5}, {"x": "a"}, id="the last byte may be used"),
        pytest.param([("x", 5), ("y", 1)], {"a": 5}, {"x": "a"}, id="what comes first is placed where not all fit"),
        pytest.param([("x", 6), ("y", 1)], {"a": 5}, {"y": "a"}, id="what does not fit holds up nothing"),
        pytest.param([("x", 1)], {"a": 4, "b": 9}, {"x": "b"}, id="the first goes where most is free"),
        pytest.param([("x", 1)], {"b": 4, "a": 4}, {"x": "a"}, id="ties break by address"),
        pytest.param([("l", 8), ("s", 1)], {"a": 10, "b": 8}, {"l": "a", "s": "b"},
            id="the next one goes where less is filled"),
        pytest.param([("l", 8), ("s", 2)], {"a": 3, "b": 8}, {"l": "b", "s": "a"},
            id="one without room is asked for less"),
        pytest.param([("y", 2), ("x", -5)], {"a": 2, "b": -9}, {"y": "a", "x": "b"},
            id="negative sizes count as none"),
        pytest.param([(f"k{n}", 10) for n in range(8)], {"a": 300, "b": 100},
            {f"k{n}": "b" if n in (1, 5) else "a" for n in range(8)},
            id="three times the memory, three times the items"),
    ],
)  # fmt: skip
def test_goes_to(items: list, free: dict, wanted: dict | None) -> None:
    assert spread(items, free) == wanted


def test_an_empty_receiver_is_no_backup_of_all() -> None:
    """Dask's retirement sent 33, 4 and 3 of 40 results to three receivers of which one was empty."""
    found = spread([((("x", n)), 100) for n in range(40)], {"empty": 8000, "half": 4000, "other": 4000})
    assert Counter(found.values()) == {"empty": 20, "half": 10, "other": 10}


def test_items_without_bytes_are_spread_too() -> None:
    found = spread([(n, 0) for n in range(1000)], {"a": 10**6, "b": 10**6})
    assert Counter(found.values()) == {"a": 500, "b": 500}


def test_many_items_cost_about_the_same_each() -> None:
    """Receivers that are full are not looked at again for each item: counted in comparisons, not in seconds."""

    class Counted(int):
        looks = 0

        def __lt__(self, other: int) -> bool:
            Counted.looks += 1
            return int(self) < other

    free = {f"r{n}": Counted(9) for n in range(500)} | {"large": Counted(10**9)}
    assert set(spread([(n, 10) for n in range(2000)], free).values()) == {"large"}
    assert 500 <= Counted.looks <= 2500


@given(ITEMS, FREE)
def test_all_items_have_one_receiver_with_room_for_them(items: list, free: dict) -> None:
    found = spread(items, free)
    sizes = [size for _, size in items]
    if len(found) < len(items):
        # A way is missed only where each has less left than the largest item takes.
        assert not free or sum(sizes) > sum(free.values()) - len(free) * max(sizes)
    assert set(found) <= {key for key, _ in items}
    assert set(found.values()) <= set(free)
    assert all(taken <= free[address] for address, taken in filled(items, found).items())


@given(ITEMS, FREE)
def test_nobody_is_above_the_common_share_by_more_than_an_item(items: list, free: dict) -> None:
    roomy = {
        address: nbytes + 40_000 for address, nbytes in free.items()
    }  # so that everything fits everywhere
    found = spread(items, roomy)
    if not free:
        assert found == {}
        return
    common = Fraction(sum(size for _, size in items), max(sum(roomy.values()), 1))
    largest = max((max(size, 1) for _, size in items), default=0)
    for address, taken in filled(items, found).items():
        assert taken <= common * roomy[address] + largest + len(items)


@given(ITEMS, FREE, st.randoms())
def test_the_order_of_receivers_does_not_matter(items: list, free: dict, random) -> None:
    receivers = list(free.items())
    random.shuffle(receivers)
    assert spread(items, dict(receivers)) == spread(items, free)
