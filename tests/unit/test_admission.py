"""`kvxfer.admission`: never more than there is, everything given back once, and who goes where."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import time

import pytest
from admitting import admitted, ask, one_pair, queued, refused

import kvxfer as kx
from kvxfer.admission import Admission, AnswerLengths, Config, Decode, Expired, Prefill, Reason


def test_pages_for_prompt_and_answer_and_a_slot_are_reserved_before_prefill_starts() -> None:
    admission = one_pair()
    found = admitted(admission.handle_request(5.0, ask(1, prompt=1000, answer=121)))
    assert (found.prefill, found.decode, found.pages) == ("p", "d", 71)
    (decode,), (prefill,) = admission.stats().decode, admission.stats().prefill
    assert (decode.pages_reserved, decode.slots_held) == (71, 1)
    assert prefill.tokens_in_flight == 1000
    assert prefill.bytes_in_flight == decode.bytes_in_flight == found.nbytes == 1000 * 131_072
    assert found.start_s == 5.0
    move_s = 0.005 + 1000 * 131_072 / 12.5e9
    assert found.first_token_s == pytest.approx(5.0 + 1.0 + move_s)
    # The next one starts after this one's prompt.
    second = admitted(admission.handle_request(5.0, ask(2, prompt=500)))
    assert second.start_s == pytest.approx(6.0)
    assert second.first_token_s > 6.5


def test_a_full_decode_server_pushes_back_and_says_when_to_come_again() -> None:
    admission = one_pair(pages=150, queue_requests=0)
    admitted(admission.handle_request(0.0, ask(1)))
    admitted(admission.handle_request(0.0, ask(2)))
    third = refused(admission.handle_request(0.0, ask(3)))
    assert third.reason is Reason.DECODE_PAGES
    assert third.retry_after_s is not None
    assert third.retry_after_s >= 1
    for turn in range(20):
        # Requests are known to take 40 s, of which two run: one comes free every 20 s.
        admission.handle_finished(40.0 * (turn + 1), turn + 1)
        admission.handle_failed(turn + 2)
        admitted(admission.handle_request(40.0 * (turn + 1), ask(turn + 2)))
        admitted(admission.handle_request(40.0 * (turn + 1), ask(("b", turn))))
        late = refused(admission.handle_request(40.0 * (turn + 1), ask("late")))
        admission.handle_failed(("b", turn))
    assert late.retry_after_s == pytest.approx(20.0)


def test_slots_are_kept_under_their_share() -> None:
    admission = one_pair(slots=10, pages=None, slots_share=0.8, queue_requests=0)
    for number in range(8):
        admitted(admission.handle_request(0.0, ask(number, prompt=10)))
    assert refused(admission.handle_request(0.0, ask(8, prompt=10))).reason is Reason.DECODE_SLOTS
    assert admission.stats().decode[0].slots == 8


def test_new_requests_leave_pages_for_answers_that_grow() -> None:
    admission = one_pair(pages=100, growth_share=0.1)
    for number in range(9):
        admitted(admission.handle_request(0.0, ask(number, prompt=160, answer=0)))
    assert queued(admission.handle_request(0.0, ask(9, prompt=16, answer=0))).reason is Reason.DECODE_PAGES
    assert admission.handle_answer(0, 100) == 0, "these are for them"


def test_what_never_fits_is_refused_for_good_and_what_only_fits_alone_gets_in_alone() -> None:
    admission = one_pair(pages=100, growth_share=0.1)
    never = refused(admission.handle_request(0.0, ask(1, prompt=1600, answer=1)))
    assert (never.reason, never.retry_after_s) == (Reason.TOO_LARGE, None)
    small = admitted(admission.handle_request(0.0, ask(2, prompt=16, answer=0)))
    assert queued(admission.handle_request(0.0, ask(3, prompt=1600, answer=0))).reason is Reason.DECODE_PAGES
    admission.handle_finished(1.0, small.id)
    assert admitted(admission.poll(1.0)).pages == 100


def test_case_23_a_third_room_waits_for_a_release_and_goes_in_then() -> None:
    admission = one_pair(pages=20)
    for number in (1, 2):
        admitted(admission.handle_request(0.0, ask(number, prompt=100, answer=28)))
    third = queued(admission.handle_request(0.0, ask(3, prompt=100, answer=28)))
    assert (third.reason, third.ahead) == (Reason.DECODE_PAGES, 0)
    assert admission.poll(1.0) is None
    admission.handle_failed(1)
    found = admitted(admission.poll(2.0))
    assert (found.id, found.waited_s) == (3, 2.0)
    assert refused(admission.handle_request(2.0, ask(4, prompt=321))).reason is Reason.TOO_LARGE


def test_the_queue_is_bounded_in_number_and_in_time() -> None:
    admission = one_pair(slots=1, queue_requests=2, queue_wait_s=10.0)
    admitted(admission.handle_request(0.0, ask(1)))
    assert queued(admission.handle_request(1.0, ask(2))).ahead == 0
    assert queued(admission.handle_request(2.0, ask(3))).ahead == 1
    assert refused(admission.handle_request(3.0, ask(4))).reason is Reason.DECODE_SLOTS
    assert admission.poll_timeout() == 11.0
    assert admission.poll(10.9) is None
    late = admission.poll(11.0)
    assert isinstance(late, Expired)
    assert (late.id, late.reason) == (2, Reason.DECODE_SLOTS)
    assert (admission.poll(11.0), admission.poll_timeout()) == (None, 12.0)
    assert admission.handle_failed(3), "whoever waits may leave"
    assert admission.poll_timeout() is None


def test_who_would_wait_longer_than_allowed_is_told_at_once() -> None:
    admission = one_pair(slots=1, queue_wait_s=60.0)
    for number in range(8):
        admitted(admission.handle_request(100.0 * number, ask(number)))
        admission.handle_finished(100.0 * number + 90.0, number)
    admitted(admission.handle_request(1000.0, ask("runs")))
    hopeless = refused(admission.handle_request(1000.0, ask("late")))
    assert hopeless.retry_after_s == pytest.approx(90.0)


def test_small_ones_pass_a_large_one_but_not_for_ever() -> None:
    admission = one_pair(pages=100, overtakes=3)
    admitted(admission.handle_request(0.0, ask("runs", prompt=800, answer=0)))
    queued(admission.handle_request(0.0, ask("large", prompt=1500, answer=0)))
    for number in range(3):
        admitted(admission.handle_request(0.0, ask(number, prompt=16, answer=0)))
    queued(admission.handle_request(0.0, ask("waits", prompt=16, answer=0)))
    admission.handle_finished(1.0, 0)
    assert admission.poll(1.0) is None, "the large one was passed often enough"
    for number in (1, 2, "runs"):
        admission.handle_finished(1.0, number)
    assert [admitted(admission.poll(1.0)).id for _ in range(2)] == ["large", "waits"]


def test_a_second_try_goes_before_all_that_wait() -> None:
    admission = one_pair(slots=1, queue_wait_s=100.0)
    admitted(admission.handle_request(0.0, ask("runs")))
    queued(admission.handle_request(1.0, ask("waits")))
    assert queued(admission.handle_request(9.0, ask("again"), first=True)).ahead == 0
    assert admission.poll_timeout() == 101.0, "the one behind it still has its own time"
    admission.handle_finished(10.0, "runs")
    assert admitted(admission.poll(10.0)).id == "again"


def test_a_busy_link_and_a_busy_prefill_server_push_back() -> None:
    fabric = one_pair(pages=None, slots=1000, gbytes_per_s=0.1, link_backlog_s=5.0, queue_requests=0)
    # 131 MB a request over 100 MB/s: three are 3.9 s.
    for number in range(3):
        admitted(fabric.handle_request(0.0, ask(number)))
    assert refused(fabric.handle_request(0.0, ask(3))).reason is Reason.LINK
    fabric.handle_moved(0)
    admitted(fabric.handle_request(0.0, ask(3)))

    prefill = one_pair(pages=None, slots=1000, prefill_backlog_s=3.0, queue_requests=0)
    for number in range(3):
        admitted(prefill.handle_request(0.0, ask(number)))
    full = refused(prefill.handle_request(0.0, ask(3)))
    assert full.reason is Reason.PREFILL
    prefill.handle_prefilled(1.0, 0)
    admitted(prefill.handle_request(1.0, ask(3)))
    # One that is longer than that in itself still gets a server to itself.
    alone = one_pair(pages=None, prefill_backlog_s=3.0, queue_requests=0)
    admitted(alone.handle_request(0.0, ask(1, prompt=10_000)))


def test_decode_computes_the_prompt_where_moving_takes_longer() -> None:
    admission = one_pair(local=10_000, gbytes_per_s=0.1, pages=None, recompute_s=0.25)
    # 1,000 tokens: 0.1 s to compute, 1.3 s to move.
    found = admitted(admission.handle_request(0.0, ask(1)))
    assert (found.prefill, found.decode, found.nbytes) == (None, "d", 0)
    assert found.first_token_s == pytest.approx(0.1)
    assert admitted(admission.handle_request(0.0, ask(2))).prefill is None
    # No longer than recompute_s at a time: the others' tokens wait for it.
    assert admitted(admission.handle_request(0.0, ask(3))).prefill == "p"
    admission.handle_first_token(0.2, 1)
    assert admitted(admission.handle_request(0.2, ask(4))).prefill is None
    assert admission.stats().recomputed == 3
    # Over a fast link a long prompt moves, and a few tokens are computed sooner than handed off.
    fast = one_pair(local=10_000, pages=None)
    assert admitted(fast.handle_request(0.0, ask(1))).prefill == "p"
    assert admitted(fast.handle_request(0.0, ask(2, prompt=20))).prefill is None


def test_without_a_prefill_server_decode_computes_if_it_may() -> None:
    admission = one_pair(local=10_000, pages=None)
    assert admission.handle_down("p") == []
    assert admitted(admission.handle_request(0.0, ask(1))).prefill is None
    never = one_pair(pages=None)
    never.handle_down("p")
    none = refused(never.handle_request(0.0, ask(1)))
    assert none.reason is Reason.NO_PREFILL
    assert none.retry_after_s == 5.0
    # What no hand-off can serve is computed there all the same.
    assert admitted(never.handle_request(0.0, ask(2, local=True))).prefill is None
    assert never.stats().recomputed == 0, "not for being sooner"


def cluster(route: str = "load", **config: object) -> Admission:
    admission = Admission(Config(route=route, **config))  # type: ignore[arg-type]
    for name in ("p0", "p1"):
        admission.add_prefill(Prefill(name))
    for name in ("d0", "d1"):
        admission.add_decode(Decode(name, pages=4000))
    return admission


def test_load_looks_at_bytes_and_tokens_where_counting_does_not() -> None:
    """One long prompt, and then short ones: by requests they alternate, by load they go to the other."""
    for route, expected in (("load", {"d1"}), ("requests", {"d0", "d1"})):
        admission = cluster(route)
        first = admitted(admission.handle_request(0.0, ask("long", prompt=30_000)))
        other = {"d0": "d1", "d1": "d0"}[first.decode]
        went = [admitted(admission.handle_request(0.0, ask(n, prompt=500))) for n in range(4)]
        names = {one.decode for one in went}
        assert names == ({other} if expected == {"d1"} else {"d0", "d1"}), route
        prefills = {one.prefill for one in went}
        assert (first.prefill not in prefills) == (route == "load")


def test_free_pages_and_links_decide_too() -> None:
    admission = Admission()
    admission.add_prefill(Prefill("p"))
    admission.add_decode(Decode("small", pages=500))
    admission.add_decode(Decode("large", pages=5000))
    assert admitted(admission.handle_request(0.0, ask(1))).decode == "large"
    shared = Admission()
    shared.add_prefill(Prefill("p", gbytes_per_s=100))
    shared.add_decode(Decode("slow", link="rack", gbytes_per_s=1))
    shared.add_decode(Decode("fast", gbytes_per_s=50))
    assert admitted(shared.handle_request(0.0, ask(1))).decode == "fast"
    with pytest.raises(kx.BadArgument, match="link rack is given 2 GB/s here and 1 GB/s before"):
        shared.add_decode(Decode("third", link="rack", gbytes_per_s=2))


def test_equal_servers_are_taken_in_turn() -> None:
    admission = cluster()
    names = []
    for number in range(8):
        found = admitted(admission.handle_request(float(number), ask(number)))
        names.append(found.decode)
        admission.handle_finished(number + 0.5, number)
    assert set(names) == {"d0", "d1"}


def test_a_server_that_is_down_or_to_be_avoided_gets_nothing() -> None:
    admission = cluster()
    run = [admitted(admission.handle_request(0.0, ask(number))) for number in range(6)]
    hit = admission.handle_down("d0")
    assert sorted(hit) == sorted(one.id for one in run if one.decode == "d0")  # type: ignore[type-var]
    for number in range(10, 16):
        assert admitted(admission.handle_request(0.0, ask(number))).decode == "d1"
    # To avoid the only one left is no use.
    assert admitted(admission.handle_request(0.0, ask(20, avoid=frozenset({"d1"})))).decode == "d1"
    admission.handle_up("d0")
    there = frozenset({"d1", "p0"})
    found = admitted(admission.handle_request(0.0, ask(21, avoid=there)))
    assert (found.prefill, found.decode) == ("p1", "d0")
    admission.handle_down("d0")
    admission.handle_down("d1")
    assert refused(admission.handle_request(0.0, ask(22))).reason is Reason.NO_DECODE


def test_an_answer_that_grows_gets_more_and_a_debt_closes_the_server() -> None:
    admission = one_pair(pages=30, growth_tokens=32)
    admitted(admission.handle_request(0.0, ask(1, prompt=160, answer=16)))
    assert admission.handle_answer(1, 16) == 0
    assert admission.stats().decode[0].pages_reserved == 11
    assert admission.handle_answer(1, 17) == 0
    assert admission.stats().decode[0].pages_reserved == 14, "a few pages more, not one at a time"
    admitted(admission.handle_request(0.0, ask(2, prompt=255, answer=1)))
    assert admission.handle_answer(1, 64) == 0
    assert admission.handle_answer(1, 100) == 3, "17 pages are wanted, 14 are there"
    decode = admission.stats().decode[0]
    assert (decode.pages_reserved, decode.pages_short) == (30, 3)
    assert queued(admission.handle_request(0.0, ask(3, prompt=1, answer=0))).reason is Reason.DECODE_PAGES
    assert admission.handle_finished(1.0, 2)
    decode = admission.stats().decode[0]
    assert (decode.pages_reserved, decode.pages_short) == (17, 0), "whoever is owed comes first"
    assert admitted(admission.poll(1.0)).id == 3


def test_a_prompt_that_was_estimated_wrongly_is_corrected() -> None:
    admission = one_pair()
    admitted(admission.handle_request(0.0, ask(1, prompt=1000, answer=0)))
    admission.handle_prefilled(1.0, 1, prompt_tokens=320)
    assert admission.stats().decode[0].pages_reserved == 20
    admission.handle_prefilled(1.0, 1, prompt_tokens=640)
    assert admission.stats().decode[0].pages_reserved == 40
    assert admission.stats().prefill[0].tokens_in_flight == 0


def test_rates_are_measured() -> None:
    admission = one_pair(pages=None, slots=1000)
    # Two prompts that end together did not each take the whole time.
    for number in range(20):
        for half in ("a", "b"):
            admitted(admission.handle_request(10.0 * number, ask((number, half))))
        for half in ("a", "b"):
            admission.handle_prefilled(10.0 * number + 4.0, (number, half))
        for half in ("a", "b"):
            admission.handle_first_token(10.0 * number + 5.0, (number, half))
            admission.handle_finished(10.0 * number + 7.0, (number, half), answer_tokens=101)
    stats = admission.stats()
    assert stats.prefill[0].tokens_per_s == pytest.approx(500, rel=0.1)
    assert stats.time_per_token_ms == pytest.approx(20)
    assert stats.hold_s == pytest.approx(7)


def test_late_choice_moves_what_is_reserved_to_a_better_server_and_never_fails() -> None:
    admission = cluster(growth_share=0.0)
    found = admitted(admission.handle_request(0.0, ask("one", prompt=1600, answer=0)))
    assert admitted(admission.handle_choice(1.0, "one")).decode == found.decode, "none is better"
    # While it was computed the others came to its server.
    other = {"d0": "d1", "d1": "d0"}[found.decode]
    for number in range(4):
        admitted(admission.handle_request(0.0, ask(number, prompt=8000, avoid=frozenset({other}))))
    moved = admitted(admission.handle_choice(1.0, "one"))
    assert moved.decode == other
    stats = {one.name: one for one in admission.stats().decode}
    assert stats[other].pages_reserved == 100
    assert stats[other].slots_held == 1
    assert stats[other].bytes_in_flight == 1600 * 131_072
    assert stats[found.decode].slots_held == 4
    admission.handle_down("d0")
    admission.handle_down("d1")
    assert admitted(admission.handle_choice(2.0, "one")).decode == other
    assert admission.handle_choice(2.0, "unknown") is None


def test_late_choice_goes_neither_back_to_a_server_that_failed_nor_to_one_that_is_down() -> None:
    for down in (False, True):
        admission = cluster(growth_share=0.0)
        avoid = frozenset[str]() if down else frozenset({"d0"})
        if down:
            admission.handle_down("d1")
        found = admitted(admission.handle_request(0.0, ask("one", prompt=1600, avoid=avoid)))
        assert found.decode == ("d0" if down else "d1")
        if down:
            admission.handle_up("d1")
            admission.handle_down("d0")
        # Where it is has more load than the other.
        for number in range(4):
            busy = frozenset({"d0"})
            admitted(admission.handle_request(0.0, ask(number, prompt=1600, avoid=busy)))
        assert admitted(admission.handle_choice(1.0, "one")).decode == "d1"


def test_other_numbers_of_a_server_are_counted_anew() -> None:
    admission = one_pair(pages=100)
    admitted(admission.handle_request(0.0, ask(1, prompt=640, answer=0)))
    admitted(admission.handle_request(0.0, ask(2, prompt=320, answer=0)))
    admission.handle_capacity("d", page_tokens=32)
    assert admission.stats().decode[0].pages_reserved == 30
    admission.handle_capacity("d", pages=25)
    decode = admission.stats().decode[0]
    assert (decode.pages_reserved, decode.pages_short) == (25, 5)
    admission.handle_finished(1.0, 1)
    decode = admission.stats().decode[0]
    assert (decode.pages_reserved, decode.pages_short) == (10, 0)


def test_without_enforcement_everybody_gets_in() -> None:
    admission = one_pair(pages=10, slots=1, enforce=False)
    for number in range(50):
        admitted(admission.handle_request(0.0, ask(number)))
    assert admission.stats().decode[0].slots_held == 50
    for number in range(50):
        assert admission.handle_finished(1.0, number)
    assert admission.stats().decode[0].pages_reserved == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Config(slots_share=1.5), "slots_share is 1.5"),
        (lambda: Config(growth_share=1.0), "growth_share is 1.0"),
        (lambda: Config(link_backlog_s=0), "link_backlog_s is 0"),
        (lambda: Config(queue_requests=-1), "queue_requests is -1"),
        (lambda: Config(route="luck"), "route is 'luck'"),  # type: ignore[arg-type]
        (lambda: Decode("d", pages=0), "decode server d: pages is 0"),
        (lambda: Prefill("p", tokens_per_s=0), "prefill server p: tokens_per_s is 0"),
        (lambda: ask(1, prompt=0), "0 prompt tokens"),
        (lambda: ask(1, cached_tokens=1001), "1001 of 1000 prompt tokens are cached"),
        (lambda: one_pair().add_decode(Decode("p")), "there is a prefill server p already"),
        (lambda: one_pair().handle_down("x"), "there is no server x; there are d, p"),
        (lambda: one_pair().handle_capacity("p", pages=1), "p is a prefill server"),
        (lambda: AnswerLengths(share=0), "share 0"),
    ],
)
def test_wrong_arguments_are_refused_with_their_values(wrong: object, said: str) -> None:
    with pytest.raises(kx.BadArgument, match=re.escape(said)):
        wrong()  # type: ignore[operator]


def test_an_id_is_in_once() -> None:
    admission = one_pair(slots=1)
    admitted(admission.handle_request(0.0, ask(1)))
    queued(admission.handle_request(0.0, ask(2)))
    for id in (1, 2):
        with pytest.raises(kx.BadArgument, match="ids are unique"):
            admission.handle_request(0.0, ask(id))


def test_it_reads_no_clock_and_does_no_io() -> None:
    folder = pathlib.Path(kx.__file__).parent / "admission"
    found = re.findall(
        r"^\s*(?:import|from)\s+(\S+)", "\n".join(file.read_text() for file in folder.glob("*.py")), re.M
    )
    assert {name.split(".")[0] for name in found} <= {
        *("__future__", "bisect", "collections", "dataclasses", "enum", "kvxfer", "numpy", "typing")
    }


def test_importing_kvxfer_does_not_import_what_only_the_proxy_needs() -> None:
    code = (
        "import sys, kvxfer, kvxfer.cli, kvxfer.admission\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('aiohttp', 'asyncio', 'prometheus_client')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_answer_lengths() -> None:
    lengths = AnswerLengths(start=256, share=0.5, window=4)
    assert (lengths.expected(), lengths.expected(10)) == (256, 10)
    for tokens in (1000, 10, 20, 30, 40):
        lengths.add(tokens)
    assert lengths.expected() == 20, "the oldest has gone"


def test_a_decision_among_a_thousand_servers_is_cheap() -> None:
    """A run of the simulator makes 10^5 in less than a minute, on this machine beside other work."""
    admission = Admission()
    for number in range(250):
        admission.add_prefill(Prefill(f"p{number}"))
    for number in range(750):
        admission.add_decode(Decode(f"d{number}", pages=4000, prefill_tokens_per_s=8000))
    began = time.process_time()
    for number in range(2000):
        admitted(admission.handle_request(number / 1e3, ask(number, prompt=100 + number)))
        if number >= 500:
            old = number - 500
            admission.handle_prefilled(number / 1e3, old)
            admission.handle_first_token(number / 1e3, old)
            admission.handle_answer(old, 150)
            admission.handle_finished(number / 1e3, old, answer_tokens=150)
    assert (time.process_time() - began) / 2000 < 600e-6
