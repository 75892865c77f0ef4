"""Requests by their owner and the id their client knows, while they run and for a time afterwards.

A client whose connection is gone asks here for its tokens: because the server was started again and went on with the
request, or because the last bytes never arrived. Only the caller who made a request finds it. Ids of other callers mean
nothing here: two callers may use the same one, and neither learns of the other.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from outrider.errors import RequestError
from outrider.server.ticket import Ticket

MOST = 10_000  # requests remembered
Key = tuple[str, str]  # the owner, and the id that its client knows


@dataclass(slots=True)
class Record:
    """One request of a client. Its choices run as tickets, or are over: then they are plain data."""

    id: str
    kind: str  # chat.completion or text_completion
    tenant: str  # its owner
    user: str | None
    created: int
    choices: list[Ticket | dict[str, Any]]
    ended: float | None = None  # when it was seen to be over

    @property
    def key(self) -> Key:
        return self.tenant, self.id

    @property
    def is_over(self) -> bool:
        return all(not isinstance(choice, Ticket) or choice.stream.is_over for choice in self.choices)

    @property
    def is_running(self) -> bool:
        """Whether the engine has begun with any of it."""
        return any(isinstance(choice, Ticket) and choice.stream.is_running for choice in self.choices)

    def settle(self, now: float) -> None:
        """It is over: what is kept is what clients may ask for, and nothing of the engine."""
        self.ended = now
        self.choices = [_view(index, choice) for index, choice in enumerate(self.choices)]

    def view(self) -> dict[str, Any]:
        """As clients see it."""
        choices = [_view(index, choice) for index, choice in enumerate(self.choices)]
        return {
            "id": self.id,
            "object": "request",
            "kind": self.kind,
            "created": self.created,
            "user": self.user,
            "status": "done" if self.is_over else "running" if self.is_running else "waiting",
            "choices": choices,
        }


class Kept:
    """`keep_s`: how long a request that is over can be asked for."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._records: OrderedDict[Key, Record] = OrderedDict()  # the oldest first
        self._reserved: set[Key] = set()
        self._pruned = 0.0

    @contextmanager
    def reserving(self, request_id: str, owner: str) -> Iterator[None]:
        """Hold an id for a request that is on its way to the engine. An owner can use an id again when its request is
        over; of two requests at the same time the second is refused."""
        key = owner, request_id
        known = self._records.get(key)
        if key in self._reserved or (known is not None and not known.is_over):
            raise RequestError(
                f"the id {request_id!r} is in use by a request of yours; choose another X-Request-Id, or wait until "
                "that request is over",
                param="X-Request-Id",
            )
        self._reserved.add(key)
        try:
            yield
        finally:
            self._reserved.remove(key)

    def add(self, record: Record) -> None:
        self._prune()
        self._records[record.key] = record

    def find(self, request_id: str, owner: str) -> dict[str, Any] | None:
        """What is known of a request of this caller."""
        record = self._of(request_id, owner)
        return None if record is None else record.view()

    def cancel(self, request_id: str, owner: str) -> bool:
        """End a request that runs; False when there is none of this caller."""
        record = self._of(request_id, owner)
        if record is None:
            return False
        for choice in record.choices:
            if isinstance(choice, Ticket):
                choice.cancel()
        return True

    def _of(self, request_id: str, owner: str) -> Record | None:
        self._prune()
        return self._records.get((owner, request_id))

    def _prune(self) -> None:
        """Forget what is over for long enough, and the oldest of too many. Looked at once a second."""
        now = time.monotonic()
        if now - self._pruned < 1.0 and len(self._records) < MOST:
            return
        self._pruned, is_full = now, len(self._records) >= MOST  # then some room is made, not one place
        for record in list(self._records.values()):
            if record.ended is None and record.is_over:
                record.settle(now)
            is_old = record.ended is not None and now - record.ended > self._keep_s
            is_one_too_many = record.ended is not None and len(self._records) > 0.9 * MOST and is_full
            if is_old or is_one_too_many:
                del self._records[record.key]

    @property
    def names(self) -> dict[str, str]:
        """For each running choice, by the id that the engine knows it by, the id that its client knows."""
        return {
            choice.request_id: record.id
            for record in self._records.values()
            for choice in record.choices
            if isinstance(choice, Ticket)
        }

    def notes(self) -> list[dict[str, Any]]:
        """Everything as plain data, for a snapshot: a running choice is the id that the engine knows it by."""
        return [
            {
                **{name: getattr(record, name) for name in ("id", "kind", "tenant", "user", "created")},
                "choices": [
                    choice.request_id
                    if isinstance(choice, Ticket) and not choice.stream.is_over
                    else _view(index, choice)
                    for index, choice in enumerate(record.choices)
                ],
            }
            for record in self._records.values()
        ]

    def restore(self, notes: Sequence[Mapping[str, Any]], tickets: Mapping[str, Ticket]) -> None:
        """What `notes` gave, with the tickets of what goes on."""
        for note in notes:
            choices = [
                choice if not isinstance(choice, str) else tickets.get(choice) or _gone(index)
                for index, choice in enumerate(note["choices"])
            ]
            self.add(Record(**{**note, "choices": choices}))


def _gone(index: int) -> dict[str, Any]:
    """A choice whose client ended it while the server went down."""
    return {"index": index, "text": "", "token_ids": [], "finish_reason": "cancelled", "error": None}


def _view(index: int, choice: Ticket | dict[str, Any]) -> dict[str, Any]:
    if not isinstance(choice, Ticket):
        return choice
    stream, result, error = choice.stream, choice.stream.result, choice.stream.error
    return {
        "index": index,
        "text": stream.text if result is None else result.text,
        "token_ids": stream.tokens,
        "finish_reason": None if result is None else str(result.finish_reason),
        "error": None if error is None else str(error),
        "seed": stream.seed,
        "accept": stream.rule,
    }
