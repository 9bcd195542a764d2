"""Token traces across vocabularies: byte-exact tables, alignment, transfer, translation and what they lose.

table, encoder = TokenTable.from_tokenizer(tokenizer), Encoder(tokenizer)
translation = Translator(encoder, table, eos_id=2).translate(
    text, source_ends, finished=True, source_has_eos=True, max_tokens=512
)
span_logprobs = sum_spans(source_logprobs, translation.alignment)
"""

from tokenalign.align import NO_GROUP, Alignment, align, align_batch
from tokenalign.encoder import Encoder
from tokenalign.errors import (
    AlignmentError,
    RoleError,
    TableError,
    TextError,
    TokenAlignError,
    TooLongError,
    TranslationError,
)
from tokenalign.residual import Residual
from tokenalign.show import Span, show, spans
from tokenalign.table import TokenKind, TokenTable
from tokenalign.transfer import Split, mean_over_bytes, project_labels, project_mask, split_spans, straddling, sum_spans
from tokenalign.translate import Translation, Translator

__all__ = [
    "NO_GROUP",
    "Alignment",
    "AlignmentError",
    "Encoder",
    "Residual",
    "RoleError",
    "Span",
    "Split",
    "TableError",
    "TextError",
    "TokenAlignError",
    "TokenKind",
    "TokenTable",
    "TooLongError",
    "Translation",
    "TranslationError",
    "Translator",
    "align",
    "align_batch",
    "mean_over_bytes",
    "project_labels",
    "project_mask",
    "show",
    "spans",
    "split_spans",
    "straddling",
    "sum_spans",
]
