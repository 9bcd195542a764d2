"""Checks plain tables (from TOML) against config structs and reports every problem with its dotted path.

`msgspec.convert` stops at the first problem and knows neither the value nor the valid names; this walk visits all of a
table, so that one call of the command line shows all that is to be mended.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

_AT = re.compile(r" - at `[^`]*`$")
_FIELD = re.compile(r"^`([\w.]+)` ")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. path: keys from the table's root."""

    path: tuple[str, ...]
    text: str


def nearest(name: str, valid: Iterable[str]) -> str:
    """A sentence for a name that is not among the valid ones: the nearest, or all of them when none is near."""
    names = [str(item) for item in valid]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(names) or 'none'}"


def check(value: object, expected: Any, path: tuple[str, ...] = ()) -> list[Problem]:
    """All problems of `value` as the type `expected` (a config struct, or what may stand in one); none: it converts."""
    structs = [option for option in _options(expected) if _is_struct(option)]
    if structs and isinstance(value, Mapping):
        return _check_struct(value, structs, path)
    if isinstance(value, list) and get_origin(expected) is tuple and any(map(_is_struct, _options(get_args(expected)[0]))):
        item = get_args(expected)[0]
        return [problem for index, row in enumerate(value) for problem in check(row, item, (*path, str(index)))]
    if isinstance(value, Mapping) and get_origin(expected) is dict:
        item = get_args(expected)[1]
        return [problem for key, row in value.items() for problem in check(row, item, (*path, str(key)))]
    return _check_leaf(value, expected, path)


def _options(expected: Any) -> tuple[Any, ...]:
    return get_args(expected) if get_origin(expected) in (Union, types.UnionType) else (expected,)


def _is_struct(expected: Any) -> bool:
    return isinstance(expected, type) and issubclass(expected, msgspec.Struct)


def _check_struct(table: Mapping[str, object], structs: list[type[msgspec.Struct]], path: tuple[str, ...]) -> list[Problem]:
    tag_field = structs[0].__struct_config__.tag_field
    chosen = structs[0]
    if len(structs) > 1 and tag_field is not None:
        by_tag = {str(struct.__struct_config__.tag): struct for struct in structs}
        tag = table.get(tag_field)
        if tag is None:
            return [Problem((*path, tag_field), f"is missing; choose one of {', '.join(by_tag)}")]
        if tag not in by_tag:
            return [Problem((*path, tag_field), f"unknown, got {tag_field}={tag!r}; {nearest(str(tag), by_tag)}")]
        chosen = by_tag[str(tag)]
    fields = {field.encode_name: field for field in msgspec.structs.fields(chosen)}
    problems = []
    for key, value in table.items():
        if key in fields:
            problems += check(value, fields[key].type, (*path, key))
        elif key != tag_field:
            problems.append(Problem((*path, key), f"unknown key, got {key}={value!r}; {nearest(key, fields)}"))
    problems += [
        Problem((*path, name), "is missing and has no default")
        for name, field in fields.items()
        if field.required and name not in table
    ]
    return problems or _check_whole(table, chosen, path)


def _check_whole(table: Mapping[str, object], struct: type[msgspec.Struct], path: tuple[str, ...]) -> list[Problem]:
    """Ranges and what depends on several fields: the struct's own `__post_init__`, whose texts start with a field."""
    try:
        msgspec.convert(table, struct)
    except msgspec.ValidationError as error:
        text = _AT.sub("", str(error))
        field = _FIELD.match(text)
        if field is None:
            return [Problem(path, text)]
        encoded = {item.name: item.encode_name for item in msgspec.structs.fields(struct)}
        name = encoded.get(field[1], field[1])
        return [Problem((*path, name), text[field.end() :].replace(f"got {field[1]}=", f"got {name}="))]
    return []


def _check_leaf(value: object, expected: Any, path: tuple[str, ...]) -> list[Problem]:
    name = path[-1] if path else "value"
    if _holds_non_finite(value):
        return [Problem(path, f"must be finite, got {name}={value!r}")]
    try:
        msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        choices = [choice for option in _options(expected) if get_origin(option) is Literal for choice in get_args(option)]
        if choices and isinstance(value, str):
            return [Problem(path, f"must be one of {', '.join(map(str, choices))}, got {name}={value!r}")]
        return [Problem(path, f"{_AT.sub('', str(error)).replace('`', '')}, got {name}={value!r}")]
    return []


def _holds_non_finite(value: object) -> bool:
    """Whether there is an inf or nan anywhere in a value: JSON has none, so that no other process could read it back."""
    if isinstance(value, Mapping):
        return any(map(_holds_non_finite, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_non_finite, value))
    return isinstance(value, float) and not math.isfinite(value)
