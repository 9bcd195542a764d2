"""A run file (TOML) and `section.key=value` overrides become a checked `mutualrl.config.Run`.

`[defaults]` is merged under every `[agents.NAME]`. A table that chooses among several kinds (`sharing` by `rule`,
`policy` by `kind`) is replaced as a whole when the choice differs, since the other choice's keys mean nothing to it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agents.config import AgentConfig
from mutualrl.config import Run
from mutualrl.errors import ConfigError
from mutualrl.schema import Problem, check

Table = dict[str, Any]

_TAGS = ("rule", "kind")

_KEY = re.compile(r"""\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*"|'[^']*')|(?P<bare>[^\s.="'](?:[^.="']*[^\s.="'])?))\s*(?P<end>[.=])""")
"""One key of an override, and what ends it."""


def load_run(path: Path, overrides: Sequence[str] = ()) -> Run:
    """The run that a file and the overrides describe; ConfigError lists everything that is wrong with them."""
    return build_run(read_tables(path, overrides), source=str(path))


def read_tables(path: Path, overrides: Sequence[str] = ()) -> Table:
    """The file's tables with the overrides applied, before any check of names and values."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no such run file, got path={str(path)!r}; `mutualrl init` writes one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    changes: Table = {}
    for override in overrides:
        keys, value = parse_override(override)
        _insert(changes, keys, value, override)
    merged: Table = merge(tables, changes)
    return merged


def parse_override(text: str) -> tuple[list[str], Any]:
    """`a.b=c` to its keys and value: a TOML value, and a bare string where it is none (`defaults.sharing.rule=prp`).

    A key that is no plain word stands in quotes, as in TOML: `warm_start.mix."a.b"=1`.
    """
    keys, raw = _split_override(text)
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return keys, raw.strip()
    return keys, parsed["value"] if parsed.keys() == {"value"} else raw.strip()


def _split_override(text: str) -> tuple[list[str], str]:
    keys: list[str] = []
    position = 0
    while part := _KEY.match(text, position):
        position = part.end()
        try:
            quoted = part["quoted"] and next(iter(tomllib.loads(f"{part['quoted']} = 0")))
        except tomllib.TOMLDecodeError:
            break
        keys.append(part["bare"] or quoted)
        if part["end"] == "=":
            return keys, text[position:]
    raise ConfigError(f"an override is section.key=value, got {text!r}; example: defaults.learning_rate=1e-4")


def merge(base: Any, over: Any) -> Any:
    """`over` laid on `base`, table by table; into an array of tables by position (`tasks.0.length=4`)."""
    if isinstance(base, list) and isinstance(over, Mapping) and all(key.isdecimal() for key in over):
        merged = list(base)
        for key, value in over.items():
            if int(key) >= len(merged):
                raise ConfigError(f"no entry {key} in an array of {len(merged)} tables; the first is 0")
            merged[int(key)] = merge(merged[int(key)], value)
        return merged
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return over
    if any(tag in base and tag in over and base[tag] != over[tag] for tag in _TAGS):
        return dict(over)
    return {**base, **{key: merge(base[key], value) if key in base else value for key, value in over.items()}}


def build_run(tables: Table, *, source: str) -> Run:
    """The checked run; ConfigError names `source` and lists every problem with its path."""
    rest = {key: value for key, value in tables.items() if key not in ("defaults", "agents")}
    defaults = tables.get("defaults", {})
    agents = tables.get("agents", {})
    for name, table in {"defaults": defaults, "agents": agents}.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"{source}: {name} must be a table, got {name}={table!r}")
    merged = {name: merge(defaults, own) for name, own in agents.items()}
    problems = [_placed(problem) for problem in check({**rest, "agents": {}}, Run)]
    if not agents:
        problems.append(Problem(("agents",), "a run needs at least one [agents.NAME] table, got none"))
        problems += [p for p in check(defaults, AgentConfig, ("defaults",)) if not p.text.startswith("is missing")]
    for name, table in merged.items():
        found = check(table, AgentConfig, ("agents", name))
        problems += [Problem(_origin(problem.path, agents[name], defaults), problem.text) for problem in found]
    if problems:
        lines = dict.fromkeys(f"{'.'.join(problem.path)}: {problem.text}" for problem in problems)
        raise ConfigError("\n".join([f"{source} cannot be used:", *(f"  {line}" for line in lines)]))
    return msgspec.convert({**rest, "agents": merged}, Run)


def _placed(problem: Problem) -> Problem:
    """A setting of agents that was given to the run: say where it belongs."""
    key = problem.path[0]
    if len(problem.path) == 1 and key in AgentConfig.__struct_fields__ and key not in Run.__struct_fields__:
        return Problem(problem.path, f"is a setting of agents: write defaults.{key} for all, or agents.NAME.{key}")
    return problem


def _insert(tables: Table, keys: list[str], value: Any, override: str) -> None:
    *parents, last = keys
    for parent in parents:
        tables = tables.setdefault(parent, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"{parent!r} is set to a value by one override and to a table by another, got {override!r}")
    tables[last] = value


def _origin(path: tuple[str, ...], own: Any, defaults: Any) -> tuple[str, ...]:
    """Where the value at agents.NAME.… was written: in the agent's own table, or in [defaults]."""
    for table, prefix in ((own, path[:2]), (defaults, ("defaults",))):
        node, keys = table, path[2:]
        while keys and isinstance(node, Mapping) and keys[0] in node:
            node, keys = node[keys[0]], keys[1:]
        if not keys or isinstance(node, list):  # a list is taken whole from one of the two
            return (*prefix, *path[2:])
    return path
