"""SentencePiece models as tokenizers that give SentencePiece's ids.

Known differences: a dummy prefix is put behind every user-defined piece too, as in the converted tokenizers that Hugging
Face hosts; control pieces match in a text unless `encode_special_tokens` is set; a Unigram model may choose otherwise among
segmentations of equal score; marks of one letter come in canonical order where the model's map is of the NFKC kind.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from tokenalign.definition import MOST_IDS, SPACE_MARK
from tokenalign.errors import SourceError
from tokenalign.foreign import foreign

_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_FAR = 1e6
# Splitting a piece takes the square of its length; SentencePiece's own limit is 16 unless it is told otherwise.
_MOST_CHARACTERS = 1024


def read_model(content: bytes) -> Any:
    """The protocol buffer (`ModelProto`) of a SentencePiece model file.

    Raises SourceError for other content and without the libraries that read it.
    """
    try:
        schema = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as error:
        raise SourceError(
            f"SentencePiece models need the libraries sentencepiece and protobuf ({error}); "
            f"install them: pip install 'mutualrl[sentencepiece]'"
        ) from error
    proto = schema.ModelProto()
    with foreign(SourceError, f"this is no SentencePiece model, got {len(content)} bytes"):
        proto.ParseFromString(content)
    if not proto.pieces:
        raise SourceError(f"this is no SentencePiece model: no pieces, got {len(content)} bytes")
    return proto


def from_sentencepiece(proto: Any) -> Tokenizer:
    """A tokenizer with the ids of a SentencePiece model, BPE or Unigram.

    Raises SourceError for other kinds, for spaces behind words and for pieces that are none.
    """
    with foreign(SourceError, "the SentencePiece model cannot be converted"):
        _check_pieces(proto)
        return _converted(proto)


def _check_pieces(proto: Any) -> None:
    names = [piece.piece for piece in proto.pieces]
    if len(set(names)) < len(names) or len(names) > MOST_IDS:
        raise SourceError(f"a SentencePiece model has each piece once, got {len(names)} pieces, {len(set(names))} different")
    sizes = list(map(len, names))
    if not 0 < min(sizes) <= max(sizes) <= _MOST_CHARACTERS:
        raise SourceError(f"pieces must have 1 to {_MOST_CHARACTERS} characters, got {min(sizes)} to {max(sizes)}")
    if not all(math.isfinite(piece.score) for piece in proto.pieces):
        raise SourceError("the scores of pieces must be finite numbers")
    unknown = sum(piece.type == _UNKNOWN for piece in proto.pieces)
    if unknown != 1:
        raise SourceError(f"a SentencePiece model has one unknown piece, got {unknown}")


def _converted(proto: Any) -> Tokenizer:
    trainer = proto.trainer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE) or trainer.treat_whitespace_as_suffix:
        raise SourceError(
            f"only SentencePiece BPE and Unigram models with spaces before words can be read, "
            f"got model_type={trainer.model_type}, treat_whitespace_as_suffix={trainer.treat_whitespace_as_suffix}"
        )
    names = [piece.piece for piece in proto.pieces]
    unk_id = next(index for index, piece in enumerate(proto.pieces) if piece.type == _UNKNOWN)
    if trainer.model_type == _BPE:
        ids = {name: index for index, name in enumerate(names)}
        model = models.BPE(ids, _merges(proto), unk_token=names[unk_id], fuse_unk=True, byte_fallback=trainer.byte_fallback)
        tokenizer = Tokenizer(model)
    else:
        tokenizer = Tokenizer(models.Unigram(_scored(proto), unk_id, trainer.byte_fallback))
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    ends = [decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    added = [piece for piece in proto.pieces if piece.type in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(names[unk_id], normalized=False)])
    tokenizer.add_special_tokens([AddedToken(piece.piece, normalized=False) for piece in added if piece.type == _CONTROL])
    tokenizer.add_tokens([AddedToken(piece.piece, normalized=False) for piece in added if piece.type == _USER_DEFINED])
    return tokenizer


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Every split of a normal piece into two normal pieces, by falling score of the whole."""
    scores = {piece.piece: (-piece.score, index) for index, piece in enumerate(proto.pieces) if piece.type == _NORMAL}
    ranked = [
        (*rank, name[:cut], name[cut:])
        for name, rank in scores.items()
        for cut in range(1, len(name))
        if name[:cut] in scores and name[cut:] in scores
    ]
    return [(left, right) for _, _, left, right in sorted(ranked)]


def _scored(proto: Any) -> list[tuple[str, float]]:
    """Pieces and scores; byte and control pieces, which no text of theirs may become, are the last choice."""
    in_text = (_NORMAL, _USER_DEFINED)
    last = min(piece.score for piece in proto.pieces) - _FAR
    return [(piece.piece, piece.score if piece.type in in_text else last) for piece in proto.pieces]


def _normalizer(spec: Any) -> normalizers.Normalizer:
    """SentencePiece's order: map of characters, spaces at the ends and runs of them, dummy prefix, U+2581 for spaces."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        if "nfkc" in spec.name:  # the library's map drops marks of characters that are not composed
            steps.append(normalizers.NFC())
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        at_end = f"[ {SPACE_MARK}]" if spec.escape_whitespaces else " "
        steps += [normalizers.Replace(Regex(rf"\A +|{at_end}+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE_MARK if spec.escape_whitespaces else " "))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE_MARK))
    return normalizers.Sequence(steps)
