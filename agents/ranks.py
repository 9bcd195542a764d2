"""The processes that train one policy together, each holding a part of every weight, gradient and moment.

A learner asks its `Ranks` which rows are its own and adds up with the others what it found. `Ranks` itself is a process
alone, for which nothing changes; `Sharded` is one of several, through FSDP (Zhao et al., arXiv 2304.11277; PyTorch's
`fully_shard`, which keeps a model's modules and names). All ranks know all rows of a step, so that denominators, and who has
which rows, need no word between them.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from agents.microbatch import split
from agents.rows import Row

Stats = Mapping[str, tuple[float, float]]
"""Sum and count of each metric; of those whose name ends in /max, the greatest value and 1."""

LONGEST_STEP = timedelta(hours=1)
"""From where one rank begins to wait for another in the middle of a step to the error."""


class Ranks:
    """One process that trains a policy alone."""

    rank = 0
    size = 1

    def shard(self, model: nn.Module) -> None:
        """Leave to this process its part of the model's weights, those of rank 0. To be called by all ranks."""

    def microbatches(self, rows: Sequence[Row], size: int) -> Iterator[tuple[list[int], bool]]:
        """Indices of this rank's rows, at most `size` at a time, and whether they count.

        Every rank gets equally many microbatches, since each of them moves weights between the ranks; one that has too few
        rows gets a row of another that does not count.
        """
        return ((indices, True) for indices in split(rows, size))

    def add(self, loss: float, stats: Stats) -> tuple[float, Stats]:
        """The sums over all ranks."""
        return loss, stats

    def here(self) -> AbstractContextManager[object]:
        """In which the thread computes on this rank's device."""
        return nullcontext()


class Sharded(Ranks):
    """One of `size` processes on one machine. Joining waits for all of them; a process may join once in its life."""

    def __init__(self, store: Path, *, rank: int, size: int, device: torch.device) -> None:
        """store: a file that does not exist yet, in a directory of this user's alone, where the ranks find each other."""
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.size, self._device = rank, size, device
        # Whatever connects is trusted by these libraries, so they listen on this machine only, at ports that are free.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
        with self.here():
            distributed.init_process_group(
                "gloo" if device.type == "cpu" else None,
                store=distributed.FileStore(str(store), size),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=LONGEST_STEP,
            )
            self._mesh = init_device_mesh(device.type, (size,))

    def here(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def shard(self, model: nn.Module) -> None:
        from torch import distributed
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        blocks = getattr(model, "_no_split_modules", None) or ()
        modules = [module for module in model.modules() if type(module).__name__ in blocks]
        half = torch.finfo(next(model.parameters()).dtype).bits < 32
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
        with torch.no_grad():
            for parameter in model.parameters():
                distributed.broadcast(parameter.data, src=0)
        for module in (*modules, model):
            part = fully_shard(module, mesh=self._mesh, mp_policy=precision, reshard_after_forward=True)
            # Denominators are those of the whole step, so gradients are added up; FSDP would take their mean.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def microbatches(self, rows: Sequence[Row], size: int) -> Iterator[tuple[list[int], bool]]:
        by_rank = share_out([len(row.prompt_ids) + len(row.ids) for row in rows], self.size)
        count = -(-max(map(len, by_rank)) // size)
        own = by_rank[self.rank]
        parts = [[own[index] for index in part] for part in split([rows[index] for index in own], size)]
        yield from ((part, True) for part in parts)
        yield from (([0], False) for _ in range(count - len(parts)))

    def add(self, loss: float, stats: Stats) -> tuple[float, Stats]:
        total, merged = 0.0, dict[str, tuple[float, float]]()
        for message in self._gather(msgspec.msgpack.encode((loss, stats))):
            one, theirs = msgspec.msgpack.decode(message, type=tuple[float, dict[str, tuple[float, float]]])
            total += one
            for name, (value, count) in theirs.items():
                before, counted = merged.get(name, (0.0, 0.0))
                merged[name] = (max(before, value), 1.0) if name.endswith("/max") else (before + value, counted + count)
        return total, merged

    def _gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, in the order of ranks."""
        from torch import distributed

        lengths = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        distributed.all_gather(lengths, torch.tensor([len(message)], device=self._device))
        width = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(message.ljust(width)), dtype=torch.uint8).to(self._device)
        messages = [torch.empty_like(padded) for _ in range(self.size)]
        distributed.all_gather(messages, padded)
        return [each.cpu().numpy().tobytes()[: int(length)] for each, length in zip(messages, lengths, strict=True)]


def share_out(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices for each rank: from the dearest down, each to the rank with the least cost so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        cost, rank = heap[0]
        shares[rank].append(index)
        heapq.heapreplace(heap, (cost + costs[index], rank))
    return shares


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which each rank holds a part; any other as it is. To be called by all ranks."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks have, as `like` is parted; as it is where that is whole, or for a number."""
    if tensor.ndim == 0 or not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
