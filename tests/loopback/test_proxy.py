"""`kvxfer proxy` before fake servers: both legs, streams, admission, metrics."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from fake_openai import (
    Call,
    answer,
    arrived,
    begin_stream,
    events,
    good_decode,
    good_prefill,
    status,
    when,
)
from proxied import Scene, run, scene

from kvxfer.admission import Config


@pytest.mark.parametrize("stream", [False, True])
def test_both_legs_go_out_at_once_with_one_room(stream: bool) -> None:
    async def test() -> None:
        async with scene(prefill_settings=",source=10.0.0.1:9000") as s:
            (prefill,), (decode,) = s.prefill, s.decode
            computed = asyncio.Event()
            prefill.behave = when(computed, good_prefill)
            body = {"model": "m", "prompt": "Hi", "max_tokens": 7, "temperature": 0.5, "min_tokens": 2}
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            answering = asyncio.create_task(s.client.post(s.url + "/v1/completions", json=body))
            # Decode has its leg before prefill has answered.
            to_prefill, to_decode = await prefill.next_call(), await decode.next_call()
            assert not computed.is_set()
            room = to_prefill.room
            assert 0 < room < 2**63
            assert to_prefill.params == {
                "do_remote_prefill": False,
                "do_remote_decode": True,
                "room": room,
                # By it the one of several data-parallel engines that gets the prompt can say that decode was
                # told of another.
                "source": "10.0.0.1:9000",
            }
            assert to_decode.params == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "room": room,
                "source": "10.0.0.1:9000",
            }
            del to_prefill.body["kv_transfer_params"], to_decode.body["kv_transfer_params"]
            wanted = {"model": "m", "prompt": "Hi", "temperature": 0.5, "max_tokens": 1, "stream": False}
            assert to_prefill.body == wanted
            assert to_decode.body == body
            computed.set()
            response = await answering
            if stream:
                assert await response.read() == b"".join(events(7))
            else:
                assert await response.json() == answer(7)
            s.nothing_is_held()

    run(test())


def test_chat_and_headers() -> None:
    async def test() -> None:
        async with scene() as s:
            body = {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
                "max_completion_tokens": 3,
            }
            headers = {"Authorization": "Bearer key", "X-Request-Id": "mine", "Cookie": "no=1"}
            async with s.client.post(s.url + "/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
            for fake in (*s.prefill, *s.decode):
                call = await fake.next_call()
                assert call.path == "/v1/chat/completions"
                assert (call.headers["Authorization"], call.headers["X-Request-Id"]) == ("Bearer key", "mine")
                assert "Cookie" not in call.headers
            assert s.prefill[0].calls[0].body["max_completion_tokens"] == 1
            assert s.prefill[0].calls[0].body["max_tokens"] == 1
            # The default is the host of the URL, at kvxfer's port.
            assert s.decode[0].calls[0].source == "127.0.0.1:8998"
            async with s.client.get(s.url + "/v1/models", headers=headers) as response:
                assert await response.json() == {"data": [{"id": s.decode[0].name}], "key": "Bearer key"}

    run(test())


def test_late_choice_sends_prefill_first_and_passes_on_what_it_answers() -> None:
    async def test() -> None:
        async with scene(decodes=2, decode_choice="late") as s:
            computed = asyncio.Event()
            s.prefill[0].behave = when(computed, good_prefill)
            answering = asyncio.create_task(s.ask(max_tokens=4))
            call = await s.prefill[0].next_call()
            reserved = [one for one in s.router.admission.stats().decode if one.slots_held]
            assert len(reserved) == 1, "a place is reserved before prefill starts"
            # The reserved server gets busy meanwhile: the choice falls on the other one.
            others = {one.name: one for one in s.decode}
            busy = others.pop(reserved[0].name)
            ((_, other),) = others.items()
            s.router.admission.handle_down(other.name)
            from kvxfer.admission import Request

            for number in range(8):
                s.router.admission.handle_request(0.0, Request(("busy", number), 2000, 10, local=True))
            s.router.admission.handle_up(other.name)
            assert not s.decode[0].calls
            assert not s.decode[1].calls
            computed.set()
            code, _, found = await answering
            assert (code, found) == (200, answer(4))
            assert not busy.calls
            assert (await other.next_call()).params == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "room": call.room,
                "source": "10.9.8.7:8998",
            }
            for number in range(8):
                s.router.admission.handle_failed(("busy", number))
            s.nothing_is_held()

    run(test())


@pytest.mark.parametrize("choice", ["early", "late"])
def test_a_prefill_server_that_hands_nothing_off_is_named_and_decode_does_not_wait_for_it(
    choice: str,
) -> None:
    async def bare(call: Call) -> web.StreamResponse:
        return web.json_response(answer(1))

    async def for_ever(call: Call) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def test() -> None:
        async with scene(decode_choice=choice) as s:
            s.prefill[0].behave, s.decode[0].behave = bare, for_ever
            code, _, found = await s.ask()
            assert code == 502
            assert "without kv_transfer_params" in found["error"]["message"]
            assert "start it with kvxfer's connector" in found["error"]["message"]
            assert len(s.prefill[0].calls) == 1
            s.nothing_is_held()

    run(test())


def test_a_stream_passes_byte_for_byte_however_it_is_cut() -> None:
    parts = [
        b": a comment\n\n",
        'data: {"choices": [{"text": "\u00e9\u00df \\n\\n {\\"error\\": 1}"}]}\r\n\r\n'.encode(),
        b"id: 7\nevent: message\ndata: x\n\n",
        *events(3, usage=True),
        b": the end\n\n",
    ]
    whole = b"".join(parts)

    async def test() -> None:
        async with scene() as s:
            for size in (1, 7, 100, len(whole)):

                async def cut(call: Call, size: int = size) -> web.StreamResponse:
                    await arrived(call)
                    response = await begin_stream(call)
                    for start in range(0, len(whole), size):
                        await response.write(whole[start : start + size])
                    return response

                s.decode[0].behave = cut
                assert await s.stream() == whole
            s.nothing_is_held()

    run(test())


def test_tokens_reach_the_client_as_they_come() -> None:
    async def test() -> None:
        async with scene() as s:
            go = [asyncio.Event() for _ in range(3)]

            async def slowly(call: Call) -> web.StreamResponse:
                await arrived(call)
                response = await begin_stream(call)
                for event, gate in zip(events(2), go, strict=True):
                    await gate.wait()
                    await response.write(event)
                return response

            s.decode[0].behave = slowly
            body = {"prompt": "Hi", "stream": True}
            asking = asyncio.create_task(s.client.post(s.url + "/v1/completions", json=body))
            await s.decode[0].next_call()
            go[0].set()
            response = await asking
            assert await response.content.readany() == events(2)[0]
            go[1].set()
            assert await response.content.readany() == events(2)[1]
            go[2].set()
            assert await response.content.read() == events(2)[2]

    run(test())


@asynccontextmanager
async def one_slot_taken(**config: Any) -> AsyncIterator[tuple[Scene, asyncio.Event, asyncio.Task[Any]]]:
    """One slot and one request in it, which ends when the gate is opened."""
    admission = Config(slots_share=1.0, **config)
    async with scene(decode_settings=",pages=4000,slots=1", admission=admission) as s:
        gate = asyncio.Event()
        s.decode[0].behave = when(gate, good_decode)
        first = asyncio.create_task(s.ask())
        await s.decode[0].next_call()
        yield s, gate, first


def test_a_full_decode_server_answers_429_with_retry_after() -> None:
    async def test() -> None:
        async with one_slot_taken(queue_requests=0) as (s, gate, first):
            code, headers, found = await s.ask()
            assert code == 429
            assert int(headers["Retry-After"]) >= 1
            assert found["error"]["type"] == "rate_limit_error"
            assert "no decode server has a free slot; try again in" in found["error"]["message"]
            assert len(s.prefill[0].calls) == 1, "no prefill started for it"
            gate.set()
            assert (await first)[0] == 200
            assert (await s.ask())[0] == 200
            metrics = await s.metrics()
            assert metrics['kvxfer_proxy_refused_total{reason="decode_slots"}'] == 1
            # How many tokens these are only a server can say; 70,000 tokens are too many for 64,000.
            assert (await s.ask("x" * 400_000))[0] == 200
            assert (await s.ask("x", max_tokens=10**6))[0] == 200
            code, _, found = await s.post(prompt=[1] * 70_000)
            assert code == 400
            assert "the prompt (70000 tokens) needs more KV pages than any" in found["error"]["message"]
            s.nothing_is_held()

    run(test())


def test_who_waits_gets_in_when_a_slot_is_free_and_is_refused_after_its_time() -> None:
    async def test() -> None:
        async with one_slot_taken(queue_wait_s=0.3) as (s, gate, first):
            code, headers, found = await s.ask()
            assert code == 429
            assert "and it waited 0.3 s" in found["error"]["message"]
            assert "Retry-After" in headers
            second = asyncio.create_task(s.ask())
            while not s.router.admission.stats().queued:
                await asyncio.sleep(0)
            gate.set()
            assert [(await one)[0] for one in (first, second)] == [200, 200]
            metrics = await s.metrics()
            assert metrics['kvxfer_proxy_refused_total{reason="queue_wait"}'] == 1
            assert metrics["kvxfer_proxy_queued_requests"] == 0

    run(test())


def test_64_at_once_with_a_slow_prefill_and_not_one_abort() -> None:
    """One prompt after the other, as a slow server computes them; slots for eight at a time."""

    async def test() -> None:
        settings = ",pages=4000,slots=10"
        async with scene(decode_settings=settings, admission=Config(prefill_backlog_s=5.0)) as s:
            one_at_a_time = asyncio.Lock()
            tickets = asyncio.Semaphore(0)

            async def slow(call: Call) -> web.StreamResponse:
                async with one_at_a_time:
                    await tickets.acquire()
                    return await good_prefill(call)

            s.prefill[0].behave = slow
            asking = [
                asyncio.create_task(s.stream(max_tokens=3, prompt="word " * (10 + n)) if n % 2 else s.ask())
                for n in range(64)
            ]
            for number in range(64):
                # Each is computed only when all that may be in are in.
                await s.prefill[0].next_call(min(64, number + 1))
                tickets.release()
            found = await asyncio.gather(*asking)
            assert all(one == b"".join(events(3)) for one in found[1::2])
            assert all(one[0] == 200 for one in found[::2])
            metrics = await s.metrics()
            assert sum(v for k, v in metrics.items() if k.startswith("kvxfer_proxy_aborts_total")) == 0
            assert metrics['kvxfer_proxy_requests_total{outcome="answered",path="/v1/completions"}'] == 64
            assert not [call for call in (*s.prefill[0].calls, *s.decode[0].calls) if call.dropped.is_set()]
            s.nothing_is_held()

    run(test())


def test_a_thousand_streams_at_once() -> None:
    # Client, proxy and servers are one process here: six descriptors a request.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 10_000)), hard))
    streams = min(1000, hard // 8)
    assert streams >= 500

    async def test() -> None:
        async with scene(decode_settings=",pages=400000,slots=2000") as s:
            gate = asyncio.Event()

            async def hold(call: Call) -> web.StreamResponse:
                await arrived(call)
                response = await begin_stream(call)
                found = events(2)
                await response.write(found[0])
                await gate.wait()
                await response.write(b"".join(found[1:]))
                return response

            s.decode[0].behave = hold
            asking = [asyncio.create_task(s.stream()) for _ in range(streams)]
            await s.decode[0].next_call(streams)
            gate.set()
            assert set(await asyncio.gather(*asking)) == {b"".join(events(2))}
            s.nothing_is_held()

    run(test())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": ["one", "two"]}, "several_prompts"),
        ({"prompt": [[1, 2], [3]]}, "several_prompts"),
        ({"prompt": "Hi", "n": 2}, "several_answers"),
        ({"prompt": "Hi", "best_of": 3}, "several_answers"),
        ({"prompt": "Hi", "echo": True, "logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "Hi", "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_one_room_cannot_name_is_computed_at_decode(body: dict[str, Any], reason: str) -> None:
    async def test() -> None:
        async with scene() as s:
            code, _, found = await s.post(**body, kv_transfer_params={"room": 7, "source": "evil:1"})
            assert (code, found) == (200, answer(5))
            assert not s.prefill[0].calls
            assert s.decode[0].calls[0].params == {"do_remote_prefill": False, "do_remote_decode": False}
            metrics = await s.metrics()
            assert metrics[f'kvxfer_proxy_recomputed_total{{reason="{reason}"}}'] == 1
            s.nothing_is_held()

    run(test())


def test_short_prompts_are_computed_at_decode_where_that_is_sooner() -> None:
    async def test() -> None:
        async with scene(decode_settings=",pages=4000,prefill-tokens-per-s=10000") as s:
            assert (await s.ask("Hi"))[0] == 200
            assert not s.prefill[0].calls
            assert (await s.ask("word " * 2000))[0] == 200
            assert len(s.prefill[0].calls) == 1
            metrics = await s.metrics()
            assert metrics['kvxfer_proxy_recomputed_total{reason="sooner"}'] == 1
            await s.prefill[0].die()
            await s.health_is(s.prefill[0].name, False)
            assert (await s.ask("word " * 100))[0] == 200
            assert (await s.metrics())['kvxfer_proxy_recomputed_total{reason="no_prefill"}'] == 1

    run(test())


def test_metrics_split_the_first_token_and_name_every_server() -> None:
    async def test() -> None:
        async with scene() as s:
            s.decode[0].behave = good_decode
            await s.stream()

            async def tells(call: Call) -> web.StreamResponse:
                await arrived(call)
                response = await begin_stream(call)
                last = {"kv_transfer_params": {"loaded_ms": 0.0}}
                await response.write(b"".join(events(4, usage=True, **last)))
                return response

            s.decode[0].behave = tells
            await s.stream()
            gate = asyncio.Event()
            s.decode[0].behave = when(gate, good_decode)
            asking = asyncio.create_task(s.ask())
            await s.decode[0].next_call(3)
            now = await s.metrics()
            label = f'{{role="decode",server="{s.decode[0].name}"}}'
            only = f'{{server="{s.decode[0].name}"}}'
            assert now[f"kvxfer_proxy_up{label}"] == 1
            assert now[f"kvxfer_proxy_requests_in_flight{label}"] == 1
            assert now[f"kvxfer_proxy_slots_held{only}"] == 1
            assert now[f"kvxfer_proxy_slots{only}"] == 204
            assert now[f"kvxfer_proxy_pages{only}"] == 4000
            assert now[f"kvxfer_proxy_pages_reserved{only}"] >= 1
            assert now[f'kvxfer_proxy_prompt_tokens_in_flight{{server="{s.prefill[0].name}"}}'] >= 0
            gate.set()
            await asking
            m = await s.metrics()
            assert m["kvxfer_proxy_first_token_seconds_count"] == 2
            part = "kvxfer_proxy_first_token_part_seconds_count"
            assert [m[f'{part}{{part="{p}"}}'] for p in ("admission", "prefill")] == [3, 3]
            # Where decode says when its pages were there, the rest is split.
            assert [m[f'{part}{{part="{p}"}}'] for p in ("handoff_and_slot", "handoff", "slot")] == [1, 1, 1]
            sums = "kvxfer_proxy_first_token_part_seconds_sum"
            split = sum(value for name, value in m.items() if name.startswith(sums))
            assert split >= m["kvxfer_proxy_first_token_seconds_sum"] * 0.99
            assert m["kvxfer_proxy_answer_tokens_total"] == 5 + 4 + 5
            assert m["kvxfer_proxy_time_per_token_seconds_count"] == 2
            assert m["kvxfer_proxy_slots_needed"] > 0
            assert m["kvxfer_proxy_hold_seconds"] > 0
            assert m['kvxfer_proxy_aborts_total{by="client"}'] == 0

    run(test())


def test_metrics_are_named_by_prometheus_rules() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    async def test() -> None:
        async with scene() as s:
            await s.stream()
            async with s.client.get(s.url + "/metrics") as response:
                assert response.content_type == "text/plain"
                families = list(text_string_to_metric_families(await response.text()))
            ours = [one for one in families if one.name.startswith("kvxfer_proxy_")]
            assert len(ours) > 15
            for one in ours:
                assert one.documentation, one.name
                assert not one.name.endswith(("_ms", "_us", "_count", "_sum", "_gauge")), one.name
                if one.type == "counter":
                    assert all(sample.name.endswith(("_total", "_created")) for sample in one.samples)
                if one.type == "histogram":
                    assert one.name.endswith("_seconds")

    run(test())


@pytest.mark.parametrize(
    ("prompt", "config", "cause", "held"),
    [
        ("Hi", {"slots_share": 0.5}, "memory", 2),
        ("x" * 160_000, {"link_backlog_s": 0.5}, "transfer", 1),
        ("x" * 160_000, {"prefill_backlog_s": 6.0}, "prefill", 1),
    ],
)
def test_slots_and_who_waits_for_what_are_told_as_agents_would(
    prompt: str, config: dict[str, float], cause: str, held: int
) -> None:
    """Alerts and `kvxfer top` have them of every decode server, without `load=` in any engine."""

    async def test() -> None:
        async with scene(decode_settings=",pages=40000,slots=4", admission=Config(**config)) as s:
            names = [f'kvxfer_{name}{{agent="{s.decode[0].name}"}}' for name in ("slots", "slots_held")]
            causes = ("memory", "transfer", "prefill")
            waiting = [f'kvxfer_requests_waiting{{agent="proxy",cause="{one}"}}' for one in causes]
            idle = await s.metrics()
            assert [idle[name] for name in (*names, *waiting)] == [4, 0, 0, 0, 0]
            gate = asyncio.Event()
            s.prefill[0].behave = when(gate, good_prefill)
            asking = [asyncio.create_task(s.ask(prompt)) for _ in range(held + 3)]
            while s.router.admission.stats().queued != 3:
                await asyncio.sleep(0.001)
            now = await s.metrics()
            assert [now[name] for name in names] == [4, held]
            assert [now[name] for name in waiting] == [3 * (one == cause) for one in causes]
            gate.set()
            assert {one[0] for one in await asyncio.gather(*asking)} == {200}
            s.nothing_is_held()

    run(test())


def test_usage_corrects_what_was_reserved_and_what_is_estimated() -> None:
    async def test() -> None:
        async with scene(decode_settings=",pages=4000,page-tokens=16") as s:
            gate = asyncio.Event()

            async def counted(call: Call) -> web.StreamResponse:
                call.fake.exchange.room(call.room).set()
                given = {"room": call.room, "source": "10.9.8.7:8998"}
                usage = {"prompt_tokens": 4000}
                return web.json_response({"choices": [], "usage": usage, "kv_transfer_params": given})

            async def waits(call: Call) -> web.StreamResponse:
                await arrived(call)
                await gate.wait()
                return web.json_response(answer(40))

            s.prefill[0].behave, s.decode[0].behave = counted, waits
            asking = asyncio.create_task(s.ask("x" * 8000, max_tokens=160))
            await s.decode[0].next_call()
            # 4 characters a token: 2,000 tokens and 160 of answer are 135 pages; in fact they are 260.
            while (held := s.router.admission.stats().decode[0].pages_reserved) != 260:
                assert held == 135
                await asyncio.sleep(0.001)
            gate.set()
            await asking
            assert s.router.chars_per_token < 4.0
            assert s.router.lengths.expected() == 40
            s.nothing_is_held()

    run(test())


def test_pages_are_asked_of_vllm() -> None:
    async def test() -> None:
        async with scene(decode_settings="") as s:
            assert s.router.admission.stats().decode[0].pages is None
            await s.decode[0].die()
            await s.health_is(s.decode[0].name, False)
            s.decode[0].metrics = (
                "# TYPE vllm:cache_config_info gauge\n"
                'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="777"} 1.0\n'
            )
            await s.decode[0].start()
            await s.health_is(s.decode[0].name, True)
            while s.router.admission.stats().decode[0].pages != 777:
                await asyncio.sleep(0.001)

    run(test())


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{", "the request is no JSON"),
        (b"[1]", "the request is a JSON list"),
        (b"{}", "'prompt' must be a text"),
        (b'{"prompt": [1, "a"]}', "'prompt' must be"),
        (b'{"prompt": "a", "max_tokens": "many"}', "'max_tokens' is 'many'"),
        (b'{"prompt": "a", "max_tokens": -1}', "'max_tokens' is -1"),
        (b'{"prompt": "a", "stream": 1}', "'stream' is 1"),
    ],
)
def test_a_request_that_is_wrong_is_told_why_and_goes_nowhere(raw: bytes, said: str) -> None:
    async def test() -> None:
        async with scene() as s:
            async with s.client.post(s.url + "/v1/completions", data=raw) as response:
                assert response.status == 400
                assert said in (await response.json())["error"]["message"]
            assert not s.prefill[0].calls
            async with s.client.post(s.url + "/v1/chat/completions", json={"messages": []}) as response:
                assert "'messages' is missing" in (await response.json())["error"]["message"]
            async with s.client.get(s.url + "/v2") as response:
                assert response.status == 404
                assert (
                    "there is no /v2; there are /v1/completions"
                    in (await response.json())["error"]["message"]
                )

    run(test())


def test_a_request_that_the_servers_find_wrong_gets_their_own_words_and_no_second_try() -> None:
    async def test() -> None:
        async with scene(prefills=2, decodes=2) as s:
            for one in (*s.prefill, *s.decode):
                one.behave = status(400, "the context is too long")
            code, _, found = await s.ask()
            assert code == 400
            assert found == {"error": {"message": "the context is too long", "type": "fake", "code": 400}}
            assert sum(len(one.calls) for one in s.prefill) == 1
            s.nothing_is_held()
            metrics = await s.metrics()
            assert metrics['kvxfer_proxy_requests_total{outcome="bad_request",path="/v1/completions"}'] == 1
            assert sum(v for k, v in metrics.items() if k.startswith("kvxfer_proxy_aborts_total")) == 0

    run(test())


def test_a_large_request_is_taken_and_a_larger_one_is_told_so() -> None:
    async def test() -> None:
        async with scene(decode_settings="", max_body_mib=2) as s:
            assert (await s.ask("x" * 1_500_000))[0] == 200
            async with s.client.post(
                s.url + "/v1/completions", data=json.dumps({"prompt": "x" * 3_000_000})
            ) as response:
                assert response.status == 413
                assert (await response.json())["error"]["type"] == "invalid_request_error"
            metrics = await s.metrics()
            assert metrics['kvxfer_proxy_requests_total{outcome="bad_request",path="/v1/completions"}'] == 1

    run(test())
