"""One request in flight, as the event loop sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from outrider.engine.stream import Stream
from outrider.types import Event


class Ticket:
    """It has one reader: `async for event in ticket`."""

    def __init__(self, stream: Stream) -> None:
        self.request_id = stream.request_id
        self.stream = stream
        self._ready = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """One event per round; the last has the result. Raises the request's error."""
        while True:
            self._ready.clear()
            event, is_over = self.stream.poll()
            if event is not None:
                yield event
            elif is_over:
                return
            else:
                await self._ready.wait()

    def cancel(self) -> None:
        """End the request within one round; nothing happens when it is over."""
        self.stream.cancel()

    def wake(self) -> None:
        """On the event loop: there is something to read."""
        self._ready.set()
