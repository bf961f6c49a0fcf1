"""The vLLM connector's bookkeeping, with plain ids: no vLLM is needed."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvxfer as kx
from kvxfer.vllm.meta import Chunk, Grant, Open, Orders
from kvxfer.vllm.scheduler import Books, Scheduled
from kvxfer.vllm.settings import NOT_SET, NOT_USED, Settings, read_settings, refuse_fields
from kvxfer.vllm.stats import COUNTERS, GAUGES, HOOK_METRIC, SERIES

BLOCK = 32
DECODE_LEG = {"do_remote_prefill": True, "do_remote_decode": False, "room": 7, "source": "10.0.0.1:8998"}
PREFILL_LEG = {"do_remote_decode": True, "do_remote_prefill": False, "room": 7}


def books(role: str, **extra: object) -> Books:
    return Books(read_settings(extra, role=role, engine="e"), BLOCK)


def new(request: str, blocks: tuple[int, ...], computed: int, scheduled: int) -> Scheduled:
    return Scheduled(request, blocks, True, computed, scheduled)


def more(request: str, blocks: tuple[int, ...], computed: int, scheduled: int) -> Scheduled:
    return Scheduled(request, blocks, False, computed, scheduled)


def test_importing_the_parts_does_not_import_vllm() -> None:
    parts = "kvxfer, kvxfer.vllm.scheduler, kvxfer.vllm.worker, kvxfer.vllm.layout, kvxfer.vllm.stats"
    code = f"import sys, {parts}; sys.exit(any(name in sys.modules for name in ('vllm', 'torch')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_whole_prompt_is_pushed_in_one_step_and_its_answer_names_room_and_directory() -> None:
    b = books("kv_producer", directory="10.0.0.1:9000")
    b.new_request("r", PREFILL_LEG, 70)
    assert b.pending is False
    assert b.matched("r", 0) == (0, False)
    orders = b.step([new("r", (5, 6, 9), 0, 70)], ())
    assert orders.opens == [Open("r", 7)]
    assert orders.chunks == [Chunk("r", 7, 0, 70, (5, 6, 9), True)]
    assert b.finished("r", aborted=False) == (
        True,
        {"do_remote_prefill": True, "do_remote_decode": False, "room": 7, "source": "10.0.0.1:9000"},
    )
    assert b.pending
    assert b.step((), ()).finished == ["r"]
    assert not b.pending


def test_case_10_chunks_send_every_page_and_the_last_one_says_so() -> None:
    b = books("kv_producer")
    b.new_request("r", PREFILL_LEG, 100)
    chunks = []
    chunks += b.step([new("r", (1, 2), 0, 48)], ()).chunks
    chunks += b.step([more("r", (3,), 48, 48)], ()).chunks
    chunks += b.step([more("r", (4,), 96, 4)], ()).chunks
    assert [(c.start, c.end, c.blocks, c.last) for c in chunks] == [
        (0, 48, (1, 2), False),
        (48, 96, (2, 3), False),
        (96, 100, (4,), True),
    ]


def test_tokens_of_the_prefix_cache_go_with_the_first_chunk() -> None:
    b = books("kv_producer")
    b.new_request("r", PREFILL_LEG, 100)
    (chunk,) = b.step([new("r", (1, 2, 3, 4), 64, 36)], ()).chunks
    assert (chunk.start, chunk.end, chunk.blocks, chunk.last) == (0, 100, (1, 2, 3, 4), True)


def test_case_10_a_preempted_prompt_is_pushed_again_from_its_new_pages_only() -> None:
    b = books("kv_producer")
    b.new_request("r", PREFILL_LEG, 100)
    b.step([new("r", (3, 4, 5), 0, 96)], ())
    assert b.step((), {"r"}).preempted == ["r"]
    (chunk,) = b.step([Scheduled("r", (9, 10, 11, 12), True, 0, 100)], ()).chunks
    assert (chunk.start, chunk.end, chunk.blocks) == (0, 100, (9, 10, 11, 12))


def test_tokens_of_the_answer_are_not_pushed() -> None:
    b = books("kv_producer")
    b.new_request("r", PREFILL_LEG, 40)
    assert b.step([new("r", (1, 2), 0, 40)], ()).chunks[0].end == 40
    assert b.step([more("r", (), 40, 1)], ()).chunks == []


def test_a_prefill_leg_without_a_room_gets_one() -> None:
    b = books("kv_producer")
    b.new_request("r", {"do_remote_decode": True}, 10)
    b.step([new("r", (1,), 0, 10)], ())
    _, params = b.finished("r", aborted=False)
    assert params is not None
    assert 0 <= params["room"] < 2**63


@pytest.mark.parametrize("sent", [False, True])
def test_an_aborted_prompt_gives_its_room_up_and_keeps_its_pages_while_they_may_be_read(sent: bool) -> None:
    b = books("kv_producer")
    b.new_request("r", PREFILL_LEG, 100)
    if sent:
        b.step([new("r", (1, 2), 0, 64)], ())
    delay, params = b.finished("r", aborted=True)
    assert (delay, params) == (sent, None)
    assert b.pending
    orders = b.step((), ())
    assert orders.cancels == ["r"]
    assert orders.finished == (["r"] if sent else [])
    # So that the room is known, and decode hears of it.
    assert orders.opens == ([] if sent else [Open("r", 7)])


def test_case_08_decode_grants_only_the_pages_that_it_has_not() -> None:
    b = books("kv_consumer")
    b.new_request("r", DECODE_LEG, 150)
    assert b.matched("r", 96) == (54, True)
    b.allocated("r", [1, 2, 3, 7, 9], 54)
    assert b.step((), ()).grants == [Grant("r", 7, "10.0.0.1:8998", 96, 150, (7, 9))]
    # Granted once: after a preemption it is computed here.
    assert b.matched("r", 0) == (0, False)
    b.allocated("r", [1, 2, 3, 7, 9], 0)
    assert not b.step((), ())


def test_asking_twice_before_there_are_pages_grants_once_for_the_last_answer() -> None:
    b = books("kv_consumer")
    b.new_request("r", DECODE_LEG, 150)
    assert b.matched("r", 0) == (150, True)
    assert b.matched("r", 64) == (86, True)
    b.allocated("r", [1, 2, 3, 4, 5], 86)
    (grant,) = b.step((), ()).grants
    assert (grant.start, grant.end, grant.blocks) == (64, 150, (3, 4, 5))


def test_case_09_a_prompt_that_vllm_computes_after_all_lets_prefill_go() -> None:
    b = books("kv_consumer")
    b.new_request("r", DECODE_LEG, 150)
    b.matched("r", 0)
    b.allocated("r", [1, 2, 3, 4, 5], 0)
    orders = b.step((), ())
    assert orders.grants == [Grant("r", 7, "10.0.0.1:8998", 150, 150, ())]
    assert orders.cancels == ["r"]


def test_an_abort_while_waiting_for_pages_lets_prefill_go_and_one_while_loading_cancels() -> None:
    b = books("kv_consumer")
    b.new_request("early", DECODE_LEG, 150)
    assert b.finished("early", aborted=True) == (False, None)
    orders = b.step((), ())
    assert [g.blocks for g in orders.grants] == [()]
    assert orders.cancels == ["early"]
    b.new_request("late", DECODE_LEG, 150)
    b.matched("late", 0)
    b.allocated("late", [1, 2, 3, 4, 5], 150)
    b.step((), ())
    # vLLM itself keeps the pages of a load.
    assert b.finished("late", aborted=True) == (False, None)
    assert b.step((), ()).cancels == ["late"]


def test_a_request_that_the_front_end_turned_away_lets_prefill_go_and_is_not_counted() -> None:
    b = books("kv_consumer")
    for params in (None, {}, {**DECODE_LEG, "room": None}, PREFILL_LEG):
        b.rejected("x", params)
        assert b.finished("x", aborted=True) == (False, None)
        assert not b.pending
    b.rejected("r", DECODE_LEG)
    b.finished("r", aborted=True)
    orders = b.step((), ())
    assert [(g.room, g.blocks) for g in orders.grants] == [(7, ())]
    assert orders.cancels == ["r"]
    assert (b.missing_rooms, b.refused_requests) == (0, 0)


def test_plain_requests_are_computed_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    b = books("kv_producer")
    with caplog.at_level(logging.WARNING, "vllm.kvxfer"):
        for i in range(3):
            b.new_request(f"r{i}", None, 10)
            assert b.matched(f"r{i}", 0) == (0, False)
    assert b.missing_rooms == 3
    assert [("r0" in record.message, "kvxfer proxy" in record.message) for record in caplog.records] == [
        (True, True)
    ]


def test_plain_requests_fail_where_they_are_to_be_rejected_and_the_error_names_the_proxy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    b = books("kv_consumer", on_missing_room="reject")
    why = b.new_request("r", None, 10)
    assert why is not None
    assert "kvxfer proxy" in why
    assert b.matched("r", 0) == (0, False)
    assert "kvxfer proxy" in caplog.text
    assert b.refused_requests == 1


def test_plain_requests_are_at_home_on_a_server_of_both_roles() -> None:
    b = books("kv_both")
    b.new_request("r", None, 10)
    assert b.matched("r", 0) == (0, False)
    assert b.missing_rooms == 0


@pytest.mark.parametrize(
    ("role", "params", "says"),
    [
        ("kv_consumer", PREFILL_LEG, ("prefill leg", "kv_consumer")),
        ("kv_producer", DECODE_LEG, ("decode leg", "kv_producer")),
        (
            "kv_both",
            {**DECODE_LEG, "do_remote_decode": True},
            ("both do_remote_decode and do_remote_prefill",),
        ),
        ("kv_consumer", {**DECODE_LEG, "room": -1}, ("63 bits",)),
        ("kv_consumer", {**DECODE_LEG, "room": 2**63}, ("63 bits",)),
        ("kv_consumer", {**DECODE_LEG, "room": "7x"}, ("63 bits",)),
        ("kv_consumer", {**DECODE_LEG, "source": None}, ("host:port",)),
        ("kv_consumer", {**DECODE_LEG, "source": "10.0.0.1"}, ("host:port", "no port")),
        ("kv_consumer", {**DECODE_LEG, "source": "10.0.0.1:http"}, ("host:port", "'http' is no port")),
    ],
)
def test_case_18_what_does_not_fit_fails_alone_and_says_what(
    role: str, params: dict[str, object], says: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    b = books(role)
    why = b.new_request("r", params, 10)
    for word in says:
        assert why is not None
        assert word in why
        assert word in caplog.text
    assert not b.step([new("r", (1,), 0, 10)], ())
    b.new_request("next", None, 10)
    assert b.matched("next", 0) == (0, False)


def test_a_room_may_come_as_text_and_is_taken_once() -> None:
    b = books("kv_consumer")
    b.new_request("a", {**DECODE_LEG, "room": str(2**63 - 1)}, 10)
    b.matched("a", 0)
    b.allocated("a", [1], 10)
    assert b.step((), ()).grants[0].room == 2**63 - 1
    why = b.new_request("b", {**DECODE_LEG, "room": 2**63 - 1}, 10)
    assert why is not None
    assert "in use" in why


def test_a_refused_request_that_is_aborted_leaves_nothing() -> None:
    b = books("kv_producer")
    b.new_request("r", DECODE_LEG, 10)
    assert b.finished("r", aborted=True) == (False, None)
    assert not b.pending


def test_empty_orders_are_false_and_each_kind_is_true() -> None:
    assert not Orders()
    for name in Orders.__dataclass_fields__:
        assert Orders(**{name: ["x"]}), name


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"lisen": "x"}, "lisen"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": True}, "timeout_s"),
        ({"on_missing_room": "ignore"}, "compute, reject"),
        ({"listen": "0.0.0.0"}, "directory"),
        ({"listen": "127.0.0.1:5"}, "host only"),
        ({"directory": "h:0"}, "fixed"),
        ({"directory": "h:x"}, "no port"),
        ({"fabric": "rdma"}, "auto, shm, ucx"),
        ({"verify": True}, "verify"),
        ({"insecure": 1}, "insecure"),
        ({"cpu": -1}, "cpu"),
    ],
)
def test_settings_refuse_what_they_cannot_honour_by_name(extra: dict[str, object], says: str) -> None:
    with pytest.raises(kx.BadArgument, match=says):
        read_settings(extra, role="kv_producer", engine="e")


def test_settings_have_the_defaults_that_the_page_says() -> None:
    s = read_settings({}, role="kv_producer", engine="e")
    assert (s.listen, s.directory, s.timeout_s, s.on_missing_room) == (
        "127.0.0.1",
        "127.0.0.1:8998",
        300.0,
        "compute",
    )
    assert (s.fabric, s.verify, s.staging, s.unit, s.insecure) == ("auto", None, "auto", "tile", False)
    assert s.agent_listen(0) == "127.0.0.1:8998"
    assert s.agent_listen(3) == "127.0.0.1:0"
    d = read_settings({"listen": "[::1]:5"}, role="kv_consumer", engine="e")
    assert (d.agent_listen(0), d.agent_listen(1)) == ("[::1]:5", "[::1]:0")
    assert read_settings({}, role="kv_both", engine="e", dp_index=2).directory == "127.0.0.1:9000"


def test_the_page_lists_every_setting_every_field_and_every_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    names = set(Settings.__dataclass_fields__) - NOT_SET
    assert [name for name in names if f"| `{name}` |" not in page] == []
    assert [name for name in NOT_USED if f"`{name}`" not in page] == []
    metrics = [name for name, _ in (*COUNTERS.values(), *GAUGES.values(), *SERIES.values(), HOOK_METRIC)]
    assert [name for name in metrics if f"`{name}" not in page] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_port", 5000),
        ("kv_ip", "10.0.0.1"),
        ("kv_rank", 1),
        ("kv_parallel_size", 2),
        ("enable_permute_local_kv", True),
    ],
)
def test_fields_that_nothing_looks_at_are_refused_by_name(field: str, value: object) -> None:
    refuse_fields(SimpleNamespace(kv_port=14579, kv_buffer_device="cpu"))
    with pytest.raises(kx.BadArgument, match=field):
        refuse_fields(SimpleNamespace(**{field: value}))
    with pytest.raises(kx.NotSupported, match="kv_buffer_device"):
        refuse_fields(SimpleNamespace(kv_buffer_device="cuda"))


@pytest.mark.parametrize(
    ("role", "extra", "says"),
    [
        ("kv_consumer", {"directory": "10.0.0.1:8998"}, "directory.*kv_consumer.*source"),
        ("kv_both", {"on_missing_room": "reject"}, "on_missing_room.*kv_both"),
        ("kv_producer", {"verify": "full"}, "verify.*kv_producer.*decode"),
        ("kv_both", {"fabric": "shm", "ucx_tls": "tcp"}, "ucx_tls.*shm"),
        ("kv_both", {"fabric": "shm", "staging": "always"}, "staging.*shm"),
        ("kv_both", {"quarantine_limit": -1}, "quarantine_limit.*pages"),
    ],
)
def test_keys_that_nothing_would_look_at_are_refused_by_name(
    role: str, extra: dict[str, object], says: str
) -> None:
    with pytest.raises(kx.BadArgument, match=says):
        read_settings(extra, role=role, engine="e")


def test_each_data_parallel_engine_has_ports_of_its_own() -> None:
    d = read_settings({"listen": "0.0.0.0:7000"}, role="kv_consumer", engine="e", dp_index=3, dp_size=4)
    assert (d.agent_listen(0), d.agent_listen(1)) == ("0.0.0.0:7003", "0.0.0.0:0")
    p = read_settings({"directory": "h:7000"}, role="kv_producer", engine="e", dp_index=3, dp_size=4)
    assert (p.directory, p.agent_listen(0)) == ("h:7003", "127.0.0.1:7003")
    with pytest.raises(kx.BadArgument, match="data-parallel engine 3"):
        read_settings({"listen": "h:65534"}, role="kv_consumer", engine="e", dp_index=3, dp_size=4)


@pytest.mark.parametrize("size", [1, 2], ids=["dense", "experts"])
def test_a_prompt_that_came_to_another_data_parallel_engine_than_decode_was_told_fails_at_once(
    size: int,
) -> None:
    # vLLM sets the number of engines back to 1 for models without experts.
    settings = read_settings(
        {"directory": "h:7000"}, role="kv_producer", engine="e", dp_index=1, dp_size=size
    )
    b = Books(settings, BLOCK)
    why = b.new_request("a", {**PREFILL_LEG, "source": "h:7000"}, 10)
    assert why is not None
    assert "h:7000" in why
    assert "h:7001" in why
    assert "late" in why
    assert b.new_request("b", {**PREFILL_LEG, "source": "other-name:7001"}, 10) is None
    # Late choice says nothing of it; and of one engine alone an address may be known by another port.
    assert b.new_request("c", {**PREFILL_LEG, "room": 8}, 10) is None
    alone = books("kv_producer")
    assert alone.new_request("d", {**PREFILL_LEG, "source": "gateway:1"}, 10) is None


def test_a_room_that_nobody_comes_for_is_given_up_and_its_messenger_is_computed() -> None:
    b = books("kv_producer", on_missing_room="reject")
    assert b.new_request("m", {"give_up": 7}, 1) is None
    assert b.matched("m", 0) == (0, False)
    assert b.pending
    assert b.step([new("m", (1,), 0, 1)], ()).given_up == [7]
    # Decode has none to give up: there it is a request without a room.
    other = books("kv_consumer", on_missing_room="reject")
    assert other.new_request("m", {"give_up": 7}, 1) is not None
    assert not other.step([], ()).given_up
    assert (b.missing_rooms, b.refused_requests) == (0, 0)


def test_an_answer_says_how_long_its_prompt_took_to_come() -> None:
    now = [10.0]
    b = Books(read_settings({}, role="kv_consumer", engine="e"), BLOCK, clock=lambda: now[0])
    for name, room in (("r", 7), ("s", 8)):
        assert b.new_request(name, {**DECODE_LEG, "room": room}, 40) is None
        b.matched(name, 0)
        b.allocated(name, (1, 2), 40)
    b.step((), ())
    now[0] += 0.125
    b.loaded("r")
    now[0] += 5.0
    assert b.finished("r", aborted=False) == (False, {"loaded_ms": 125.0})
    assert not b.pending
    assert b.finished("s", aborted=True) == (False, None)
    assert b.step((), ()).cancels == ["s"]


def test_a_room_that_the_agent_refuses_is_counted_and_its_reason_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    b = books("kv_consumer")
    assert b.refused_by_agent("r", "room 7 is in use") is None
    b.new_request("r", DECODE_LEG, 40)
    assert b.refused_by_agent("r", "room 7 is in use") == "room 7 is in use"
    assert b.refused_requests == 1
    assert "room 7 is in use" in caplog.text


def test_what_the_proxy_gives_to_decode_alone_is_no_missing_room() -> None:
    b = books("kv_consumer", on_missing_room="reject")
    b.new_request("r", {"do_remote_prefill": False, "do_remote_decode": False}, 10)
    assert b.matched("r", 0) == (0, False)
    assert (b.missing_rooms, b.refused_requests) == (0, 0)
