"""`kvxfer proxy` when something fails: no leg is left behind, half an answer never looks like a whole one."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest
from aiohttp import web
from fake_openai import (
    Behaviour,
    Call,
    answer,
    arrived,
    begin_stream,
    events,
    good_decode,
    never,
    status,
    when,
)
from proxied import Scene, run, scene

from kvxfer.admission import Config


def one_error(raw: bytes, before: list[bytes]) -> str:
    """The text of the error event that ends a stream after these events, and no `[DONE]`."""
    assert raw.startswith(b"".join(before))
    rest = raw[len(b"".join(before)) :]
    assert rest.startswith(b'data: {"error": {"message": "'), rest
    assert rest.endswith(b"}}\n\n")
    assert rest.count(b"\n\n") == 1
    assert b"[DONE]" not in raw
    return rest.decode()


async def drop(call: Call) -> web.StreamResponse:
    """Breaks the connection instead of answering."""
    assert call.request.transport is not None
    call.request.transport.abort()
    return await never(call)


async def aborted(s: Scene, by: str) -> None:
    m = await s.metrics()
    found = {name: m[f'kvxfer_proxy_aborts_total{{by="{name}"}}'] for name in ("client", "timeout", "server")}
    assert found == {"client": 0, "timeout": 0, "server": 0, by: 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", [status(500, "out of memory"), drop])
@pytest.mark.parametrize("choice", ["early", "late"])
def test_prefill_fails_and_decodes_leg_is_cancelled(stream: bool, how: Behaviour, choice: str) -> None:
    async def test() -> None:
        async with scene(retries=0, decode_choice=choice) as s:
            go = asyncio.Event()
            s.prefill[0].behave = when(go, how)
            asking = asyncio.create_task(s.ask(stream=stream))
            call = await s.decode[0].next_call() if choice == "early" else None
            go.set()
            code, _, found = await asking
            assert code in (500, 502)
            assert f"prefill server {s.prefill[0].name}" in found["error"]["message"]
            if call is not None:
                await call.dropped.wait()
            else:
                assert not s.decode[0].calls
            s.nothing_is_held()
            await aborted(s, "server")

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", [status(503, "engine is dead"), drop])
def test_decode_fails_and_prefills_leg_is_cancelled(stream: bool, how: Behaviour) -> None:
    async def test() -> None:
        async with scene(retries=0) as s:
            s.prefill[0].behave = never
            go = asyncio.Event()
            s.decode[0].behave = when(go, how)
            asking = asyncio.create_task(s.ask(stream=stream))
            call = await s.prefill[0].next_call()
            go.set()
            code, _, found = await asking
            assert code in (502, 503)
            assert f"decode server {s.decode[0].name}" in found["error"]["message"]
            await call.dropped.wait()
            s.nothing_is_held()
            await aborted(s, "server")

    run(test())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_failed_before_the_first_token_is_tried_on_other_servers_with_a_fresh_room(role: str) -> None:
    async def test() -> None:
        async with scene(prefills=2, decodes=2) as s:
            servers = getattr(s, role)
            failed: list[Call] = []

            def first_fails(then: Behaviour) -> Behaviour:
                async def behave(call: Call) -> web.StreamResponse:
                    failed.append(call)
                    return await (drop if len(failed) == 1 else then)(call)

                return behave

            for one in servers:
                one.behave = first_fails(one.behave)
            assert await s.stream() == b"".join(events(5))
            assert [len(one.calls) for one in servers] == [1, 1]
            first, second = (one.calls[0] for one in servers)
            assert first.room != second.room
            legs = [
                call for one in (*s.prefill, *s.decode) for call in one.calls if "give_up" not in call.params
            ]
            assert len(legs) == 4, "both sides were changed"
            s.nothing_is_held()
            m = await s.metrics()
            assert m["kvxfer_proxy_retries_total"] == 1
            assert m['kvxfer_proxy_aborts_total{by="server"}'] == 0, "the client saw nothing of it"

    run(test())


def test_a_decode_server_that_dies_in_mid_stream_ends_in_an_error_and_no_done() -> None:
    async def test() -> None:
        async with scene(decodes=2) as s:
            wrote = asyncio.Event()

            async def half(call: Call) -> web.StreamResponse:
                await arrived(call)
                response = await begin_stream(call)
                # The third event is cut in its middle.
                await response.write(b"".join(events(2, done=False)) + b'data: {"choices": [{"te')
                wrote.set()
                return await never(call)

            for one in s.decode:
                one.behave = half
            asking = asyncio.create_task(s.stream())
            await wrote.wait()
            (dying,) = (one for one in s.decode if one.calls)
            await asyncio.sleep(0)
            response = asking
            await dying.die()
            text = one_error(await response, events(2, done=False))
            assert f"decode server {dying.name} failed in the middle of the answer" in text
            assert sum(len(one.calls) for one in s.decode) == 1, "not tried again: the client has tokens"
            await s.health_is(dying.name, False)
            s.nothing_is_held()
            await aborted(s, "server")

    run(test())


def test_a_stream_that_ends_without_done_is_an_error_even_if_it_ends_well() -> None:
    async def test() -> None:
        async with scene() as s:

            async def cut(call: Call) -> web.StreamResponse:
                await arrived(call)
                response = await begin_stream(call)
                await response.write(b"".join(events(3, done=False)))
                await response.write_eof()
                return response

            s.decode[0].behave = cut
            assert "ended the answer before it was complete" in one_error(
                await s.stream(), events(3, done=False)
            )

    run(test())


def test_an_error_event_of_the_server_goes_through_and_its_done_does_not() -> None:
    async def test() -> None:
        async with scene() as s:
            gave_up = b'data: {"error": {"message": "hand-off failed", "code": 500}}\n\n'

            async def breaks(call: Call) -> web.StreamResponse:
                await arrived(call)
                response = await begin_stream(call)
                await response.write(b"".join(events(2, done=False)) + gave_up + b"data: [DONE]\n\n")
                await response.write_eof()
                return response

            s.decode[0].behave = breaks
            assert "hand-off failed" in one_error(await s.stream(), events(2, done=False))
            await aborted(s, "server")

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_engine_gave_up_is_no_answer(stream: bool, reason: str) -> None:
    async def test() -> None:
        async with scene(retries=0) as s:

            async def gives_up(call: Call) -> web.StreamResponse:
                await arrived(call)
                if not stream:
                    found = answer(2)
                    found["choices"][0]["finish_reason"] = reason
                    return web.json_response(found)
                response = await begin_stream(call)
                last = b'data: {"choices": [{"text": "", "finish_reason": "%s"}]}\n\n' % reason.encode()
                await response.write(last + b"data: [DONE]\n\n")
                return response

            s.decode[0].behave = gives_up
            code, _, found = await s.ask(stream=stream)
            assert code == 500
            assert f"gave the request up ({reason})" in found["error"]["message"]
            s.nothing_is_held()

    run(test())


def test_a_cut_answer_that_is_not_streamed_is_no_200() -> None:
    async def test() -> None:
        async with scene(retries=0) as s:

            async def half(call: Call) -> web.StreamResponse:
                await arrived(call)
                response = web.StreamResponse(headers={"Content-Type": "application/json"})
                response.content_length = 1000
                await response.prepare(call.request)
                await response.write(b'{"choices": [')
                assert call.request.transport is not None
                call.request.transport.close()
                return response

            s.decode[0].behave = half
            code, _, found = await s.ask()
            assert code == 502
            assert "failed before the first token" in found["error"]["message"]

            async def no_json(call: Call) -> web.StreamResponse:
                await arrived(call)
                return web.Response(text="oops", content_type="application/json")

            s.decode[0].behave = no_json
            assert (await s.ask())[0] == 500
            s.nothing_is_held()

    run(test())


@pytest.mark.parametrize("when_it_leaves", ["queued", "prefill", "streaming", "not streamed"])
def test_a_client_that_leaves_ends_both_legs(when_it_leaves: str) -> None:
    async def test() -> None:
        async with scene(decode_settings=",slots=2,pages=4000", admission=Config(slots_share=0.5)) as s:
            (prefill,), (decode,) = s.prefill, s.decode
            streaming = asyncio.Event()

            async def endless(call: Call) -> web.StreamResponse:
                await arrived(call)
                if when_it_leaves == "not streamed":
                    streaming.set()
                    return await never(call)
                response = await begin_stream(call)
                await response.write(events(1)[0])
                streaming.set()
                return await never(call)

            decode.behave = endless
            if when_it_leaves in ("prefill", "queued"):
                prefill.behave = never
            body = {"prompt": "Hi", "stream": when_it_leaves == "streaming"}
            asking = asyncio.create_task(s.client.post(s.url + "/v1/completions", json=body))
            legs = [await prefill.next_call(), await decode.next_call()]
            if when_it_leaves in ("streaming", "not streamed"):
                await streaming.wait()
                legs = legs[1:]
            if when_it_leaves == "streaming":
                response = await asking
                await response.content.readany()
                response.close()
            elif when_it_leaves == "queued":
                second = asyncio.create_task(s.client.post(s.url + "/v1/completions", json=body))
                while not s.router.admission.stats().queued:
                    await asyncio.sleep(0)
                second.cancel()
                while s.router.admission.stats().queued:
                    await asyncio.sleep(0.001)
                assert s.router.admission.stats().decode[0].slots_held == 1, "the other one stays"
                await aborted(s, "client")
                return
            else:
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
            for leg in legs:
                await leg.dropped.wait()
            await s.router.idle.wait()
            s.nothing_is_held()
            await aborted(s, "client")

    run(test())


def test_servers_go_out_and_come_in_again() -> None:
    async def test() -> None:
        async with scene(decodes=2) as s:
            first, second = s.decode
            await first.die()
            await s.health_is(first.name, False)
            for _ in range(4):
                assert (await s.ask())[0] == 200
            assert len(second.calls) == 4
            second.healthy = 503
            await s.health_is(second.name, False)
            async with s.client.get(s.url + "/health") as response:
                assert response.status == 503
                health = await response.json()
            assert health["status"] == "down"
            assert health["servers"][second.name]["why"] == "/health answered 503"
            code, headers, found = await s.ask()
            assert code == 503
            assert headers["Retry-After"] == "5"
            assert "no decode server is up" in found["error"]["message"]
            assert (await s.metrics())[f'kvxfer_proxy_up{{role="decode",server="{second.name}"}}'] == 0
            await first.start()
            await s.health_is(first.name, True)
            assert (await s.ask())[0] == 200
            async with s.client.get(s.url + "/health") as response:
                assert (response.status, (await response.json())["status"]) == (200, "ok")

    run(test())


def test_a_server_that_is_slow_to_answer_health_is_not_dead_at_once() -> None:
    async def test() -> None:
        async with scene(health_timeout_s=0.1, health_failures=3) as s:
            watch = s.router.watches[s.decode[0].name]
            seen: list[bool] = []

            async def silent(url: str) -> tuple[bool | None, str]:
                if url == s.decode[0].url:
                    seen.append(watch.up)
                return None, "silent"

            s.router.upstream.health = silent  # type: ignore[method-assign]
            await s.health_is(s.decode[0].name, False)
            assert seen[:3] == [True, True, True], "the third silence in a row takes it out, no sooner"
            assert not any(seen[3:])

    run(test())


def test_a_silent_server_ends_in_a_timeout_that_says_so() -> None:
    async def test() -> None:
        async with scene(silence_timeout_s=2) as s:
            s.decode[0].behave = never
            code, _, found = await s.ask()
            assert code == 504
            assert "sent nothing for 2 s" in found["error"]["message"]
            await aborted(s, "timeout")

            async def stalls(call: Call) -> web.StreamResponse:
                await arrived(call)
                response = await begin_stream(call)
                await response.write(events(1)[0])
                return await never(call)

            s.decode[0].behave = stalls
            assert "sent nothing for 2 s" in one_error(await s.stream(), events(1)[:1])
            s.nothing_is_held()

    run(test())


def test_a_prefill_leg_that_ends_late_is_not_cut_off() -> None:
    """Decode has everything and prefill's answer is still under way: closing it would be an abort there."""

    async def test() -> None:
        async with scene() as s:
            gate = asyncio.Event()

            async def pushes_first(call: Call) -> web.StreamResponse:
                call.fake.exchange.room(call.room).set()
                await gate.wait()
                return web.json_response({"choices": []})

            s.prefill[0].behave = pushes_first
            assert await s.stream() == b"".join(events(5))
            s.nothing_is_held()
            call = s.prefill[0].calls[0]
            assert not call.ended.is_set()
            gate.set()
            await call.ended.wait()
            assert not call.dropped.is_set()

    run(test())


def test_draining_lets_requests_end_and_takes_no_more() -> None:
    async def test() -> None:
        async with scene() as s:
            gate = asyncio.Event()
            s.decode[0].behave = when(gate, good_decode)
            asking = asyncio.create_task(s.stream())
            await s.decode[0].next_call()
            draining = asyncio.create_task(s.router.drain(30))
            await asyncio.sleep(0)
            code, headers, _ = await s.ask()
            assert (code, headers["Retry-After"]) == (503, "1")
            async with s.client.get(s.url + "/health") as response:
                assert (response.status, (await response.json())["status"]) == (503, "draining")
            gate.set()
            assert await asking == b"".join(events(5))
            assert await draining

    run(test())


def test_what_cannot_be_drained_ends_in_an_error() -> None:
    async def test() -> None:
        async with scene() as s:
            streaming = asyncio.Event()

            async def stalls(call: Call) -> web.StreamResponse:
                if not call.body.get("stream"):
                    return await never(call)
                await arrived(call)
                response = await begin_stream(call)
                await response.write(events(1)[0])
                streaming.set()
                return await never(call)

            s.decode[0].behave = stalls
            asking = [asyncio.create_task(s.stream()), asyncio.create_task(s.ask())]
            await s.decode[0].next_call(2)
            await streaming.wait()
            while not any(flow.reached for flow in s.router._flows.values()):
                await asyncio.sleep(0)
            assert not await s.router.drain(0.01)
            await s.router.halt()
            one_error(await asking[0], events(1)[:1])  # type: ignore[arg-type]
            code, _, found = await asking[1]  # type: ignore[misc]
            assert code == 503
            assert "told to stop" in found["error"]["message"]
            assert s.router.in_flight == 0
            s.nothing_is_held()
            assert (await s.metrics())['kvxfer_proxy_aborts_total{by="shutdown"}'] == 2

    run(test())


def test_a_busy_servers_429_is_tried_elsewhere_and_then_passed_on() -> None:
    async def test() -> None:
        async with scene(decodes=2) as s:
            for one in s.decode:
                one.behave = status(429, "busy", **{"Retry-After": "7"})
            code, headers, found = await s.ask()
            assert (code, headers["Retry-After"]) == (429, "7")
            assert found["error"]["message"] == "busy"
            assert [len(one.calls) for one in s.decode] == [1, 1]

    run(test())


def test_clients_never_see_a_broken_connection_where_a_server_breaks() -> None:
    """All of it at once: streams and answers while decode servers die and come back."""

    async def test() -> None:
        async with scene(prefills=2, decodes=2) as s:
            ends: list[str] = []

            async def client(number: int) -> None:
                try:
                    if number % 2:
                        body = {"prompt": "Hi", "stream": True, "max_tokens": 50}
                        async with s.client.post(s.url + "/v1/completions", json=body) as response:
                            raw = await response.read()
                        if response.status != 200:
                            ends.append("error")
                        elif raw == b"".join(events(50)):
                            ends.append("whole")
                        else:
                            assert b"[DONE]" not in raw
                            assert b'data: {"error": ' in raw
                            ends.append("error")
                    else:
                        code, _, found = await s.ask(max_tokens=50)
                        assert code != 200 or found == answer(50)
                        ends.append("whole" if code == 200 else "error")
                except aiohttp.ClientError:
                    ends.append("broken")

            async def pieces(call: Call) -> web.StreamResponse:
                await arrived(call)
                if not call.body.get("stream"):
                    return await good_decode(call)
                response = await begin_stream(call)
                for event in events(50):
                    await response.write(event)
                    await asyncio.sleep(0)
                return response

            for one in s.decode:
                one.behave = pieces
            clients = [asyncio.create_task(client(number)) for number in range(200)]
            for turn in range(6):
                await s.decode[turn % 2].next_call(5 * (turn // 2 + 1))
                await s.decode[turn % 2].die()
                await s.decode[turn % 2].start()
            await asyncio.gather(*clients)
            assert len(ends) == 200
            assert "broken" not in ends
            assert ends.count("whole") > 0
            await s.router.idle.wait()
            s.nothing_is_held()

    run(test())


def test_it_stops_although_servers_fail_at_that_moment() -> None:
    async def test() -> None:
        async with scene(prefills=2, decodes=2, health_interval_s=60.0) as s:
            for name in s.router.watches:
                s.router._nudge(name)
            await s.router.stop()
            assert all(watch.task.done() for watch in s.router.watches.values())

    run(test())


def test_a_client_that_leaves_with_the_last_bytes_of_its_answer_has_aborted_nothing() -> None:
    """The whole answer is on its way; nobody can tell whether a client that leaves then has got it."""
    large = {**answer(5), "padding": "x" * 20_000_000}

    async def long(call: Call) -> web.StreamResponse:
        return web.json_response(large)

    async def test() -> None:
        async with scene() as s:
            s.decode[0].behave = long
            response = await s.client.post(s.url + "/v1/completions", json={"prompt": "Hi"})
            assert response.status == 200
            assert s.router.in_flight == 1, "it takes its time"
            response.close()
            await s.router.idle.wait()
            metrics = await s.metrics()
            assert metrics['kvxfer_proxy_aborts_total{by="client"}'] == 0
            assert metrics['kvxfer_proxy_requests_total{outcome="answered",path="/v1/completions"}'] == 1
            assert not s.router._delivering
            s.nothing_is_held()

    run(test())
