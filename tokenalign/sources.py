"""Any tokenizer as a `tokenizers.Tokenizer`, and its roles: files, folders, transformers, tiktoken and SentencePiece.

Objects of other libraries are known by what they can do, so that none of the libraries is imported. Converted files are
kept in the cache on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from tokenalign import cache
from tokenalign.definition import Definition
from tokenalign.errors import SourceError, TokenAlignError
from tokenalign.foreign import foreign
from tokenalign.rank_files import from_ranks, from_tekken, holds_ranks, read_ranks, tekken_specials
from tokenalign.sentencepiece_files import from_sentencepiece, read_model
from tokenalign.table import ROLES

# In a folder, the first of these that exists.
FILES = ("tokenizer.json", "tekken.json", "tokenizer.model")
# What says which ids have a role, beside a tokenizer's file.
_CONFIGS = ("tokenizer_config.json", "generation_config.json", "config.json")
# Control tokens by the names that all families give them, for sources that only name them.
_NAMED = {"bos": ("<s>",), "eos": ("</s>", "<|endoftext|>"), "pad": ("<pad>",), "unk": ("<unk>",)}
_LAYOUT = 1  # of converted tokenizers; to be raised with any change of the conversions
_KINDS = (
    "a tokenizers.Tokenizer, a fast tokenizer of transformers, a tiktoken.Encoding, a SentencePieceProcessor, or the path "
    "of a folder, a tokenizer.json, a tekken.json, a file of tiktoken ranks or a SentencePiece model"
)


def open_tokenizer(source: Any, *, pattern: str | None = None) -> Tokenizer:
    """The tokenizer of a source; a `Tokenizer` is given back itself, one out of a file truncates and pads nothing.

    source: a Tokenizer, an object with `backend_tokenizer` (transformers), a tiktoken.Encoding, a
    SentencePieceProcessor, or a path. pattern: regular expression that splits the text before merging; needed for files
    of tiktoken ranks, which do not hold it, and for nothing else.
    Raises SourceError for anything else, with what is missing.
    """
    if isinstance(source, str | Path):
        return _from_file(tokenizer_file(Path(source)), pattern)
    if pattern is not None:
        raise SourceError(f"`pattern` goes with a file of tiktoken ranks, got a source of type {type(source).__name__}")
    if isinstance(source, Tokenizer):
        return source
    backend = getattr(source, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        return backend
    if hasattr(source, "_mergeable_ranks") and hasattr(source, "_pat_str"):
        return from_ranks(source._mergeable_ranks, source._pat_str, source._special_tokens)
    if hasattr(source, "serialized_model_proto"):
        return from_sentencepiece(read_model(source.serialized_model_proto()))
    raise SourceError(f"a tokenizer is opened from {_KINDS}; got an object of type {type(source).__name__}")


def open_roles(source: Any) -> dict[str, frozenset[int]]:
    """Ids by role (the names in `tokenalign.table.ROLES`) of a source as `open_tokenizer` takes it; an end of sequence
    often has several. Roles without an id are left out; {} says that the source tells nothing.

    Folders: tokenizer_config.json, generation_config.json and config.json together, and what the tokenizer's file tells.
    Raises SourceError for a path that is none and for a configuration that is no JSON object.
    """
    if isinstance(source, str | Path):
        return _roles_by_path(Path(source))
    if isinstance(source, Tokenizer):
        return {}
    if hasattr(source, "serialized_model_proto"):
        return _kept({role: _as_ids(getattr(source, f"{role}_id")()) for role in ROLES})
    if hasattr(source, "_mergeable_ranks"):
        return _by_usual_names(source._special_tokens)
    return _kept({role: _as_ids(getattr(source, f"{role}_token_id", None)) for role in ROLES})


def tokenizer_file(path: Path) -> Path:
    """The file of a tokenizer: the path itself, or the first of FILES in the folder. Raises SourceError for neither."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise SourceError(f"there is no such file or folder, got path={str(path)!r}")
    found = next((path / name for name in FILES if (path / name).is_file()), None)
    if found is None:
        raise SourceError(f"the folder holds no tokenizer ({', '.join(FILES)}), got path={str(path)!r}")
    return found


def _from_file(path: Path, pattern: str | None) -> Tokenizer:
    content = _content(path)
    ranks = path.suffix != ".json" and holds_ranks(content)
    if ranks and pattern is None:
        raise SourceError(
            f"a file of tiktoken ranks does not say how text is split, got pattern=None for path={str(path)!r}; "
            f"give the family's regular expression as `pattern`"
        )
    if pattern is not None and not ranks:
        raise SourceError(f"`pattern` goes with a file of tiktoken ranks, got path={str(path)!r}")
    try:
        if ranks:
            return _converted(content, str(pattern), lambda: from_ranks(read_ranks(content), str(pattern), {}))
        if path.suffix != ".json":
            return _converted(content, "sentencepiece", lambda: from_sentencepiece(read_model(content)))
        if path.name.startswith("tekken"):
            return _converted(content, "tekken", lambda: from_tekken(content))
        return _from_json(content)
    except TokenAlignError as error:
        raise SourceError(f"{error}; path={str(path)!r}") from error


def _content(path: Path) -> bytes:
    with foreign(SourceError, f"the file cannot be read, got path={str(path)!r}"):
        return path.read_bytes()


def _from_json(content: bytes) -> Tokenizer:
    # Before the library sees the ids: it makes arrays as long as the highest.
    Definition.read(content).check_ids()
    with foreign(SourceError, "this is no tokenizer.json of the `tokenizers` library"):
        tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _converted(content: bytes, way: str, convert: Callable[[], Tokenizer]) -> Tokenizer:
    """The conversion of a file's content, from the cache if it was made before."""
    name = f"{hashlib.sha256(content + way.encode()).hexdigest()}-{_LAYOUT}.json"
    kept = cache.load(name)
    if kept is not None:
        try:
            return _from_json(kept)
        except TokenAlignError:  # written by a version of the library that this one cannot read
            pass
    tokenizer = convert()
    cache.store(name, tokenizer.to_str().encode())
    return tokenizer


def _roles_by_path(path: Path) -> dict[str, frozenset[int]]:
    file = tokenizer_file(path)
    try:
        roles, ids_of = _roles_in_file(file, _content(file))
    except TokenAlignError as error:
        raise SourceError(f"{error}; path={str(file)!r}") from error
    beside = [file.with_name(name) for name in _CONFIGS if path.is_dir() or file.name in FILES]
    for config in (_read_config(config) for config in beside if config.is_file()):
        nested = config.get("text_config")
        for part in [config, nested] if isinstance(nested, dict) else [config]:
            for role in ROLES:
                ids = _as_ids(part.get(f"{role}_token_id"))
                name = part.get(f"{role}_token")
                name = name.get("content") if isinstance(name, dict) else name
                roles[role] = roles.get(role, frozenset()) | ids | (ids_of(name) if isinstance(name, str) else frozenset())
    return _kept(roles)


def _roles_in_file(file: Path, content: bytes) -> tuple[dict[str, frozenset[int]], Callable[[str], frozenset[int]]]:
    """What a tokenizer's file itself tells, and the look-up of a token in it."""
    ids: Mapping[str, int] = {}
    roles: dict[str, frozenset[int]] = {}
    if file.suffix == ".json" and file.name.startswith("tekken"):
        ids = tekken_specials(content)
        roles = _by_usual_names(ids)
    elif file.suffix == ".json":
        definition = Definition.read(content)
        definition.check_ids()
        ids = definition.vocab | {token.content: token.id for token in definition.added_tokens}
    elif not holds_ranks(content):
        proto = read_model(content)
        with foreign(SourceError, "this is no SentencePiece model"):
            ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
            roles = {role: _as_ids(getattr(proto.trainer_spec, f"{role}_id")) for role in ROLES}
    return roles, lambda name: _as_ids(ids.get(name))


def _read_config(path: Path) -> dict[str, Any]:
    with foreign(SourceError, f"this is no JSON object, got path={str(path)!r}"):
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])


def _by_usual_names(ids: Mapping[str, int]) -> dict[str, frozenset[int]]:
    return _kept({role: frozenset(ids[name] for name in names if name in ids) for role, names in _NAMED.items()})


def _as_ids(value: Any) -> frozenset[int]:
    """Ids out of what configurations and libraries write: one, several, None or -1 for none."""
    values = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    return frozenset(one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0)


def _kept(roles: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    return {role: ids for role, ids in roles.items() if ids}
