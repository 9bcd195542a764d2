"""Whether tokens spell a text, eight bytes at a time: a third of what writing their bytes out and comparing costs.

Shape legend: V vocabulary · T tokens · S bytes of a text.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenalign.table import TokenTable

_WORD = 8
_MASKS = np.array([(1 << 8 * width) - 1 for width in range(_WORD + 1)], np.uint64)


class Words:
    """The first and the last eight bytes of every token of a table, as numbers. May be used from several threads."""

    def __init__(self, table: TokenTable) -> None:
        words_S = _words(table.blob.tobytes())
        starts_V, widths_V = table.offsets[:-1], np.diff(table.offsets)
        self._table = table
        mask_V = _MASKS[np.minimum(widths_V, _WORD)]
        self._first_V2 = np.stack([words_S[starts_V] & mask_V, mask_V], axis=1)  # one look-up for both
        self._last_V = np.where(widths_V > _WORD, words_S[np.maximum(starts_V + widths_V - _WORD, 0)], 0)

    def spelled(self, text: bytes, ids: npt.NDArray[np.int32], through: npt.NDArray[np.int64]) -> bool:
        """Whether the ids [T] of the table spell the text [S]; through: int64 [T+1], where each token starts in what they
        spell, and its length."""
        if through[-1] != len(text):
            return False
        words_S = _words(text)
        first_T2 = self._first_V2.take(ids, axis=0)
        if not ((words_S.take(through[:-1]) & first_T2[:, 1]) == first_T2[:, 0]).all():
            return False
        widths = through[1:] - through[:-1]
        long = np.flatnonzero(widths > _WORD)
        if not np.array_equal(words_S.take(through[long + 1] - _WORD), self._last_V[ids[long]]):
            return False
        longer = long[widths[long] > 2 * _WORD]
        return self._table.bytes_of(ids[longer]) == b"".join(
            text[start:end] for start, end in zip(through[longer].tolist(), through[longer + 1].tolist(), strict=True)
        )


def _words(text: bytes) -> npt.NDArray[np.uint64]:
    """The eight bytes from each byte of a text on [S+1], zeros behind its end."""
    padded = np.frombuffer(text + bytes(_WORD), np.uint8)
    return np.ndarray((len(text) + 1,), "<u8", buffer=padded, strides=(1,))
