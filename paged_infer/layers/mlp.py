"""The feed-forward half of a decoder layer: one MLP, or a choice of experts.

Modules map x [T, H] to [T, H] in the backend's activation dtype. `additions` are what changes the output of a linear
layer for some tokens; a module names its linear layers to it by the keys it was made with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from paged_kernels.interface import Backend, GroupedLinear, Linear
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh"]
ActivationFunction = Callable[[Tensor], Tensor]


class LinearAdditions(Protocol):
    def add(self, key: str, x: Tensor, out: Tensor) -> None:
        """Add to out [T, N], in place, what belongs to x [T, K] in the layer `key`."""
        ...


class MLP(Protocol):
    def __call__(self, x: Tensor, additions: LinearAdditions | None) -> Tensor: ...


def activation_function(backend: Backend, activation: Activation, gated: bool) -> ActivationFunction:
    """[T, 2I] -> [T, I], the activated first half times the second; or where not gated, [T, I] -> [T, I]."""
    if gated:
        if activation == "silu":
            return backend.silu_mul
        return lambda gate_up: backend.gelu_mul(gate_up, approximate=activation == "gelu_tanh")
    if activation == "silu":
        return F.silu
    return lambda x: F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def clamped_swiglu(alpha: float, limit: float) -> ActivationFunction:
    """gpt-oss's: [T, 2I], gate before up -> gate * sigmoid(alpha * gate) * (up + 1), both clamped to `limit`."""

    def activate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)

    return activate


class DenseMLP:
    """down(activation(gate_up(x))).

    Args:
        key: what `additions` know the layer by; the linear layers are KEYgate_up_proj and KEYdown_proj.
    """

    def __init__(self, key: str, gate_up_proj: Linear, down_proj: Linear, activation: ActivationFunction) -> None:
        self._keys = f"{key}gate_up_proj", f"{key}down_proj"
        self._gate_up_proj = gate_up_proj
        self._down_proj = down_proj
        self._activation = activation

    def __call__(self, x: Tensor, additions: LinearAdditions | None = None) -> Tensor:
        gate_up = self._gate_up_proj(x)
        if additions is not None:
            additions.add(self._keys[0], x, gate_up)
        inner = self._activation(gate_up)
        out = self._down_proj(inner)
        if additions is not None:
            additions.add(self._keys[1], inner, out)
        return out


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> weights [T, top_k] float32 and expert ids [T, top_k] int64.

    The weights are the softmax over all experts, or where renormalised over the chosen ones.
    """
    chosen = logits.float().topk(top_k, dim=-1)
    if renormalise:
        return chosen.values.softmax(dim=-1), chosen.indices
    return logits.float().softmax(dim=-1).gather(-1, chosen.indices), chosen.indices


class SharedExpert:
    """An expert that every token uses, weighted by a gate of its own."""

    def __init__(self, gate: Linear, mlp: DenseMLP) -> None:
        self._gate = gate
        self._mlp = mlp

    def __call__(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self._gate(x)) * self._mlp(x)


class SparseMLP:
    """Each token goes through `top_k` of the experts; tokens are sorted by expert, so that each multiplies once.

    Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer" (2017).
    """

    def __init__(
        self,
        backend: Backend,
        router: Linear,
        gate_up_proj: GroupedLinear,
        down_proj: GroupedLinear,
        activation: ActivationFunction,
        *,
        top_k: int,
        renormalise: bool,
        shared: SharedExpert | None = None,
    ) -> None:
        self._router = router
        self._gate_up_proj = gate_up_proj
        self._down_proj = down_proj
        self._activation = activation
        self._top_k = top_k
        self._renormalise = renormalise
        self._shared = shared
        self._experts = torch.arange(gate_up_proj.num_groups + 1, device=backend.device)

    def __call__(self, x: Tensor, additions: LinearAdditions | None = None) -> Tensor:
        weights, experts = route(self._router(x), self._top_k, self._renormalise)
        sorted_experts, order = experts.flatten().sort(stable=True)
        offsets = torch.searchsorted(sorted_experts, self._experts).int()
        inner = self._activation(self._gate_up_proj(x[order // self._top_k], offsets))
        sorted_out = self._down_proj(inner, offsets)
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        mixed = (out.view(len(x), self._top_k, -1).float() * weights[..., None]).sum(dim=1).to(x.dtype)
        return mixed if self._shared is None else mixed + self._shared(x)
