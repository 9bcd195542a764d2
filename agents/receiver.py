"""The agent's side of receiving: a peer's text becomes own ids, and own rewards judge it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agents.policies.tokenizer import PolicyTokenizer
from agents.rewards.rewards import Rewards
from agents.sharing.rule import PeerText
from agents.types import Prompt
from tokenalign import Residual, TokenAlignError, TooLongError, Translation, TranslationError, Translator


class PeerReceiver:
    """Implements agents.sharing.rule.Receiver, and keeps count of what translation cost since `take` was last called."""

    def __init__(self, tokenizer: PolicyTokenizer, rewards: Rewards, *, max_completion_length: int) -> None:
        self._translator = Translator(tokenizer.encoder, tokenizer.table, eos_id=tokenizer.eos_id)
        self._table = tokenizer.table
        self._eos_id = tokenizer.eos_id
        self._rewards = rewards
        self._max_tokens = max_completion_length
        self.tokenizer_fingerprint = tokenizer.fingerprint
        self.reward_fingerprint = rewards.fingerprint
        self._residual = Residual()
        self._refused = 0
        self._tokens_in = 0

    async def verify(self, prompts: Sequence[Prompt], texts: Sequence[bytes]) -> npt.NDArray[np.float32]:
        """Own rewards [N] on peers' texts."""
        return (await self._rewards.score(prompts, texts)).total

    def translate(self, peer: PeerText) -> Translation:
        """Own ids for a peer's text, ending in the own end-of-sequence token iff the peer's text ended by itself."""
        try:
            translation = self._translator.translate(
                peer.text,
                peer.token_ends,
                finished=peer.finished,
                source_has_eos=peer.has_eos,
                max_tokens=self._max_tokens,
            )
        except TokenAlignError as error:
            self._refuse(error)
            raise
        self._residual += translation.residual
        self._tokens_in += len(peer.token_ends)
        return translation

    def adopt(self, peer: PeerText, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The sampled ids of a peer with the own tokenizer, checked against its text and the own limits."""
        try:
            content = ids[:-1] if peer.has_eos else ids
            if self._table.bytes_of(content) != peer.text:
                raise TranslationError(f"ids of an equal tokenizer must spell their text, got others for {peer.text[:40]!r}")
            adopted = np.append(content, np.int32(self._eos_id)) if peer.finished else content
            if len(adopted) > self._max_tokens:
                raise TooLongError(f"a peer's row has {len(adopted)} tokens, allowed are {self._max_tokens}")
        except TokenAlignError as error:
            self._refuse(error)
            raise
        self._residual += Residual(n_tokens=len(adopted), n_exact=len(adopted), n_groups=len(adopted))
        self._tokens_in += len(ids)
        return adopted

    def _refuse(self, error: TokenAlignError) -> None:
        self._refused += 1
        if isinstance(error, TranslationError):
            self._residual += Residual(text_bytes=error.text_bytes)

    def take(self) -> dict[str, float]:
        """Metrics `thl/*` since the last call."""
        residual = self._residual
        metrics = {"thl/refused": float(self._refused), "thl/text_bytes_changed": float(residual.text_bytes)}
        if residual.n_tokens:
            metrics |= {
                "thl/tokens_in": float(self._tokens_in),
                "thl/tokens_out": float(residual.n_tokens),
                "thl/aligned_fraction": residual.n_exact / residual.n_tokens,
                "thl/residual": residual.struct,
                "thl/tail_bytes": float(residual.tail_bytes),
            }
        self._residual, self._refused, self._tokens_in = Residual(), 0, 0
        return metrics
