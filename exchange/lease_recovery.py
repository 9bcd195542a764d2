"""Groups of an earlier hub, as they stand on the disk: what was out comes again, what was in line waits."""

from __future__ import annotations

from exchange.lease_group import Group
from exchange.lease_rows import GROUP, LETTERS, LeaseRows, StoredGroup, StoredHeld, StoredLetters, decode_row
from exchange.replays import Readable, load_or_log
from exchange.store import Record
from exchange.types import Cursor, Kind

__all__ = ["recover_groups"]

INDEXED_AT_ONCE = 1000


def recover_groups(rows: LeaseRows, store: Readable, *, limit_bytes: int) -> list[Group]:
    """The groups that were written down. Raises StorageError, also for rows of a newer version."""
    groups = []
    decoded = {key: decode_row(body) for key, body in rows.items() if body is not None}
    for (name, key), stored in decoded.items():
        if key != GROUP or not isinstance(stored, StoredGroup):
            continue
        letters = decoded.get((name, LETTERS))
        group = Group(name, stored.kinds, stored.agents, limit_bytes=limit_bytes, settled_to=stored.settled_to, durable=True)
        group.recover(stored, letters.letters if isinstance(letters, StoredLetters) else ())
        for (owner, cursor), held in decoded.items():
            if owner == name and isinstance(held, StoredHeld):
                group.recover_held(Cursor(cursor), _load(store, held.kind, Cursor(cursor)), held.deliveries)
        after = stored.settled_to
        while chunk := store.select(stored.kinds, None, after, INDEXED_AT_ONCE):
            after = chunk[-1].cursor
            for found in chunk:
                if stored.agents is None or found.agent in stored.agents:
                    group.wait(found.agent, found.kind, found.cursor)
        groups.append(group)
    return groups


def _load(store: Readable, kind: Kind, cursor: Cursor) -> Record | None:
    for found in store.select((kind,), None, Cursor(cursor - 1), 1):
        if found.cursor == cursor:
            return load_or_log(store, found)
    return None
