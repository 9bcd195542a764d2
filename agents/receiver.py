"""The agent's side of receiving: a peer's text becomes own ids, and own rewards judge it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agents.config import TranslationConfig
from agents.policies.tokenizer import PolicyTokenizer
from agents.rewards.rewards import Rewards
from agents.types import Group, Prompt
from tokenalign import (
    AlignmentError,
    Limits,
    Residual,
    RoleError,
    TextError,
    TokenAlignError,
    TooLongError,
    Trace,
    Translation,
    TranslationError,
    Translator,
    noncanonical,
)

logger = logging.getLogger(__name__)

DEFAULTS = TranslationConfig()
MANY_REFUSED = 100
"""After so many refusals a warning says so, if they are the most of what was offered."""
_REASONS: dict[type[TokenAlignError], str] = {
    TooLongError: "too_long",
    TranslationError: "lossy",
    TextError: "text",
    RoleError: "role",
    AlignmentError: "ends",
}


class PeerReceiver:
    """Implements agents.sharing.rule.Receiver, and keeps count of what translation cost since `take` was last called."""

    def __init__(
        self,
        tokenizer: PolicyTokenizer,
        rewards: Rewards,
        *,
        max_completion_length: int,
        config: TranslationConfig = DEFAULTS,
    ) -> None:
        limits = Limits(
            max_lost_bytes=config.max_lost_bytes, max_changed_bytes=config.max_changed_bytes, max_struct=config.max_struct
        )
        self._encoder = tokenizer.encoder
        self._translator = Translator(tokenizer.encoder, eos_id=tokenizer.eos_id, limits=limits)
        self._table = tokenizer.table
        self._eos_id = tokenizer.eos_id
        self._rewards = rewards
        self._max_tokens = max_completion_length
        self._checked_share = config.checked_share
        self.tokenizer_fingerprint = tokenizer.fingerprint
        self.reward_fingerprint = rewards.fingerprint
        self._residual = Residual()
        self._refused: Counter[str] = Counter()
        self._offered = 0
        self._ever: Counter[str] = Counter()
        self._tokens_in = 0

    async def verify(self, prompts: Sequence[Prompt], texts: Sequence[bytes]) -> npt.NDArray[np.float32]:
        """Own rewards [N] on peers' texts; functions that ask for `completion_ids` get the texts' own encoding, without end."""
        ids = [self._ids_of(text) for text in texts] if self._rewards.takes_ids else None
        return (await self._rewards.score(prompts, texts, ids=ids)).total

    def _ids_of(self, text: bytes) -> npt.NDArray[np.int32] | None:
        try:
            return self._encoder.encode(text)
        except TokenAlignError:  # refused when it is translated
            return None

    def translate(self, peers: Sequence[Trace]) -> Translation:
        """Own ids for peers' texts, ending in the own end-of-sequence token iff the peer's text ended by itself."""
        self._offered += len(peers)
        translation = self._translator.translate_batch(peers, max_tokens=self._max_tokens)
        for error in translation.errors.values():
            self._refuse(error)
        self._residual += translation.residual
        self._tokens_in += 0 if translation.alignment is None else len(translation.alignment.ends_a)
        return translation

    def adopt(self, peer: Trace, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The sampled ids of a peer with the own tokenizer, checked against its text and the own limits."""
        self._offered += 1
        try:
            peer = peer.checked()
            content = ids[:-1] if peer.has_eos else ids
            if self._table.bytes_of(content) != peer.text:
                raise TranslationError(f"ids of an equal tokenizer must spell their text, got others for {peer.text[:40]!r}")
            if (self._table.widths[content] == 0).any():
                raise RoleError(f"a control token within a text cannot be adopted, got one in {peer.text[:40]!r}")
            adopted = np.append(content, np.int32(self._eos_id)) if peer.finished else content
            if len(adopted) > self._max_tokens:
                raise TooLongError(f"a peer's row has {len(adopted)} tokens, allowed are {self._max_tokens}")
        except TokenAlignError as error:
            self._refuse(error)
            raise
        n_tokens, n_bytes = len(adopted), len(peer.text)
        self._residual += Residual(
            n_tokens=n_tokens,
            n_exact=n_tokens,
            n_groups=n_tokens,
            one_to_one=n_tokens,
            n_bytes=n_bytes,
            exact_bytes=n_bytes,
        )
        self._tokens_in += len(ids)
        return adopted

    def check_sampled(self, groups: Sequence[Group], rng: np.random.Generator) -> None:
        """Count, on a share of the own completions, the sampled tokens that are not those of the text's own encoding."""
        for group in groups:
            for completion in group.completions:
                if rng.random() < self._checked_share:
                    self._residual += noncanonical(self._encoder, completion.ids, has_eos=completion.has_eos)

    def _refuse(self, error: TokenAlignError) -> None:
        reason = _REASONS.get(type(error), "other")
        self._refused[reason] += 1
        self._ever["refused"] += 1
        if isinstance(error, TranslationError) and error.residual is not None:
            self._residual += Residual(changed_bytes=error.residual.changed_bytes, lost_bytes=error.residual.lost_bytes)
        if self._ever["refused"] == MANY_REFUSED and self._ever["refused"] > (self._ever["offered"] + self._offered) / 2:
            logger.warning("most of what peers offer is refused (%s); the latest: %s", reason, error)

    def take(self) -> dict[str, float]:
        """Metrics `thl/*` since the last call; those of the comparison only where something was compared."""
        residual = self._residual
        metrics = {
            "thl/offered": float(self._offered),
            "thl/refused": float(self._refused.total()),
            **{f"thl/refused/{reason}": float(count) for reason, count in self._refused.items()},
            "thl/text_bytes_changed": float(residual.changed_bytes),
            "thl/text_bytes_lost": float(residual.lost_bytes),
        }
        if residual.n_tokens:
            metrics |= {
                "thl/tokens_in": float(self._tokens_in),
                "thl/tokens_out": float(residual.n_tokens),
                "thl/aligned_fraction": residual.n_exact / residual.n_tokens,
                "thl/residual": residual.struct,
                "thl/residual_bytes": residual.struct_bytes,
                "thl/tangled_spans": float(residual.tangled),
                "thl/tail_bytes": float(residual.tail_bytes),
                "thl/tail_tokens": float(residual.tail_tokens),
                "thl/role_tokens": float(residual.role_tokens),
                "thl/seam_bytes": float(residual.seam_bytes),
            }
        if residual.logprob:
            metrics["thl/residual_logprob"] = residual.struct_logprob
        if residual.checked_tokens:
            metrics["thl/noncanonical"] = residual.noncanonical
        self._ever["offered"] += self._offered
        self._residual, self._refused, self._offered, self._tokens_in = Residual(), Counter(), 0, 0
        return metrics
