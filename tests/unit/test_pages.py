"""`PagePool`: who holds which page."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvxfer as kx


def test_case_23_a_full_pool_says_so_at_once_and_takes_the_room_after_a_release() -> None:
    pool = kx.PagePool(20)
    first, second = pool.take(8), pool.take(8)
    assert not set(first) & set(second)
    for _ in range(3):
        with pytest.raises(kx.PoolFull, match=r"8 pages are wanted, but 4 of the pool's 20 are free"):
            pool.take(8)
    assert len(pool) == 4, "a refusal takes nothing"
    pool.give(first)
    third = pool.take(8)
    assert list(third) == list(first), "what came back last goes out first"
    assert not set(third) & set(second)


def test_case_23_a_room_that_never_fits_is_refused_at_once() -> None:
    pool = kx.PagePool(20)
    with pytest.raises(kx.PageError, match=r"21 pages are wanted, but the pool has 20 in all"):
        pool.take(21)
    everything = pool.take(20)
    with pytest.raises(kx.PageError, match="can never be had"):
        pool.take(21)
    assert sorted(everything) == list(range(20))


def test_pages_are_an_array_of_the_callers_own() -> None:
    pool = kx.PagePool(8)
    pages = pool.take(3)
    assert pages.dtype == np.int32
    pages[:] = 7  # no harm to the pool
    assert sorted(pool.take(5)) == [3, 4, 5, 6, 7]
    assert pool.take(0).shape == (0,)
    assert (len(pool), pool.pages, bool(pool)) == (0, 8, True)
    assert repr(pool) == "<PagePool of 8 pages, 0 free>"


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ([1, 1], "page 1 is in the list twice"),
        ([2, 5], "page 5 is free already"),
        ([3, 8], "page 8 is not of this pool, which has pages 0 to 7"),
        ([-1], "page -1 is not of this pool"),
        ([2**40], f"page {2**40} is not of this pool"),
    ],
)
def test_a_wrong_give_names_the_page_and_changes_nothing(pages: list[int], words: str) -> None:
    pool = kx.PagePool(8)
    held = pool.take(5)
    with pytest.raises(kx.PageError, match=words):
        pool.give(pages)
    assert len(pool) == 3
    pool.give(held)
    assert len(pool) == 8
    with pytest.raises(kx.PageError, match="is free already"):
        pool.give(held)


@pytest.mark.parametrize("wrong", [[1.5], [[1, 2]], ["one"], [True]])
def test_pages_must_be_integers(wrong: list[object]) -> None:
    pool = kx.PagePool(8)
    pool.take(8)
    with pytest.raises(kx.BadArgument, match="flat list of integers"):
        pool.give(wrong)
    pool.give([])


@pytest.mark.parametrize("wrong", [0, -1, 2**31])
def test_a_pool_has_at_least_one_page_and_ids_of_31_bits(wrong: int) -> None:
    with pytest.raises(kx.BadArgument, match=f"pages is {wrong}"):
        kx.PagePool(wrong)


def test_a_negative_number_of_pages_is_refused() -> None:
    with pytest.raises(kx.BadArgument, match="-1 pages are wanted"):
        kx.PagePool(4).take(-1)
    with pytest.raises(TypeError):
        kx.PagePool(4).take(1.5)  # type: ignore[arg-type]


def test_a_block_gives_its_pages_back_unless_it_fails() -> None:
    pool = kx.PagePool(4)
    with pool.taken(3) as pages:
        assert len(pages) == 3
        assert len(pool) == 1
    assert len(pool) == 4
    with pytest.raises(kx.WaitTimeout), pool.taken(3):
        raise kx.WaitTimeout("the room goes on")
    assert len(pool) == 1, "a peer may still write into them"


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 40),
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(0, 45), st.randoms(use_true_random=False)), max_size=40
    ),
)
def test_no_page_has_two_holders_and_none_is_lost(size: int, steps: list[tuple[bool, int, object]]) -> None:
    """Against a plain set: whatever is taken and given back, in whatever pieces."""
    pool, free, held = kx.PagePool(size), set(range(size)), []
    for taking, count, random in steps:
        if taking:
            if count > size:
                with pytest.raises(kx.PageError):
                    pool.take(count)
            elif count > len(free):
                with pytest.raises(kx.PoolFull):
                    pool.take(count)
            else:
                pages = [int(page) for page in pool.take(count)]
                assert len(set(pages)) == count
                assert free >= set(pages)
                free -= set(pages)
                held += pages
        else:
            random.shuffle(held)  # type: ignore[attr-defined]
            back, held = held[:count], held[count:]
            pool.give(back)
            free |= set(back)
            if back:
                with pytest.raises(kx.PageError):
                    pool.give(back[:1])
        assert len(pool) == len(free)


def test_threads_never_hold_the_same_page() -> None:
    pool, owners, wrong = kx.PagePool(64), [0] * 64, []
    start = threading.Barrier(8)

    def work(me: int) -> None:
        start.wait()
        for turn in range(400):
            try:
                pages = pool.take(1 + (turn * 7 + me) % 12)
            except kx.PoolFull:
                continue
            for page in pages:
                if owners[page]:
                    wrong.append((int(page), owners[page], me))
                owners[page] = me
            for page in pages:
                owners[page] = 0
            pool.give(pages)

    threads = [threading.Thread(target=work, args=(n + 1,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sorted(pool.take(64)) == list(range(64))
