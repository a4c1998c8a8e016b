"""Quantised checkpoints packed by hand, number by number, each with the weight it stands for.

A packer takes a weight [N, K] and returns the tensors of a layer, by last part of their names, and the exact
dequantised weight. Written from the formats' own descriptions, sharing no code with the reader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
Packer = Callable[[Tensor], Packed]


def words(numbers: list[int], bits: int) -> list[int]:
    """Numbers one after the other from the lowest bit on, as signed 32-bit words."""
    stream = sum(number << bits * i for i, number in enumerate(numbers))
    found = [stream >> 32 * i & 0xFFFFFFFF for i in range(len(numbers) * bits // 32)]
    return [word - 2**32 if word >= 2**31 else word for word in found]


def along_rows(numbers: Tensor, bits: int) -> Tensor:
    """[R, C] -> [R, C * bits / 32]: each row's numbers in words."""
    return torch.tensor([words(row, bits) for row in numbers.tolist()], dtype=torch.int32)


def grid(weight: Tensor, groups: Tensor, bits: int, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [N, K], scales (float16) and zero points [N, G] of weight [N, K] with inputs in `groups` [K]."""
    count = int(groups.max()) + 1
    scales, zeros = torch.empty(len(weight), count), torch.empty(len(weight), count)
    for g in range(count):
        part = weight[:, groups == g]
        if symmetric:
            scales[:, g] = part.abs().amax(dim=1) / ((1 << bits - 1) - 1)
            zeros[:, g] = 1 << bits - 1
        else:
            low, high = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)
            scales[:, g] = (high - low) / ((1 << bits) - 1)
            zeros[:, g] = (-low / scales[:, g]).round().clamp(1, (1 << bits) - 1)
    scales = scales.half().float()
    numbers = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, (1 << bits) - 1)
    return numbers.long(), scales, zeros.long()


def dequantized(numbers: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    return (numbers - zeros[:, groups]).float() * scales[:, groups]


def group_index(inputs: int, group_size: int, shuffled: bool = False) -> Tensor:
    groups = torch.arange(inputs) // (group_size if group_size > 0 else inputs)
    return groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))] if shuffled else groups


def gptq(bits: int, group_size: int, *, v2: bool = False, act_order: bool = False, symmetric: bool = False) -> Packer:
    """Where version 1 can say so, some zero points are one past the numbers."""

    def make(weight: Tensor) -> Packed:
        groups = group_index(weight.shape[1], group_size, act_order)
        numbers, scales, zeros = grid(weight, groups, bits, symmetric)
        if not (v2 or symmetric or bits == 8):
            zeros[::9, 0] = 1 << bits
        stored = zeros if v2 else zeros - 1
        tensors = {
            "qweight": along_rows(numbers, bits).t().contiguous(),
            "qzeros": along_rows(stored.t(), bits),
            "scales": scales.t().half().contiguous(),
            "g_idx": groups.int(),
        }
        return tensors, dequantized(numbers, scales, zeros, groups)

    return make


def awq(group_size: int) -> Packer:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def shuffle(numbers: Tensor) -> Tensor:
        return torch.cat([numbers[:, i : i + 8][:, order] for i in range(0, numbers.shape[1], 8)], dim=1)

    def make(weight: Tensor) -> Packed:
        groups = group_index(weight.shape[1], group_size)
        numbers, scales, zeros = grid(weight, groups, 4)
        tensors = {
            "qweight": along_rows(shuffle(numbers.t()), 4),
            "qzeros": along_rows(shuffle(zeros.t()), 4),
            "scales": scales.t().half().contiguous(),
        }
        return tensors, dequantized(numbers, scales, zeros, groups)

    return make


def pack_quantized(bits: int, group_size: int, *, symmetric: bool = True, act_order: bool = False) -> Packer:
    def make(weight: Tensor) -> Packed:
        n, k = weight.shape
        groups = group_index(k, group_size, act_order)
        numbers, scales, zeros = grid(weight, groups, bits, symmetric)
        tensors = {
            "weight_packed": along_rows(numbers, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = along_rows(zeros.t(), bits).t().contiguous()
        if act_order:
            tensors["weight_g_idx"] = groups.int()
        return tensors, dequantized(numbers, scales.bfloat16().float(), zeros, groups)

    return make


def int_quantized(weight: Tensor) -> Packed:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    numbers = (weight / scales).round()
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales


def float8(strategy: str, name: str = "weight_scale") -> Packer:
    """Scales of float8 numbers: of a `tensor`, of each `channel`, or of each `block` of 128 x 128."""

    def make(weight: Tensor) -> Packed:
        n, k = weight.shape
        rows, columns = {"tensor": (n, k), "channel": (1, k), "block": (128, 128)}[strategy]
        scales = torch.empty(-(-n // rows), -(-k // columns))
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                block = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scales[i, j] = block.abs().max() / 448
        spread = scales.repeat_interleave(rows, dim=0)[:n].repeat_interleave(columns, dim=1)[:, :k]
        numbers = (weight / spread).to(torch.float8_e4m3fn)
        stored = scales.reshape(()) if strategy == "tensor" else scales
        return {"weight": numbers, name: stored}, numbers.float() * spread

    return make


def write(
    folder: Path, plain: Path, packer: Packer, settings: dict[str, Any], kept: Collection[str] = ()
) -> tuple[Path, Path]:
    """A quantised copy of the folder `plain` and one of the weights it stands for, under `folder`.

    Layers whose name contains one of `kept` stay as they are.
    """
    quantized, exact = folder / "quantized", folder / "exact"
    for copy in (quantized, exact):
        shutil.copytree(plain, copy)
    packed: dict[str, Tensor] = {}
    unpacked: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or any(part in name for part in kept):
            packed[name] = unpacked[name] = tensor
            continue
        tensors, unpacked[name] = packer(tensor)
        packed |= {f"{module}.{part}": values.contiguous() for part, values in tensors.items()}
    save_file(packed, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(unpacked, exact / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return quantized, exact
