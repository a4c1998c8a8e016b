"""Models in transformers' own modelling code, with our paged attention behind its attention interface.

For causal language models the decoder does not know: slower than the decoder, since only attention is ours, but with
the same scheduler, cache and sampler. What does not go through the interface, or keeps another state than keys and
values, is refused with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from paged_kernels.interface import AttentionMeta, Backend, KVCache
from torch import Tensor, nn

from paged_infer.config import ConfigError
from paged_infer.layers.rotary import rope_table
from paged_infer.models.decoder import Decoder
from paged_infer.models.lora import AdapterRows

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = "paged_infer"
"""The name under which transformers finds our attention."""

_LAYER_KINDS = {"full_attention", "sliding_attention"}
_CHANGING_ROPES = {"longrope", "dynamic"}
_PROBE_TOKENS = 4
_OWN_ATTENTION = (
    "cannot run through transformers: it has attention of its own, which does not go through transformers' interface"
)


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer asks of attention. query [T, heads, head_dim], key and value [T, kv_heads, head_dim]."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None


class Step(Protocol):
    """What a forward pass carries to each layer's attention."""

    def attend(self, call: Call) -> Tensor:
        """[T, heads * head_dim]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """A model's shape, as a trial run without weights showed it.

    Attributes:
        folder: with the model's files.
        family: transformers' name of the model type.
        widest_window: how many keys a token can see in any layer, itself included; 0 = all before it.
        num_weights: numbers in all weights.
    """

    folder: Path
    trust_remote_code: bool
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    widest_window: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    num_weights: int


def transformers_config(folder: Path, *, trust_remote_code: bool = False) -> TransformersConfig:
    """Read a folder's config and run its model on no data. Raises `ConfigError` saying why the model cannot be run."""
    config = _hf_config(folder, trust_remote_code)
    text = config.get_text_config()
    name = (config.architectures or [config.model_type])[0]
    reason = _unsuitable(text)
    if reason is not None:
        raise ConfigError(f"{folder}: {name} cannot run through transformers: {reason}")
    with torch.device("meta"):
        model = _build(folder, config, trust_remote_code)
    for field in ("num_hidden_layers", "max_position_embeddings", "vocab_size", "hidden_size"):
        if not isinstance(getattr(text, field, None), int):
            raise ConfigError(f"{folder}: {name} cannot run through transformers: its config has no {field}")
    probe = _Probe()
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(_PROBE_TOKENS, device="meta")[None]
    try:
        with torch.inference_mode():
            _body(model)(input_ids=tokens, position_ids=positions, use_cache=False, paged_step=probe)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {name} cannot run through transformers: {error}") from error
    except (TypeError, RuntimeError, ValueError, NotImplementedError, AttributeError, KeyError) as error:
        raise ConfigError(f"{folder}: {name} cannot run through transformers: its code failed ({error})") from error
    missing = sorted(set(range(text.num_hidden_layers)) - {call.layer for call in probe.calls})
    if missing:
        raise ConfigError(
            f"{folder}: {name} cannot run through transformers: layers {', '.join(map(str, missing))} keep a state of "
            "their own, not keys and values"
        )
    shapes = {(call.query.shape[1:], call.key.shape[1:], call.value.shape[1:]) for call in probe.calls}
    (heads, head_dim), key_shape, value_shape = next(iter(shapes))
    kv_heads = key_shape[0]
    if (
        len(shapes) > 1
        or len(probe.calls) != text.num_hidden_layers
        or not key_shape == value_shape == (kv_heads, head_dim)
    ):
        raise ConfigError(
            f"{folder}: {name} cannot run through transformers: its layers have keys and values of different shapes"
        )
    windows = [call.window for call in probe.calls]
    eos = text.eos_token_id if text.eos_token_id is not None else config.eos_token_id
    return TransformersConfig(
        folder=folder,
        trust_remote_code=trust_remote_code,
        family=config.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=text.max_position_embeddings,
        widest_window=max(windows) if all(windows) else 0,
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        bos_token_id=text.bos_token_id,
        num_weights=sum(weight.numel() for weight in model.parameters()),
    )


class TransformersModel:
    """A model ready to run: `engine.runner.Model`.

    Args:
        max_position: positions the model will see.

    Raises `ConfigError` when the weights cannot be loaded.
    """

    def __init__(self, config: TransformersConfig, backend: Backend, *, max_position: int) -> None:
        self.config = config
        self._backend = backend
        self._unrotated = rope_table(None, max_position).to(backend.device)
        hf = _hf_config(config.folder, config.trust_remote_code)
        model = _load(config, hf, backend)
        self._body = _body(model)
        setattr(model, model.base_model_prefix, _Given())
        self._head = model

    def forward(self, input_ids: Tensor, meta: AttentionMeta, kv: KVCache, logits_indices: Tensor) -> Tensor:
        """As `Decoder.forward`."""
        return self.logits(self.hidden(input_ids, meta, kv, logits_indices))

    def hidden(
        self,
        input_ids: Tensor,
        meta: AttentionMeta,
        kv: KVCache,
        logits_indices: Tensor,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """As `Decoder.hidden`, without adapters."""
        if adapters is not None:
            raise ConfigError("LoRA adapters need a model that runs natively")
        step = _PagedStep(self._backend, meta, kv, self._unrotated)
        out = self._body(
            input_ids=input_ids[None], position_ids=meta.positions.long()[None], use_cache=False, paged_step=step
        )
        rows: Tensor = out[0][0][logits_indices]
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H], as `hidden` returns it -> logits [R, V] float32."""
        if len(hidden) == 0:
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()


AnyModel = Decoder | TransformersModel


class _Given(nn.Module):
    """Stands where a model has its body, and hands on what it is given."""

    @property
    def decoder(self) -> _Given:
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class _Probe:
    """Notes what each layer asks for."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def attend(self, call: Call) -> Tensor:
        self.calls.append(call)
        return call.query.flatten(1)


class _PagedStep:
    """Attention over a paged cache, for one forward pass."""

    def __init__(self, backend: Backend, meta: AttentionMeta, kv: KVCache, unrotated: Tensor) -> None:
        self._backend = backend
        self._meta = meta
        self._kv = kv
        self._unrotated = unrotated

    def attend(self, call: Call) -> Tensor:
        backend, num_heads = self._backend, call.query.shape[1]
        qkv = torch.cat([call.query, call.key, call.value], dim=1).flatten(1).to(backend.activation_dtype)
        query = backend.rope_and_store(qkv, self._meta, self._unrotated, self._kv, call.layer, num_heads)
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        return backend.attention(query, self._kv, call.layer, self._meta, call.scale, call.window, call.softcap, sinks)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_step: Step | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, heads, T, head_dim] -> [1, T, heads, head_dim]."""
    if paged_step is None:
        raise ConfigError("its layers do not pass on what attention is to use")
    if attention_mask is not None or is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError("its attention is not causal, or has a mask of its own")
    unknown = {name for name, value in others.items() if value is not None} & _CHANGES_SCORES
    if unknown:
        raise ConfigError(f"its attention has {', '.join(sorted(unknown))}")
    call = Call(
        layer=int(getattr(module, "layer_idx", -1)),
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    out = paged_step.attend(call)
    return out.to(query.dtype).view(1, query.shape[2], query.shape[1], -1), None


_CHANGES_SCORES = {"position_bias", "alibi", "head_mask", "chunk_size", "indexer"}


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _hf_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    from transformers import AutoConfig

    _register()
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        remedy = "" if trust_remote_code else "; if the folder brings code you trust, give --trust-remote-code"
        raise ConfigError(f"{folder}: transformers cannot read this config ({_first_line(error)}){remedy}") from error


def _unsuitable(text: PretrainedConfig) -> str | None:
    """Why a model of this config cannot run, as far as the config tells."""
    kinds = set(getattr(text, "layer_types", None) or ()) - _LAYER_KINDS
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))}"
    if getattr(text, "is_encoder_decoder", False):
        return "it has an encoder"
    parameters: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    for part in [parameters, *(part for part in parameters.values() if isinstance(part, Mapping))]:
        if part.get("rope_type") in _CHANGING_ROPES:
            return f"its rotary embedding ({part['rope_type']}) changes with the length of the batch"
    return None


def _build(folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """The model without weights, on the device in force."""
    from transformers import AutoModelForCausalLM

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, trust_remote_code=trust_remote_code
        )
    except KeyError as error:  # older code has a table of its attention classes
        raise ConfigError(f"{folder}: {config.model_type} {_OWN_ATTENTION}") from error
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"{folder}: {config.model_type} cannot run through transformers: {_first_line(error)}"
        ) from error
    if not type(model)._supports_attention_backend:
        raise ConfigError(f"{folder}: {type(model).__name__} {_OWN_ATTENTION}")
    return model


def _load(config: TransformersConfig, hf: PretrainedConfig, backend: Backend) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            config.folder,
            config=hf,
            dtype=backend.activation_dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"{config.folder}: transformers cannot load the weights ({_first_line(error)})") from error
    return model.to(backend.device).eval()


def _body(model: PreTrainedModel) -> nn.Module:
    body = getattr(model, model.base_model_prefix, None)
    if not isinstance(body, nn.Module):
        raise ConfigError(f"{type(model).__name__} cannot run through transformers: it has no body apart from its head")
    return body


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
