"""Short ways to speak to a hub and to read its answers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from exchange.config import HubConfig
from exchange.errors import StorageError
from exchange.index_rows import IndexedRecord
from exchange.messages import (
    Accepted,
    Gather,
    Hello,
    Refused,
    Rows,
)
from exchange.segments import Place
from exchange.store import Record
from exchange.testing import HubDriver
from exchange.types import AgentName, Cursor, Kind, PromptId


def hello(name: str, **changes: object) -> Hello:
    return msgspec.structs.replace(Hello(name=AgentName(name), run_id="r"), **changes)


def gather(*kinds: str, **filters: object) -> Gather:
    return msgspec.convert({"kinds": kinds or ("rewards",)} | filters, Gather)


def rows(answer: object) -> list[int]:
    assert isinstance(answer, Rows), answer
    return [row.cursor for row in answer.rows]


def refusal(answer: object) -> str:
    assert isinstance(answer, Refused), answer
    return answer.reason


def accepted(answer: object) -> Accepted:
    assert isinstance(answer, Accepted), answer
    return answer


def two(**config: object) -> HubDriver:
    driver = HubDriver(HubConfig(run_id="r", **config))  # type: ignore[arg-type]
    driver.join("alpha", "beta")
    return driver


class ListDisk:
    """A store on disk, as readers see it."""

    def __init__(self) -> None:
        self.records: dict[Cursor, Record] = {}
        self.dropped_to = Cursor(0)
        self.damaged: set[int] = set()

    def drop(self, to: Cursor) -> None:
        self.dropped_to = max(to, self.dropped_to)
        self.records = {cursor: record for cursor, record in self.records.items() if cursor > to}

    def select(
        self, kinds: Iterable[Kind], prompt_ids: Iterable[PromptId] | None, after: Cursor, limit: int
    ) -> list[IndexedRecord]:
        wanted = None if prompt_ids is None else set(prompt_ids)
        return [
            IndexedRecord(
                cursor=each.cursor,
                kind=each.kind,
                agent=each.agent,
                step=each.step,
                version=each.version,
                stored_at_ns=int(each.stored_at * 1e9),
                prompt_ids=each.prompt_ids,
                place=Place(1, 0, each.encoded.nbytes),
            )
            for each in self.records.values()
            if each.cursor > after and each.kind in set(kinds) and (wanted is None or wanted & set(each.prompt_ids))
        ][:limit]

    def stored_at(self, found: IndexedRecord) -> float:
        return found.stored_at_ns / 1e9

    def load(self, found: IndexedRecord) -> Record | None:
        if found.cursor in self.damaged:
            raise StorageError("a stored record is damaged")
        return self.records.get(found.cursor)
