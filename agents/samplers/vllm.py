"""`VLLMSampler`: groups of completions from a vLLM engine in a process of its own.

Token ids go in and out; the prompts are the policy's own rendering, and no text is ever encoded or decoded over there. After
each learner step the weights go over, whole or, under LoRA, the adapter alone, through a file in memory; the engine tells the
digest of what it was given.

Shape legend: P prompts · G completions per prompt · B = P·G sequences · T sampled tokens.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from agents.errors import SamplerError
from agents.policies.policy import Policy
from agents.samplers import vllm_server
from agents.samplers.config import VLLM, Sampling
from agents.samplers.sampler import Decoded, check_prompts, completions_of, groups_of
from agents.samplers.vllm_process import VLLMProcess
from agents.samplers.vllm_server import Generate, Generated, Load, Loaded, Ready, Start
from agents.samplers.weights import adapter_config, checkpoint_tensors, empty, write_weights
from agents.types import Completion, Group, Prompt
from exchange.types import Version
from tokenalign.table import TokenKind, TokenTable

PROBE_TOKENS = 8
"""Length of the prompt, and of its completion, by which the first weights are seen to be understood."""

PROBE_LIMITS = {torch.float32: 0.02, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Mean difference in log-prob a token that arithmetic alone may make between two implementations."""


class VLLMSampler:
    """Draws from the weights of the last `update`. The process starts in `preflight`, and is waited for in `update`."""

    def __init__(
        self,
        policy: Policy,
        sampling: Sampling,
        config: VLLM,
        *,
        threads: int,
        log: Path,
        process: Callable[..., VLLMProcess] = VLLMProcess,
    ) -> None:
        """threads: of the engine, on CPUs. log: where the engine's output goes. process: starts the engine's process."""
        self._policy = policy
        self._sampling = sampling
        self._config = config
        self._threads = threads
        self._log = log
        self._start_process = process
        self._dtype = policy.model.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        self._process: VLLMProcess | None = None
        self._adapter = adapter_config(policy)
        self._ready = False
        self._version: Version | None = None

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """Check like every sampler, then start the engine with room for the longest of these prompts."""
        longest = check_prompts(self._policy, self._sampling, prompts)
        if self._process is None:
            self._start(min(max(longest, 2 * PROBE_TOKENS), self._policy.max_context))

    def update(self, version: Version) -> Mapping[str, float]:
        """Send what training changes and wait until the engine has them; the first time, until it is ready too.

        Raises SamplerError when the engine has other weights than were sent, or, the first time, gives other log-probs for
        them than the policy; SamplerTimeoutError when it takes too long.
        """
        process = self._running()
        if not self._ready:
            process.hear(Ready, timeout_s=max(self._config.start_timeout_s - process.since_start_s(), 0.0))
        started = time.perf_counter()
        self._version = None
        changed = checkpoint_tensors(self._policy) if self._adapter is None else self._policy.trainable_tensors()
        digest, size = write_weights(process.weights_fd, changed)
        loaded = process.ask(Load(version=_named(version)), Loaded, timeout_s=self._config.request_timeout_s)
        empty(process.weights_fd)
        if (loaded.digest, loaded.version) != (digest, _named(version)):
            raise SamplerError(
                f"vLLM has other weights than version {_named(version)}: got digest={loaded.digest} of version "
                f"{loaded.version}, sent {digest}; its log is {self._log}"
            )
        metrics = {"perf/weight_sync_s": time.perf_counter() - started, "perf/weight_sync_bytes": float(size)}
        if not self._ready:
            self._probe()
            self._ready = True
        self._version = version
        return metrics

    def sample(self, prompts: Sequence[Prompt], *, num_generations: int, step: int, version: Version, seed: int) -> list[Group]:
        """See `Sampler.sample`; raises SamplerError when `version` is not that of the last `update`."""
        if version != self._version:
            raise SamplerError(
                f"the sampler has the weights of version {self._version}, got version={version}; call update first"
            )
        if not prompts:
            return []
        state = np.random.SeedSequence([seed, step]).generate_state(len(prompts) * num_generations, np.uint32)
        completions = self._complete(self._rendered(prompts), num_generations, state.tolist())
        return groups_of(prompts, completions, self._policy.tokenizer, step=step, version=version)

    def greedy(self, prompts: Sequence[Prompt], batch_size: int) -> list[Completion]:
        """See `Sampler.greedy`."""
        completions: list[Completion] = []
        for start in range(0, len(prompts), batch_size):
            completions += self._complete(self._rendered(prompts[start : start + batch_size]), 1, None)
        return completions

    def close(self) -> None:
        """End the engine's process."""
        if self._process is not None:
            self._process.close()

    def _start(self, max_model_len: int) -> None:
        """Start the process and tell it what to build; it reads the model's config within the time for its start."""
        table = self._policy.tokenizer.table
        holes = table.kinds == TokenKind.HOLE
        command = [str(Path(self._config.python).absolute()), "-I", "-u", str(Path(vllm_server.__file__))]
        self._process = self._start_process(command, environment=self._environment(), log=self._log)
        start = Start(
            config=_config_json(self._policy),
            adapter=self._adapter,
            dtype=str(self._dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            kv_cache_memory_bytes=self._config.kv_cache_memory_bytes,
            enforce_eager=self._config.enforce_eager,
            pieces=_pieces(table) if self._sampling.stop else None,
            allowed_ids=np.flatnonzero(~holes).tolist() if holes.any() else None,
        )
        if self._adapter is not None:
            write_weights(self._process.weights_fd, checkpoint_tensors(self._policy))
        self._process.tell(start, timeout_s=self._config.start_timeout_s)

    def _environment(self) -> dict[str, str]:
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in that very process, which leaves nobody behind
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines on one machine would be bound to the same cores
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self._threads),
        }
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over kv_cache_memory_bytes
        device = self._policy.device
        if device.type == "cuda" and device.index is not None:
            visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
            environment["CUDA_VISIBLE_DEVICES"] = visible[device.index] if visible else str(device.index)
        return environment

    def _running(self) -> VLLMProcess:
        if self._process is None:
            raise SamplerError("the vLLM process has not been started; call preflight first")
        return self._process

    def _rendered(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [self._policy.tokenizer.render(prompt.messages).tolist() for prompt in prompts]

    def _complete(self, prompts: list[list[int]], num_generations: int, seeds: list[int] | None) -> list[Completion]:
        asked = self._question(prompts, num_generations, seeds, self._sampling.max_completion_length)
        return completions_of(self._decode(asked), self._policy.tokenizer)

    def _question(self, prompts: list[list[int]], num_generations: int, seeds: list[int] | None, max_tokens: int) -> Generate:
        return Generate(
            prompts=prompts,
            num_generations=num_generations,
            seeds=seeds,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            max_tokens=max_tokens,
            end_ids=sorted(self._policy.tokenizer.eos_ids),
            stops=[text.encode() for text in self._sampling.stop],
        )

    def _decode(self, asked: Generate) -> Decoded:
        generated = self._running().ask(asked, Generated, timeout_s=self._config.request_timeout_s)
        lengths = np.array(generated.lengths, dtype=np.int64)
        ids, logprobs = np.frombuffer(generated.ids, np.int32), np.frombuffer(generated.logprobs, np.float32)
        rows = len(asked.prompts) * asked.num_generations
        whole = len(lengths) == len(generated.stopped) == rows and len(ids) == len(logprobs) == lengths.sum()
        if not whole or lengths.min() < 1 or lengths.max() > asked.max_tokens:
            raise SamplerError(
                f"vLLM gave other completions than were asked for: got rows={len(lengths)} with lengths={generated.lengths}, "
                f"asked for {rows} of 1 to {asked.max_tokens} tokens; its log is {self._log}"
            )
        decoded = Decoded(
            ids=np.zeros((rows, asked.max_tokens), dtype=np.int32),
            logprobs=np.zeros((rows, asked.max_tokens), dtype=np.float32),
            lengths=lengths,
            stopped=np.array(generated.stopped, dtype=np.bool_),
        )
        filled_mask_BT = np.arange(asked.max_tokens) < lengths[:, None]
        decoded.ids[filled_mask_BT] = ids
        decoded.logprobs[filled_mask_BT] = logprobs
        return decoded

    @torch.inference_mode()
    def _probe(self) -> None:
        """See that the engine computes what the policy does: SamplerError when their log-probs of a greedy text differ.

        A digest shows that the weights have arrived; this shows that they are understood, position by position.
        """
        text_ids = np.flatnonzero(self._policy.tokenizer.table.kinds == TokenKind.TEXT)
        prompt = np.resize(text_ids[len(text_ids) // 2 :], PROBE_TOKENS).tolist()
        decoded = self._decode(self._question([prompt], 1, None, PROBE_TOKENS))
        drawn = decoded.ids[0, : decoded.lengths[0]].astype(np.int64)
        ids = torch.tensor([[*prompt, *drawn]], device=self._policy.device)
        training = self._policy.model.training
        self._policy.model.train(False)
        logits = self._policy.model(input_ids=ids, use_cache=False).logits[0, PROBE_TOKENS - 1 : -1].float()
        self._policy.model.train(training)
        own = torch.log_softmax(logits, dim=-1).cpu().numpy()[np.arange(len(drawn)), drawn]
        difference = float(np.abs(own - decoded.logprobs[0, : len(drawn)]).mean())
        limit = max(PROBE_LIMITS[self._dtype], PROBE_LIMITS[self._policy.model.dtype])
        if not difference <= limit:
            self.close()
            raise SamplerError(
                f"vLLM computes another model than the policy: log-probs of the same tokens differ by {difference:.3g} on "
                f"average, allowed are {limit:g}; its log, {self._log}, may name weights that were not loaded"
            )


def _named(version: Version) -> str:
    return f"{version.epoch}.{version.step}"


def _config_json(policy: Policy) -> str:
    """What stands in the config.json of a checkpoint of this policy."""
    config = copy.deepcopy(policy.model.config)
    config.architectures = [type(policy.model).__name__]
    config.dtype = str(policy.model.dtype).removeprefix("torch.")
    return str(config.to_json_string())


def _pieces(table: TokenTable) -> list[bytes]:
    """What each id spells."""
    blob = table.blob.tobytes()
    return [blob[start:end] for start, end in pairwise(table.offsets.tolist())]
