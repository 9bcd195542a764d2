"""The kinds of experience that one end of the exchange knows: the package's own, and those that a project registers.

    async with exchange.connect(endpoint, name="alpha", run_id="r1", types=[Critique]) as ex:
        await ex.publish(Critique(...))
        got = await ex.gather(kinds={"critiques"})

Registration is a matter of each client alone. The hub admits and hands on kinds that it does not know, by the fields that
every experience has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Union

import numpy as np

from exchange.arrays import array_dtypes, check_dtype
from exchange.types import AnyExperience, Experience, Kind, kind_of_tag
from exchange.wire import StructDecoder

__all__ = ["SHIPPED_TAGS", "Kinds", "is_tag"]

_SHIPPED: tuple[type[Experience], ...] = AnyExperience.__args__
SHIPPED_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in _SHIPPED)
_SHIPPED_KINDS = frozenset(map(kind_of_tag, SHIPPED_TAGS))

_TAG = re.compile(r"[a-z][a-z0-9_.-]{0,47}/[1-9][0-9]{0,5}")


def is_tag(tag: str) -> bool:
    """Whether this is a kind's name and the number of its schema version: "critiques/1"."""
    return _TAG.fullmatch(tag) is not None


class Kinds:
    """The package's own kinds and `own`. names: of all kinds. tags: of all their versions.

    Raises ValueError for a type that cannot be registered.
    """

    def __init__(self, own: Collection[type[Experience]] = ()) -> None:
        for kind in own:
            _check(kind)
        self._types = (*_SHIPPED, *own)
        self._dtypes = {kind: array_dtypes(kind) for kind in self._types}
        tags = [str(kind.__struct_config__.tag) for kind in self._types]
        twice = sorted({tag for tag in tags if tags.count(tag) > 1})
        if twice:
            raise ValueError(f"every type needs a tag of its own, got {twice[0]!r} twice: raise the number of one of them")
        self.tags = frozenset(tags)
        self.names: tuple[Kind, ...] = tuple(dict.fromkeys(map(kind_of_tag, tags)))
        self._decoder: StructDecoder[Experience] = StructDecoder(Union[self._types])  # noqa: UP007  # made of values

    def decode(self, body: bytes, frames: Sequence[memoryview]) -> Experience:
        """The experience that a record is. Raises WireError for one of an unknown kind, or that is not whole."""
        return self._decoder.decode(body, frames)

    def check_known(self, kinds: Iterable[Kind]) -> None:
        """Raise ValueError when one of these kinds is unknown here, or there are none."""
        asked = set(kinds)
        if not asked or not asked <= set(self.names):
            raise ValueError(
                f"`kinds` must be some of {', '.join(self.names)}, got kinds={sorted(asked)}: a kind of your own is known to a "
                f"client that is given its type, connect(types=[...])"
            )

    def check(self, experience: Experience) -> None:
        """Raise ValueError when no reader could read this: it is of none of these types, or holds other arrays."""
        dtypes = self._dtypes.get(type(experience))
        if dtypes is None:
            raise ValueError(
                f"only registered types can be published, got a {type(experience).__name__}: connect(types=[...]) with its type"
            )
        for name, dtype in dtypes.items():
            value = getattr(experience, name)
            if type(value) is not np.ndarray or value.dtype is not dtype:
                check_dtype(name, value, dtype)


def _check(kind: type[Experience]) -> None:
    """Raise ValueError when a project's own type would not do."""
    if not (isinstance(kind, type) and issubclass(kind, Experience)):
        raise ValueError(f"an own kind derives from Experience or PromptExperience, got {kind!r}")
    config = kind.__struct_config__
    tag = config.tag
    if not isinstance(tag, str) or not is_tag(tag):
        raise ValueError(
            f"the tag of an own kind is its name in small letters and its version, got tag={tag!r} of {kind.__name__}: "
            f'class {kind.__name__}(PromptExperience, frozen=True, kw_only=True, tag="critiques/1")'
        )
    if kind_of_tag(tag) in _SHIPPED_KINDS:
        taken = ", ".join(sorted(_SHIPPED_KINDS))
        raise ValueError(f"{taken} are the package's own kinds, got tag={tag!r} of {kind.__name__}: choose another name")
    if config.array_like or config.tag_field != "type":
        raise ValueError(
            f"experience is encoded as a map with its tag under 'type', got array_like={config.array_like}, "
            f"tag_field={config.tag_field!r} of {kind.__name__}: leave both as they are in Experience"
        )
