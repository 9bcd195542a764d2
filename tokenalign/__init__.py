"""Token traces across vocabularies: byte-exact tables, alignment, transfer, translation and what they lose.

trace = Trace(text=text, ends=table.ends(ids), finished=True, has_eos=True, logprobs=logprobs)
translation = Translator(Encoder(tokenizer), eos_id=2).translate(trace, max_tokens=512)
translation.ids, translation.span_logprobs, translation.residual
"""

from tokenalign.align import NO_GROUP, Alignment, align, align_batch
from tokenalign.encoder import Encoder
from tokenalign.errors import (
    AlignmentError,
    RoleError,
    SourceError,
    TableError,
    TextError,
    TokenAlignError,
    TooLongError,
)
from tokenalign.residual import Residual, TranslationError, noncanonical
from tokenalign.show import Comparison, Span, compare, show, spans
from tokenalign.sources import open_roles, open_tokenizer
from tokenalign.spelling import Spelled
from tokenalign.table import TokenKind, TokenTable
from tokenalign.topk import MappedRows, TopKMass, comparable, map_topk
from tokenalign.trace import Trace, fork_points, split_segments
from tokenalign.transfer import Split, mean_over_bytes, project_labels, project_mask, split_spans, straddling, sum_spans
from tokenalign.translate import Limits, Translation, Translator
from tokenalign.vocabulary_map import Coverage, Match, VocabularyMap

__all__ = [
    "NO_GROUP",
    "Alignment",
    "AlignmentError",
    "Comparison",
    "Coverage",
    "Encoder",
    "Limits",
    "MappedRows",
    "Match",
    "Residual",
    "RoleError",
    "SourceError",
    "Span",
    "Spelled",
    "Split",
    "TableError",
    "TextError",
    "TokenAlignError",
    "TokenKind",
    "TokenTable",
    "TooLongError",
    "TopKMass",
    "Trace",
    "Translation",
    "TranslationError",
    "Translator",
    "VocabularyMap",
    "align",
    "align_batch",
    "comparable",
    "compare",
    "fork_points",
    "map_topk",
    "mean_over_bytes",
    "noncanonical",
    "open_roles",
    "open_tokenizer",
    "project_labels",
    "project_mask",
    "show",
    "spans",
    "split_segments",
    "split_spans",
    "straddling",
    "sum_spans",
]
