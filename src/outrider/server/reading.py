"""Reading tickets: the events of several in the order they come, and the end of them when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.types import Receive

from outrider.server.ticket import Ticket
from outrider.types import Event, Result

Rounds = AsyncGenerator[tuple[int, Event], None]


async def rounds(tickets: Sequence[Ticket]) -> Rounds:
    """(index of the ticket, event), until all have ended. The first error ends the reading."""
    if len(tickets) == 1:
        async for event in tickets[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event | BaseException | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(index, ticket, queue)) for index, ticket in enumerate(tickets)]
    try:
        num_open = len(tickets)
        while num_open:
            index, told = await queue.get()
            if told is None:
                num_open -= 1
            elif isinstance(told, BaseException):
                raise told
            else:
                yield index, told
    finally:
        for task in tasks:
            task.cancel()


async def _pump(index: int, ticket: Ticket, queue: asyncio.Queue[tuple[int, Event | BaseException | None]]) -> None:
    try:
        async for event in ticket:
            queue.put_nowait((index, event))
        queue.put_nowait((index, None))
    except Exception as error:
        queue.put_nowait((index, error))


def cancel_all(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()


async def departure(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def results_of(tickets: Sequence[Ticket], receive: Receive) -> list[Result] | None:
    """The results of all; None when the client left before, which ends the tickets."""
    reading = asyncio.create_task(_last_events(tickets))
    gone = asyncio.create_task(departure(receive))
    try:
        await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
        is_gone = not reading.done()
        if is_gone:
            cancel_all(tickets)
        results = await reading  # of cancelled ones within a round
        return None if is_gone else results
    finally:
        cancel_all(tickets)
        gone.cancel()
        reading.cancel()


async def _last_events(tickets: Sequence[Ticket]) -> list[Result]:
    results: dict[int, Result] = {}
    async with aclosing(rounds(tickets)) as events:
        async for index, event in events:
            if event.result is not None:
                results[index] = event.result
    return [results[index] for index in range(len(tickets))]
