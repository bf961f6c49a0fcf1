"""The command `kvxfer proxy` as a process of its own."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from fake_openai import Call, Exchange, Fake, answer, events, good_decode, never, when
from proxied import LIMIT_S, run


@asynccontextmanager
async def proxy(*arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvxfer.cli", "proxy", "--listen", "127.0.0.1:0", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def started(process: Process) -> dict[str, object]:
    """The object that `--json` prints when it is ready."""
    assert process.stdout is not None
    raw = b""
    while not raw.endswith(b"\n}\n"):
        line = await process.stdout.readline()
        assert line, "it ended before it was ready"
        raw += line
    found: dict[str, object] = json.loads(raw)
    return found


def test_the_process_serves_and_stops_when_requests_are_over() -> None:
    async def test() -> None:
        exchange = Exchange()
        prefill, decode = await Fake("prefill", exchange).start(), await Fake("decode", exchange).start()
        async with proxy(
            *("--prefill", prefill.url, "--decode", decode.url + ",pages=1000,page-tokens=16", "--json")
        ) as process:
            found = await started(process)
            url = found["listening"]
            assert found["decode_choice"] == "early"
            assert found["servers"] == [
                {
                    "role": "prefill",
                    "url": prefill.url,
                    "source": "127.0.0.1:8998",
                    "up": True,
                    "why": "/health answered 200",
                },
                {
                    "role": "decode",
                    "url": decode.url,
                    "source": None,
                    "up": True,
                    "why": "/health answered 200",
                },
            ]
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as client:
                async with client.post(f"{url}/v1/completions", json={"prompt": "Hi"}) as response:
                    assert (response.status, await response.json()) == (200, answer(5))
                gate = asyncio.Event()
                decode.behave = when(gate, good_decode)
                body = {"prompt": "Hi", "stream": True}
                asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
                await decode.next_call(2)
                process.send_signal(signal.SIGTERM)
                while True:
                    async with client.get(f"{url}/health") as response:
                        if response.status == 503:
                            break
                gate.set()
                assert await (await asking).read() == b"".join(events(5))
            assert await process.wait() == 0
        await prefill.stop()
        await decode.stop()

    run(test())


def test_a_second_signal_ends_requests_with_an_error() -> None:
    async def test() -> None:
        exchange = Exchange()
        prefill, decode = await Fake("prefill", exchange).start(), await Fake("decode", exchange).start()
        decode.behave = never
        async with proxy("--prefill", prefill.url, "--decode", decode.url, "--json") as process:
            url = (await started(process))["listening"]
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as client:
                asking = asyncio.create_task(client.post(f"{url}/v1/completions", json={"prompt": "Hi"}))
                call = await decode.next_call()
                process.send_signal(signal.SIGINT)
                while (await client.get(f"{url}/health")).status != 503:
                    pass
                process.send_signal(signal.SIGINT)
                response = await asking
                assert response.status == 503
                assert "told to stop" in (await response.json())["error"]["message"]
                await call.dropped.wait()
            assert await process.wait() == 0
        await prefill.stop()
        await decode.stop()

    run(test())


async def _slow_client(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """One that has asked and takes nothing of the answer yet, with little room for it on its side."""
    host, port = url.removeprefix("http://").split(":")
    with_little = socket.socket()
    with_little.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with_little.setblocking(False)
    await asyncio.get_running_loop().sock_connect(with_little, (host, int(port)))
    # The reader's own limit keeps it from taking more than this before it is asked to.
    reader, writer = await asyncio.open_connection(sock=with_little, limit=2**12)
    body = json.dumps({"prompt": "Hi"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def _log(process: Process, words: str) -> str:
    """The first line of the log with these words."""
    assert process.stderr is not None
    while words not in (line := (await process.stderr.readline()).decode()):
        assert line, f"it ended before it said: {words}"
    return line


@pytest.mark.parametrize("signals", [1, 2])
def test_a_slow_client_gets_all_of_its_answer_before_the_process_ends_or_a_broken_connection(
    signals: int,
) -> None:
    """What has been read from decode and not been taken by the client is in the proxy's memory only."""
    large = {**answer(5), "padding": "x" * 20_000_000}

    async def long(call: Call) -> web.StreamResponse:
        return web.json_response(large)

    async def test() -> None:
        exchange = Exchange()
        prefill, decode = await Fake("prefill", exchange).start(), await Fake("decode", exchange).start()
        decode.behave = long
        async with proxy("--prefill", prefill.url, "--decode", decode.url, "--json") as process:
            url = str((await started(process))["listening"])
            reader, writer = await _slow_client(url)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head
            length = int(re.search(rb"Content-Length: (\d+)", head)[1])  # type: ignore[index]
            process.send_signal(signal.SIGTERM)
            assert "stopping: 1 requests in flight" in await _log(process, "stopping")
            if signals == 1:
                assert json.loads(await reader.readexactly(length)) == large
            else:
                process.send_signal(signal.SIGTERM)
                with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                    await reader.readexactly(length)
            assert await process.wait() == 0
            writer.close()
        await prefill.stop()
        await decode.stop()

    run(test())


def test_the_start_line_says_what_to_do_next() -> None:
    async def test() -> None:
        async with proxy("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2") as process:
            assert process.stdout is not None
            lines = [(await process.stdout.readline()).decode() for _ in range(4)]
            assert lines[0].startswith("kvxfer proxy: ready at http://127.0.0.1:")
            assert "/v1 (both legs at once)" in lines[0]
            assert "http://127.0.0.1:1  down, is asked again: Connection refused" in lines[1]
            assert lines[3] == "2 servers down; what starts now is taken in when its /health answers.\n"
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0

    run(test())


def test_errors_teach() -> None:
    pair = ("--prefill", "http://h:1", "--decode", "http://h:2")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, code, said in (
            (("--prefill", "h:1", "--decode", "http://h:2"), 2, "write it as http://HOST:PORT"),
            (("--prefill", "http://h:1", "--decode", "http://h:1"), 2, "h:1 is named twice"),
            (("--prefill", "http://h:1", "--decode", "http://h:2,pages=9"), 2, "without page-tokens="),
            ((*pair, "--listen", "8000"), 2, "write it as HOST:PORT, for example 0.0.0.0:8000"),
            ((*pair, "--listen", f"127.0.0.1:{port}"), 1, "another process listens there, take another port"),
            ((*pair, "--slots-share", "0"), 2, "slots_share is 0.0; it must be above 0"),
            (("--decode", "http://h:2"), 2, "the following arguments are required: --prefill"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "kvxfer.cli", "proxy", *arguments],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            assert done.returncode == code, done.stderr
            assert said in done.stderr
            assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["aiohttp", "prometheus_client"])
def test_without_its_libraries_it_says_what_to_install(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from kvxfer.cli import main\n"
        "sys.exit(main(['proxy', '--prefill', 'http://h:1', '--decode', 'http://h:2']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"kvxfer: the proxy needs {missing}, which is not installed: pip install 'kvxfer[proxy]'\n"
    )
