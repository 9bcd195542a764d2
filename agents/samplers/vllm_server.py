"""The process with the vLLM engine, and the words it speaks with the agent that started it.

Run by file name under an interpreter that has vLLM and nothing of this project, `python -I vllm_server.py SOCKET WEIGHTS`,
with the numbers of two inherited file descriptors: one end of a socket pair, and a file in memory for weights. So it imports
nothing of this project. The agent asks, the server answers, one at a time:

    agent               server
    Start         ->    Ready            once, when the engine stands
    Load          ->    Loaded           new weights lie in the file: put them in place, forget cached prefixes
    Generate      ->    Generated        sampled ids and their log-probs
    anything      ->    Failed           what went wrong, in words

A frame is four bytes of length, big-endian, and a msgpack map. When the agent is gone the socket ends, and so does the
server, whatever it is computing: the engine runs in this very process and leaves nobody behind.

Shape legend: P prompts · G completions per prompt · B = P·G sequences, those of a prompt together.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import msgspec
import numpy as np

MOST_BYTES = 2**30
"""Of a frame: more than any step's completions, and less than what a stray length would claim."""

_LENGTH = struct.Struct(">I")

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Build the engine. config: what stands in the config.json of the model.

    adapter: what stands in the adapter_config.json of a LoRA adapter, and its rank; the weights of its base then lie in the
    file already, and each Load brings the adapter alone. None: each Load brings the whole model.
    pieces: what each token spells, for stop strings; None without any. allowed_ids: ids that may be drawn; None for all.
    """

    config: str
    adapter: tuple[str, int] | None
    dtype: str
    max_model_len: int
    kv_cache_memory_bytes: int
    enforce_eager: bool
    pieces: list[bytes] | None
    allowed_ids: list[int] | None


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine stands."""


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """The file holds the model, or the adapter, in safetensors format, to be known as `version`."""

    version: str


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The weights are in place. digest: of the tensors as they were handed to vLLM (see `add_tensor`)."""

    version: str
    digest: str


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Complete each prompt G times. seeds: one for each of B rows; None: greedily.

    stops: byte strings that end a row wherever they lie in its text, across tokens too.
    """

    prompts: list[list[int]]
    num_generations: int
    seeds: list[int] | None
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    end_ids: list[int]
    stops: list[bytes]


class Generated(msgspec.Struct, frozen=True, kw_only=True, tag="generated"):
    """ids: int32, logprobs: float32, of all rows one after the other; lengths, stopped: one of each per row.

    log-probs are those of the distribution that was drawn from, at temperature 1 where decoding was greedy.
    """

    version: str
    ids: bytes
    logprobs: bytes
    lengths: list[int]
    stopped: list[bool]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The question could not be answered."""

    reason: str


Question = Start | Load | Generate
Answer = Ready | Loaded | Generated | Failed


def to_frame(message: Question | Answer) -> bytes:
    """The bytes of a message on the socket."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def read_frame(receive: Any) -> bytes:
    """The body of the next frame. receive: like socket.recv. EOFError when the other side is gone, ValueError on garbage."""
    (length,) = _LENGTH.unpack(_read(receive, _LENGTH.size))
    if length > MOST_BYTES:
        raise ValueError(f"a frame has at most {MOST_BYTES} bytes, got length={length}")
    return _read(receive, length)


def _read(receive: Any, count: int) -> bytes:
    read = bytearray()
    while len(read) < count:
        more = receive(min(count - len(read), 2**20))
        if not more:
            raise EOFError("the other side is gone")
        read += more
    return bytes(read)


def add_tensor(digest: Any, name: str, tensor: Any) -> None:
    """Add a named torch tensor in CPU memory to a digest of weights: name, dtype, shape, bytes."""
    import torch

    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


class Engine:
    """A vLLM engine that knows token ids only, and takes weights from a file descriptor."""

    def __init__(self, start: Start, weights_fd: int) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._pieces = start.pieces
        self._allowed_ids = start.allowed_ids
        self._weights = f"/dev/fd/{weights_fd}"
        self._version = ""
        self._requests = 0
        self._adapter = start.adapter
        self._adapters = 0
        self._lora: Any = None
        with tempfile.TemporaryDirectory() as model:
            (Path(model) / "config.json").write_text(start.config)
            if start.adapter is not None:
                (Path(model) / "model.safetensors").symlink_to(self._weights)
            arguments = EngineArgs(
                model=model,
                load_format="dummy" if start.adapter is None else "safetensors",
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=start.dtype,
                max_model_len=start.max_model_len,
                kv_cache_memory_bytes=start.kv_cache_memory_bytes,
                enforce_eager=start.enforce_eager,
                enable_prefix_caching=True,
                block_size=32,  # small enough for short prompts to be shared; kernels for CPUs want multiples of 32
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                enable_lora=start.adapter is not None,
                max_loras=1,
                max_cpu_loras=1,
                max_lora_rank=16 if start.adapter is None else min(rank for rank in _RANKS if rank >= start.adapter[1]),
            )
            self._engine = LLMEngine.from_engine_args(arguments)

    def load(self, load: Load) -> Loaded:
        """Put the file's weights in place; the digest is taken from what vLLM is given."""
        digest = blake3.blake3()
        if self._adapter is None:
            new = self._tensors(self._weights, digest)
            self._engine.collective_rpc(lambda worker: _reload(worker, new))
        else:
            self._swap_adapter(self._adapter[0], digest)
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not let go of prefixes computed with the earlier weights")
        self._version = load.version
        return Loaded(version=load.version, digest=digest.hexdigest())

    def _swap_adapter(self, config: str, digest: Any) -> None:
        """Replace the adapter by the file's, under an id of its own: vLLM takes an id that it knows for the same adapter."""
        from vllm.lora.request import LoRARequest

        if self._lora is not None:
            self._engine.remove_lora(self._adapters)
        self._adapters += 1
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "adapter_config.json").write_text(config)
            copied = shutil.copyfile(self._weights, Path(folder) / "adapter_model.safetensors")
            for _ in self._tensors(str(copied), digest):
                pass
            self._lora = LoRARequest(f"adapter-{self._adapters}", self._adapters, folder)
            added = self._engine.add_lora(self._lora)
        live = self._engine.list_loras()
        if not added or live != {self._adapters}:
            raise RuntimeError(f"vLLM did not swap the adapter: got adapters={sorted(live)}, expected {self._adapters} alone")

    def _tensors(self, path: str, digest: Any) -> Iterator[tuple[str, Any]]:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name).clone()  # the file's memory is written over at the next step
                add_tensor(digest, name, tensor)
                yield name, tensor

    def generate(self, asked: Generate) -> Generated:
        """Complete all prompts; the rows are one batch to vLLM, in which those of a prompt share its prefix."""
        count = len(asked.prompts) * asked.num_generations
        rows = [Row(asked.stops, self._pieces) for _ in range(count)]
        names = {f"{self._requests}-{index}": rows[index] for index in range(count)}
        self._requests += 1
        for index, name in enumerate(names):
            prompt = {"prompt_token_ids": asked.prompts[index // asked.num_generations]}
            self._engine.add_request(name, prompt, self._parameters(asked, index), lora_request=self._lora)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                (new,) = output.outputs
                logprobs = [at[token].logprob for token, at in zip(new.token_ids, new.logprobs, strict=True)]
                row = names[output.request_id]
                row.add(new.token_ids, logprobs, ended=new.finish_reason == "stop")
                if row.stopped and new.finish_reason is None:
                    self._engine.abort_request([output.request_id])
        return Generated(
            version=self._version,
            ids=b"".join(np.asarray(row.ids, np.int32).tobytes() for row in rows),
            logprobs=b"".join(np.asarray(row.logprobs, np.float32).tobytes() for row in rows),
            lengths=[len(row.ids) for row in rows],
            stopped=[row.stopped for row in rows],
        )

    def _parameters(self, asked: Generate, index: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = asked.seeds is None
        return SamplingParams(
            temperature=0.0 if greedy else asked.temperature,
            top_p=1.0 if greedy else asked.top_p,
            top_k=0 if greedy else asked.top_k,
            seed=None if asked.seeds is None else asked.seeds[index],
            max_tokens=asked.max_tokens,
            stop_token_ids=asked.end_ids,
            ignore_eos=True,  # end tokens are those above, whatever vLLM takes from the model's config
            allowed_token_ids=self._allowed_ids,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


def _reload(worker: Any, tensors: Iterator[tuple[str, Any]]) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    worker.model_runner.reload_weights(weights_iterator=tensors)
    # On CPUs a head works on a packed copy of its weights, which a reload leaves as it was where the head is tied.
    for module in worker.model_runner.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class Row:
    """One completion on its way. stopped: ended by an end token or a stop string; further tokens are not taken."""

    def __init__(self, stops: list[bytes], pieces: list[bytes] | None) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.stopped = False
        self._stops = stops
        self._pieces = pieces or []
        self._longest = max(map(len, stops), default=0)
        self._tail = b""

    def add(self, ids: list[int], logprobs: list[float], *, ended: bool) -> None:
        """Take the next tokens. ended: the last of them is an end token."""
        for token, logprob in zip(ids, logprobs, strict=True):
            if self.stopped:
                return
            self.ids.append(token)
            self.logprobs.append(logprob)
            if self._stops:
                text = self._tail + self._pieces[token]
                self.stopped = any(stop in text for stop in self._stops)
                self._tail = text[-self._longest :]
        self.stopped = self.stopped or ended


def answer(question: Question, engine: Engine | None, weights_fd: int) -> tuple[Answer, Engine | None]:
    """The answer to a question, and the engine from then on."""
    try:
        if isinstance(question, Start):
            return Ready(), Engine(question, weights_fd)
        if engine is None:
            raise RuntimeError("the first word must be Start")
        return (engine.load(question) if isinstance(question, Load) else engine.generate(question)), engine
    except Exception as error:  # of any kind, from vLLM and below; the agent decides what it means
        traceback.print_exc()
        return Failed(reason=f"{type(error).__name__}: {error}"), engine


def main(socket_fd: int, weights_fd: int) -> None:
    """Answer until the agent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent's to act on: it may still want its step's completions
    wire = socket.socket(fileno=socket_fd)
    questions: queue.Queue[Question] = queue.Queue(maxsize=1)  # the agent waits for each answer

    def receive() -> None:
        decoder = msgspec.msgpack.Decoder(Question)
        try:
            while True:
                questions.put(decoder.decode(read_frame(wire.recv)))
        except (EOFError, ConnectionError):
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=receive, name="questions", daemon=True).start()
    engine: Engine | None = None
    while True:
        words, engine = answer(questions.get(), engine, weights_fd)
        wire.sendall(to_frame(words))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
