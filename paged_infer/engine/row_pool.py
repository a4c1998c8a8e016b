"""Rows that no engine has yet, and which of several engines takes which of them.

Rows that begin alike go to the same engine, whose prefix cache then holds their beginning. An engine that runs out of
rows of its own takes over half of another's, neighbours together. Pure Python.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from paged_infer.types import Request

_REMEMBERED = 1 << 14
"""Beginnings whose engine is remembered when none of their rows is left."""


@dataclass(slots=True, eq=False)
class _Group:
    """Rows that begin alike, or a part of them; `owner` is the engine that takes them."""

    key: Hashable
    owner: int | None = None
    rows: deque[Request] = field(default_factory=deque)


class RowPool:
    """A queue with several ends.

    Args:
        prefix_tokens: rows that share so many first tokens (and salt and adapter) belong together; None = none do.
    """

    def __init__(self, prefix_tokens: int | None) -> None:
        self._prefix_tokens = prefix_tokens
        self._groups: dict[Hashable, _Group] = {}
        self._owners: OrderedDict[Hashable, int] = OrderedDict()
        self._free: deque[_Group] = deque()
        self._owned: dict[int, deque[_Group]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, request: Request) -> None:
        """Queue a row."""
        key = self._key(request)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(key, self._owners.get(key))
            self._queue_of(group).append(group)
        group.rows.append(request)
        self._length += 1

    def put_back(self, requests: Iterable[Request]) -> None:
        """Queue rows before all others: they were taken, and not answered."""
        group = _Group(object(), rows=deque(requests))
        if group.rows:
            self._free.appendleft(group)
            self._length += len(group.rows)

    def remove(self, request_id: int) -> None:
        """Drop a row, if it is here."""
        for queue in (self._free, *self._owned.values()):
            for group in queue:
                place = next((i for i, row in enumerate(group.rows) if row.request_id == request_id), None)
                if place is None:
                    continue
                del group.rows[place]
                self._length -= 1
                if not group.rows:
                    queue.remove(group)
                    self._groups.pop(group.key, None)
                return

    def take(self, engine: int) -> Request | None:
        """The next row for this engine; None when there is none at all."""
        own = self._owned.setdefault(engine, deque())
        if not own:
            group = self._free.popleft() if self._free else self._half_of_another()
            if group is None:
                return None
            group.owner = engine
            own.append(group)
        group = own[0]
        request = group.rows.popleft()
        self._length -= 1
        if not group.rows:
            own.popleft()
            if self._groups.get(group.key) is group:
                del self._groups[group.key]
                self._remember(group)
        return request

    def disown(self, engine: int) -> None:
        """Let the others have the rows that were this engine's to take."""
        for group in self._owned.pop(engine, ()):
            group.owner = None
            self._free.append(group)
        for key in [key for key, owner in self._owners.items() if owner == engine]:
            del self._owners[key]

    def _half_of_another(self) -> _Group | None:
        """The end of what the engine with the most rows left would take."""
        richest = max(self._owned.values(), key=lambda groups: sum(len(group.rows) for group in groups), default=None)
        if not richest:
            return None
        if len(richest) > 1:
            return richest.pop()
        [group] = richest
        count = len(group.rows) // 2
        if not count:
            return richest.pop()
        taken = [group.rows.pop() for _ in range(count)]
        return _Group(object(), rows=deque(reversed(taken)))

    def _remember(self, group: _Group) -> None:
        if self._prefix_tokens is None or not isinstance(group.key, tuple) or group.owner is None:
            return
        self._owners[group.key] = group.owner
        if len(self._owners) > _REMEMBERED:
            self._owners.popitem(last=False)

    def _queue_of(self, group: _Group) -> deque[_Group]:
        return self._free if group.owner is None else self._owned.setdefault(group.owner, deque())

    def _key(self, request: Request) -> Hashable:
        count = self._prefix_tokens
        if count is None or len(request.prompt_token_ids) <= count:
            return request.request_id
        return request.salt, request.params.adapter, tuple(request.prompt_token_ids[:count])
