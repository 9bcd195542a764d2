"""AdamW over a policy's parameters, with float32 master weights where the policy itself is kept in half precision.

An update of 1e-6 relative size vanishes in bfloat16, whose spacing is 2^-8; the master copy holds it until it shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from agents.ranks import part_of

MASTER = "master"

PORTION_BYTES = 128 << 20
"""Float32 gradients that are held at once beside half-precision ones, or those of one tensor where that is more."""


class MasterAdamW:
    """One optimizer step at a time: `step` clips the gradient norm, refuses non-finite gradients, and clears gradients."""

    def __init__(
        self, parameters: Iterable[Parameter], *, learning_rate: float, weight_decay: float, max_grad_norm: float
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._masters: list[Tensor] = [
            parameter if torch.finfo(parameter.dtype).bits >= 32 else parameter.detach().float().clone()
            for parameter in self._parameters
        ]
        self._portions = list(_portions(self._parameters, self._masters))
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=learning_rate, weight_decay=weight_decay, fused=self._parameters[0].device.type != "mps"
        )
        self._max_grad_norm = max_grad_norm

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts and master weights under names that safetensors takes; the tensors are the live ones."""
        tensors = {
            f"{name}.{index}": value
            for index, state in self._optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }
        for index, (parameter, master) in enumerate(zip(self._parameters, self._masters, strict=True)):
            if master is not parameter:
                tensors[f"{MASTER}.{index}"] = master
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave over equal parameters. ValueError for that of others."""
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, index = key.rpartition(".")
            if int(index) >= len(self._masters):
                raise ValueError(f"an optimizer over {len(self._masters)} parameters has no {key}: the policy is another one")
            if name == MASTER:
                with torch.no_grad():
                    self._masters[int(index)].copy_(part_of(value, self._masters[int(index)]))
            else:
                state.setdefault(int(index), {})[name] = part_of(value, self._masters[int(index)])
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})

    def step(self, loss: float) -> tuple[float, bool]:
        """Apply the gradients of `loss`. Returns their norm before clipping, and whether a step was made.

        A non-finite loss or norm changes nothing but clears the gradients.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm))
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            for portion in self._portions:
                for parameter, master in portion:
                    if master is not parameter and parameter.grad is not None:
                        master.grad, parameter.grad = parameter.grad.float(), None
                self._optimizer.step()  # steps where there are gradients
                for parameter, master in portion:
                    master.grad = None
                    if master is not parameter:
                        parameter.data.copy_(master)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.grad = None
            master.grad = None
        return norm, finite


def _portions(parameters: Sequence[Parameter], masters: Sequence[Tensor]) -> Iterator[list[tuple[Parameter, Tensor]]]:
    """Pairs that are stepped together, so that float32 gradients are held of a part of the weights at a time.

    All that are their own masters come first: they have their gradients from the start, and must be stepped but once.
    """
    pairs: list[tuple[Parameter, Tensor]] = list(zip(parameters, masters, strict=True))
    portion = [pair for pair in pairs if pair[0] is pair[1]]
    if portion:
        yield portion
    portion = []
    for pair in (pair for pair in pairs if pair[0] is not pair[1]):
        portion.append(pair)
        if sum(4 * parameter.numel() for parameter, _ in portion) >= PORTION_BYTES:
            yield portion
            portion = []
    if portion:
        yield portion
