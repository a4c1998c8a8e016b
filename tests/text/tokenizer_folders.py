"""Small tokenizers of the common families, trained here, as Hugging Face folders; and texts to try them on."""

from __future__ import annotations

import functools
import json
import pydoc_data.topics
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA3_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{%- if message.tool_calls is defined %}"
    "{%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}"
    "{%- elif message['content'] is string %}{{- message['content'] | trim }}"
    "{%- else %}{%- for part in message['content'] %}{{- part['text'] | trim }}{%- endfor %}{%- endif %}"
    "{{- '<|eot_id|>' }}{%- endfor %}"
    "{%- if tools %}{{- tools | tojson(indent=2) }}{%- endif %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

GEMMA_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

CHATML_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def whole_sequence(tokenizer: Any, prompt: list[int], output: list[int]) -> str:
    """The rule for an output's text: decode(prompt + output) without what it has in common with decode(prompt)."""
    before, after = tokenizer.decode(prompt), tokenizer.decode(prompt + output)
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    return after[same:]


@functools.cache
def corpus() -> tuple[str, ...]:
    """A slice of Python's own documentation."""
    return tuple(list(pydoc_data.topics.topics.values())[:20])


@functools.cache
def texts() -> tuple[str, ...]:
    """English, code, numbers, other scripts, emoji, whitespace runs and control-token spellings."""
    rng = random.Random(7)
    ranges = ((32, 126), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF), (0xA0, 0x24F), (9, 13), (0x400, 0x4FF), (0x660, 0x669))
    mixed = ("".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(60)) for _ in range(60))
    return (
        *(topic[:2000] for topic in list(pydoc_data.topics.topics.values())[20:30]),
        *mixed,
        "",
        " ",
        "\n\n  \t x",
        "Hello world! 123 45.6e7 1234567 ½ Ⅳ",
        "don't I'LL we've",
        "for (int i = 0; i < 10; ++i) {\n\treturn a[i];\n}",
        "ď 🌶 世",
        "日本語のテキスト",
        "a<|eot_id|>b <end_of_turn> <|im_end|> </s>",
    )


def _save(folder: Path, backend: Tokenizer, template: str | None, **config: Any) -> Path:
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def _bos_first(bos: str, token: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, token)])


def gpt2_like(folder: Path) -> Path:
    """Byte-level BPE with GPT-2's splitting; no BOS is added. ChatML template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(corpus(), _byte_level_trainer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    return _save(folder, backend, CHATML_TEMPLATE, bos_token="<|endoftext|>", eos_token="<|im_end|>")


def llama3_like(folder: Path) -> Path:
    """Byte-level BPE with Llama 3's splitting; a post-processor adds BOS; control tokens follow the vocabulary."""
    backend = Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(corpus(), _byte_level_trainer([]))
    control = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    backend.post_processor = _bos_first(control[0], backend.token_to_id(control[0]))
    return _save(folder, backend, LLAMA3_TEMPLATE, bos_token=control[0], eos_token=control[4])


def _byte_level_trainer(special: list[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def spm_model(special: list[str]) -> models.BPE:
    """SentencePiece-style BPE: control tokens, then the 256 byte tokens, then pieces with `▁` for the space."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    backend.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=600, initial_alphabet=["▁"], limit_alphabet=90, show_progress=False)
    )
    trained = json.loads(backend.to_str())["model"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in sorted(trained["vocab"], key=trained["vocab"].__getitem__) if token not in tokens]
    return models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[(left, right) for left, right in trained["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )


def gemma_like(folder: Path) -> Path:
    """SentencePiece-style without a prefix space; BOS added by the post-processor."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    backend = Tokenizer(spm_model(control))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    backend.post_processor = _bos_first("<bos>", 2)
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return _save(folder, backend, GEMMA_TEMPLATE, **names)


def llama2_like(folder: Path) -> Path:
    """SentencePiece-style with a space put before the text, and stripped again when decoding."""
    control = ["<unk>", "<s>", "</s>"]
    backend = Tokenizer(spm_model(control))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    backend.post_processor = _bos_first("<s>", 1)
    return _save(folder, backend, None, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


FAMILIES = {"gpt2": gpt2_like, "llama3": llama3_like, "gemma": gemma_like, "llama2": llama2_like}
