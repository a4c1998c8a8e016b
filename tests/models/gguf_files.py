"""Writes Hugging Face folders as GGUF files, the way llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch import Tensor

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _OTHER_NAMES:
        return f"{_OTHER_NAMES[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[inner]}.{kind}"


def permute(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from half-by-half order to pairs, as the converter does for the llama architecture."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path,
    path: Path,
    architecture: str,
    quantisation: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope_divisors: list[float] | None = None,
    vocab: int = 320,
) -> dict[str, Tensor]:
    """Write the folder's model; matrices as `quantisation`, vectors as F32.

    Returns the weights the file stands for, under their Hugging Face names: what quantisation left of them.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{i}>" for i in range(vocab)] + [f"more {i}" for i in range(2000)])
    writer.add_token_types([1] * (vocab + 2000))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    left: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values, projection = tensor.float(), name.split(".")[-2]
        paired = architecture == "llama" and projection in heads
        stored = permute(values, heads[projection]) if paired else values
        kind = quantisation if values.dim() == 2 else GGMLQuantizationType.F32
        data = gguf.quants.quantize(stored.numpy(), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
        kept = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind)))
        left[name] = _unpermute(kept, heads[projection]) if paired else kept
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_divisors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return left


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `permute`, found by permuting row numbers."""
    order = permute(torch.arange(len(weight)), heads)
    rows = torch.empty_like(weight)
    rows[order] = weight
    return rows
