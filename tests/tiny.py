"""Tiny random models with tokenizers of every chat style, built without a network.

    from tiny import save_tiny
    directory = save_tiny(tmp_path / "model", "llama", "smollm2")

The models have two or three layers of width 32 and a vocabulary of a few hundred tokens, in fp32.
Their end-of-turn token is made likely, so that random models hold conversations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.models.auto import AutoModelForCausalLM

TEXT = """Alice knows where the red key is. Bob knows which door the red key opens. Who has the key?
The answer is on the table: the blue door. Ask him, then tell her what he said. I think it is
seven, not three. Yes, I agree. No, the other one! <A>blue</A> and <A>seven</A>."""

_CHATML = """\
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' and default_system -%}
{{ '<|im_start|>system\\n' + default_system + '<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' + thinks }}
{%- endif -%}"""

_LLAMA3 = """\
{{- bos_token -}}
{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}"""

_ALTERNATE = """\
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- endfor -%}"""

_GEMMA = f"""\
{{{{- bos_token -}}}}
{_ALTERNATE}
{{%- for m in messages -%}}
{{%- set role = 'model' if m.role == 'assistant' else m.role -%}}
{{{{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{ '<start_of_turn>model\\n' }}}}{{%- endif -%}}"""

_MISTRAL = f"""\
{{{{- bos_token -}}}}
{_ALTERNATE}
{{%- for m in messages -%}}
{{%- if m.role == 'user' -%}}{{{{ '[INST] ' + m.content + ' [/INST]' }}}}
{{%- else -%}}{{{{ ' ' + m.content + eos_token }}}}
{{%- endif -%}}
{{%- endfor -%}}"""


def _chatml(default_system: str = "", thinks: str = "") -> str:
    head = f"{{%- set default_system = '{default_system}' -%}}{{%- set thinks = '{thinks}' -%}}"
    return head + _CHATML


#: style -> template, special tokens, and the roles they play
STYLES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "template": _chatml("You are a helpful assistant."),
        "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        # as the original: padding is the end-of-turn token
        "roles": {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|im_end|>"},
        "end": "<|im_end|>",
    },
    "llama3": {
        "template": _LLAMA3,
        "special": [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ],
        "roles": {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"},
        "adds_bos": True,
        "end": "<|eot_id|>",
    },
    "qwen": {
        "template": _chatml(),
        "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "roles": {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
        "end": "<|im_end|>",
    },
    "qwen3": {  # a reply is generated after an empty think block that the history does not show
        "template": _chatml(thinks="<think>\\n\\n</think>\\n\\n"),
        "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "plain": ["<think>", "</think>"],
        "roles": {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
        "end": "<|im_end|>",
    },
    "gemma": {
        "template": _GEMMA,
        "special": ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        "roles": {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>"},
        "adds_bos": True,
        "end": "<end_of_turn>",
    },
    "mistral": {  # [INST] is plain text, and a space goes before the first word
        "template": _MISTRAL,
        "special": ["<unk>", "<s>", "</s>"],
        "roles": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
        "adds_bos": True,
        "sentencepiece": True,
        "end": "</s>",
    },
    "mistral3": {
        "template": _MISTRAL,
        "special": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        "roles": {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<unk>"},
        "adds_bos": True,
        "end": "</s>",
    },
}
#: Templates in which a reply looks the same in the history and while it is generated.
LINEAR = tuple(style for style in STYLES if style != "qwen3")


def tiny_tokenizer(style: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a few hundred tokens with the chat template of `style`."""
    spec = STYLES[style]
    backend = (_sentencepiece if spec.get("sentencepiece") else _byte_level)(spec["special"])
    backend.add_tokens([AddedToken(t, special=False) for t in spec.get("plain", [])])
    roles = {f"{role}_token": token for role, token in spec["roles"].items()}
    if spec.get("adds_bos"):
        bos = spec["roles"]["bos"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
    extra = [t for t in spec["special"] if t not in roles.values()]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=extra,
        clean_up_tokenization_spaces=False,
        **roles,
    )
    tokenizer.chat_template = spec["template"]
    tokenizer.name_or_path = f"tiny-{style}"
    return tokenizer


def _byte_level(special: list[str]) -> Tokenizer:
    """Byte-level BPE, as in Llama 3, Qwen and SmolLM2."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 256 + 60,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    return backend


def _sentencepiece(special: list[str]) -> Tokenizer:
    """BPE over characters with a space before the first word, unknown ones as bytes: Llama 2."""
    space = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = space
    draft.train_from_iterator(
        TEXT.splitlines(),
        trainers.BpeTrainer(vocab_size=120, show_progress=False),
    )
    learned = json.loads(draft.to_str())["model"]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), *learned["vocab"]]
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(pair) for pair in learned["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = space
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(special)
    return backend


ARCHS = ("llama", "qwen2", "gemma2", "mistral")
#: The style that goes with an architecture where nothing else is asked.
STYLE_OF = {"llama": "llama3", "qwen2": "qwen", "gemma2": "gemma", "mistral": "mistral"}
WINDOW = 16  # of sliding-window attention: far shorter than the conversations of the tests


def tiny_model(arch: str, tokenizer: Any, seed: int = 0, context: int = 1024) -> Any:
    """A random model in fp32 for `tokenizer`, with the peculiarities of its architecture.

    qwen2 has biases in its attention; gemma2 alternates sliding and full attention and caps its
    logits; mistral has sliding attention in every layer.
    """
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    config: Any
    if arch == "llama":
        config = LlamaConfig(**shape)
    elif arch == "qwen2":
        config = Qwen2Config(**shape)
    elif arch == "gemma2":
        shape["num_hidden_layers"] = 3
        config = Gemma2Config(
            **shape,
            sliding_window=WINDOW,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=8.0,
            query_pre_attn_scalar=8,
        )
    elif arch == "mistral":
        config = MistralConfig(**shape, sliding_window=WINDOW)
    else:
        raise ValueError(arch)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def plain_logps(model: Any, completions: Sequence[Any]) -> torch.Tensor:
    """Summed log-probabilities [completions]: one forward pass a sequence, every position
    projected, nothing shared."""
    out = []
    for c in completions:
        logps = model(torch.tensor([c.ids])).logits[0].log_softmax(-1)
        out.append(sum(logps[i - 1, c.ids[i]] for i in range(c.start, len(c.ids))))
    return torch.stack(out)


def make_talkative(model: Any, end_of_turn: int, scale: float = 4.0) -> Any:
    """Make a random model end its turns now and then, greedily too.

    Its logits are about normal with some σ. The largest of 300 lies near 3σ; with its row of the
    output projection 4 times as long, end-of-turn is above that where a normal variable is above
    3/4, which is every 4th or 5th token.
    """
    with torch.no_grad():
        model.get_output_embeddings().weight[end_of_turn] *= scale
    return model


def save_tiny(path: Path, arch: str = "llama", style: str | None = None, seed: int = 0) -> Path:
    """A directory with a tiny model and its tokenizer, as engines/loading.py loads it."""
    style = style or STYLE_OF[arch]
    tokenizer = tiny_tokenizer(style)
    model = tiny_model(arch, tokenizer, seed)
    make_talkative(model, tokenizer.convert_tokens_to_ids(STYLES[style]["end"]))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
