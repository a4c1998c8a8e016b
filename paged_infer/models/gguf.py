"""Reads GGUF files tensor by tensor, dequantised to floating point; the tokenizer's part is not its business."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.gguf_header import TensorEntry, read_header
from paged_infer.models.weights import CheckpointError

LONGEST_ARRAY = 1024
"""Metadata arrays with more elements (vocabulary, scores, merges) are left out."""

_F32, _F16, _Q4_1, _Q8_0, _BF16 = 0, 1, 3, 8, 30
_Q4_1_BLOCK = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("pairs", "u1", (16,))])
_Q8_0_BLOCK = np.dtype([("scale", "<f2"), ("values", "i1", (32,))])


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is as torch counts it (rows first); `ggml_type` as ggml numbers its types."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


class GGUFFile:
    """A GGUF file's metadata and tensors.

    Attributes:
        metadata: key → number, text, truth value or list of them; arrays beyond `LONGEST_ARRAY` are left out.
        tensors: GGUF name → where it is, in file order.

    Raises `CheckpointError` when the file is no GGUF file, is cut short, or has a tensor type nothing here can read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header = read_header(path, longest_array=LONGEST_ARRAY)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        self.metadata = header.metadata
        self.tensors = {
            name: TensorInfo(entry.shape, entry.ggml_type, entry.offset, _nbytes(path, name, entry))
            for name, entry in header.tensors.items()
        }
        size = path.stat().st_size
        if any(info.offset + info.nbytes > size for info in self.tensors.values()):
            raise CheckpointError(f"{path}: the file is cut short ({size} bytes)")

    def tensor(self, name: str) -> Tensor:
        """The tensor's values: float32, or float16 and bfloat16 where the file has them so."""
        info = self.tensors[name]
        raw = np.fromfile(self.path, np.uint8, count=info.nbytes, offset=info.offset)
        return _dequantise(raw, info.ggml_type).reshape(info.shape)


def _nbytes(path: Path, name: str, entry: TensorEntry) -> int:
    sizes = {_F32: (1, 4), _F16: (1, 2), _BF16: (1, 2), _Q4_1: (32, 20), _Q8_0: (32, 34)}
    if entry.ggml_type not in sizes:
        from gguf.constants import GGML_QUANT_SIZES

        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    if entry.ggml_type not in sizes:
        raise CheckpointError(
            f"{path}: not a readable GGUF file (tensor {name} has the unknown type {entry.ggml_type})"
        )
    block, block_bytes = sizes[entry.ggml_type]
    return math.prod(entry.shape) // block * block_bytes


def _dequantise(raw: npt.NDArray[np.uint8], ggml_type: int) -> Tensor:
    """Flat values of a tensor's bytes, bit for bit those of `gguf.quants.dequantize`.

    The commonest types are decoded here in whole-array passes, some six times as fast as the package does row by row.
    """
    if ggml_type == _F32:
        return torch.from_numpy(raw).view(torch.float32)
    if ggml_type == _F16:
        return torch.from_numpy(raw).view(torch.float16)
    if ggml_type == _BF16:
        return torch.from_numpy(raw).view(torch.bfloat16)
    if ggml_type == _Q8_0:
        blocks = raw.view(_Q8_0_BLOCK)
        values = blocks["values"].astype(np.float32)
        values *= blocks["scale"].astype(np.float32)[:, None]
        return torch.from_numpy(values.reshape(-1))
    if ggml_type == _Q4_1:
        blocks = raw.view(_Q4_1_BLOCK)
        values = np.empty((len(blocks), 32), np.float32)
        values[:, :16] = blocks["pairs"] & 15
        values[:, 16:] = blocks["pairs"] >> 4
        values *= blocks["scale"].astype(np.float32)[:, None]
        values += blocks["minimum"].astype(np.float32)[:, None]
        return torch.from_numpy(values.reshape(-1))
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(ggml_type)
    try:
        return torch.from_numpy(dequantize(raw, kind))
    except NotImplementedError as error:
        raise CheckpointError(f"GGUF tensor type {kind.name} is not supported") from error


ROPE_DIVISORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies (Llama 3 scaling): part of the config, though stored as a tensor."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; one without a counterpart keeps its own."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not match or match[2] not in _NAMES:
        return name
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def entries(file: GGUFFile, num_heads: int, num_kv_heads: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every tensor but `ROPE_DIVISORS`: its Hugging Face name and what reads it.

    Files of the llama architecture keep each head's query and key rows in the order of pairwise rotation (x0, x1),
    (x2, x3), …; the rows come back in the order of half-by-half rotation, as Hugging Face has them.
    """
    paired = {"attn_q": num_heads, "attn_k": num_kv_heads} if file.metadata["general.architecture"] == "llama" else {}
    for name in file.tensors:
        if name == ROPE_DIVISORS:
            continue
        match = re.fullmatch(r"blk\.\d+\.(attn_[qk])\.(?:weight|bias)", name)
        heads = paired.get(match[1]) if match else None
        yield hf_name(name), partial(_read, file, name, heads)


def _read(file: GGUFFile, name: str, paired_heads: int | None) -> Tensor:
    tensor = file.tensor(name)
    if paired_heads is None:
        return tensor
    pairs = tensor.reshape(paired_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
