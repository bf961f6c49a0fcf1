"""`kvxfer proxy` when one of three has what it wants, or will never have it: the others are told."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from fake_openai import Call, arrived, begin_stream, events, good_decode, good_prefill, never
from proxied import run, scene


async def drop(call: Call) -> web.StreamResponse:
    """As a process that dies."""
    assert call.request.transport is not None
    call.request.transport.abort()
    return await never(call)


@pytest.mark.parametrize("computed", [False, True])
def test_prefill_is_told_that_nobody_comes_for_a_prompt_whose_decode_leg_failed(computed: bool) -> None:
    """Where the leg has ended there, closing it would abort nothing, and its pages wait for minutes."""

    async def test() -> None:
        async with scene(retries=0) as s:
            (prefill,), (decode,) = s.prefill, s.decode
            answered = asyncio.Event()

            async def computes(call: Call) -> web.StreamResponse:
                if "give_up" in call.params or computed:
                    answered.set()
                    return await good_prefill(call)
                return await never(call)

            async def fails(call: Call) -> web.StreamResponse:
                await (answered.wait() if computed else prefill.next_call())
                return await drop(call)

            prefill.behave, decode.behave = computes, fails
            assert (await s.ask(model="m"))[0] == 502
            leg, told = await prefill.next_call(), await prefill.next_call(2)
            assert told.params == {"give_up": leg.room}
            assert (told.path, told.body["model"], told.body["max_tokens"]) == ("/v1/completions", "m", 1)
            s.nothing_is_held()

    run(test())


def test_prefill_is_not_told_to_give_up_what_it_failed_itself_or_what_decode_has() -> None:
    async def test() -> None:
        async with scene(retries=0) as s:
            (prefill,), (decode,) = s.prefill, s.decode
            prefill.behave = drop
            assert (await s.ask())[0] == 502
            prefill.behave = good_prefill

            async def dies(call: Call) -> web.StreamResponse:
                await arrived(call)
                response = await begin_stream(call)
                await response.write(events(2)[0])
                return await drop(call)

            decode.behave = dies
            assert (await s.stream()).startswith(events(2)[0] + b'data: {"error": ')
            decode.behave = good_decode
            assert (await s.ask())[0] == 200
            await s.router.drain(5.0)
            assert len(prefill.calls) == 3
            assert not any("give_up" in call.params for call in prefill.calls)

    run(test())


def test_a_client_that_hangs_up_when_it_has_the_last_event_has_its_answer_and_aborts_nothing() -> None:
    async def test() -> None:
        async with scene() as s:
            forever = asyncio.Event()

            async def keeps_open(call: Call) -> web.StreamResponse:
                await arrived(call)
                response = await begin_stream(call)
                await response.write(b"".join(events(3, usage=True)))
                await forever.wait()
                return response

            s.decode[0].behave = keeps_open
            body = {"prompt": "Hi", "stream": True}
            async with s.client.post(s.url + "/v1/completions", json=body) as response:
                got = b""
                while not got.endswith(b"data: [DONE]\n\n"):
                    got += await response.content.readany()
                response.close()
            await s.router.idle.wait()
            metrics = await s.metrics()
            path = "/v1/completions"
            assert metrics[f'kvxfer_proxy_requests_total{{outcome="answered",path="{path}"}}'] == 1
            assert metrics['kvxfer_proxy_aborts_total{by="client"}'] == 0
            assert metrics["kvxfer_proxy_answer_tokens_total"] == 3
            s.nothing_is_held()

    run(test())
