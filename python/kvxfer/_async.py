"""`await agent.wait_async(room)`: one descriptor for each event loop, and no thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from kvxfer import _kvxfer
    from kvxfer._kvxfer import Event, Watch

Loops: TypeAlias = "dict[asyncio.AbstractEventLoop, LoopWaiter]"


class LoopWaiter:
    """All awaits of one agent on one event loop. Lives while there are any."""

    def __init__(self, agent: _kvxfer.Agent, loop: asyncio.AbstractEventLoop, loops: Loops) -> None:
        self._waiter = agent._new_waiter()
        self._loop = loop
        self._loops = loops
        self._pending: dict[asyncio.Future[Event], Watch] = {}
        loop.add_reader(self._waiter.fileno(), self._ready)
        loops[loop] = self

    async def wait(self, watch: Watch) -> Event:
        """The room's end. A cancelled wait leaves the room as it is."""
        future: asyncio.Future[Event] = self._loop.create_future()
        self._pending[future] = watch
        try:
            # The room may have ended before the descriptor was there to say so.
            _look(future, watch)
            return await future
        finally:
            del self._pending[future]
            if not self._pending:
                self._loop.remove_reader(self._waiter.fileno())
                self._loops.pop(self._loop, None)

    def _ready(self) -> None:
        # First: what ends from here on makes it readable again.
        self._waiter.clear()
        for future, watch in list(self._pending.items()):
            _look(future, watch)

    def look_soon(self) -> None:
        """Looks again, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._ready)
        except RuntimeError:
            # The loop is closed, and nobody waits in it.
            return


def _look(future: asyncio.Future[Any], watch: Watch) -> None:
    if future.done():
        return
    try:
        event = watch.event()
    except Exception as error:  # it belongs to whoever waits
        future.set_exception(error)
        return
    if event is not None:
        future.set_result(event)


async def wait_async(agent: _kvxfer.Agent, loops: Loops, room: int) -> Event:
    """See `Agent.wait_async`."""
    watch = agent._watch(room)
    event = watch.event()
    if event is None:
        loop = asyncio.get_running_loop()
        waiter = loops.get(loop) or LoopWaiter(agent, loop, loops)
        event = await waiter.wait(watch)
    if event.error is not None:
        raise event.error
    return event
