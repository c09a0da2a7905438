"""The embedded model's tokenizer: a byte-level BPE, and its chat template. Knows no weights."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.tiny_model.corpus import Example

VOCABULARY_SIZE = 2048
END = "<|end|>"
PAD = "<|pad|>"
_ROLES = ("system", "user", "assistant")

# Without tools and calls the text is that of the training. The form of a call is that of Hermes.
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{- '<|system|>Tools:\\n' -}}"
    "{%- for tool in tools -%}{{- tool['function'] | default(tool) | tojson + '\\n' -}}{%- endfor -%}"
    '{{- \'A call: <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|end|>\' -}}'
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{{- '<|user|><tool_response>\\n' + message['content'] | trim + '\\n</tool_response><|end|>' -}}"
    "{%- elif message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- else -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | default('', true) | trim -}}"
    "{%- for call in message['tool_calls'] | default([], true) -%}"
    "{%- set function = call['function'] | default(call) -%}"
    "{{- '<tool_call>\\n{\"name\": \"' + function['name'] + '\", \"arguments\": ' -}}"
    "{{- function['arguments'] | tojson + '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def learn_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCABULARY_SIZE` tokens whose merges come from the texts; every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, PAD, *(f"<|{role}|>" for role in _ROLES)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one token that the tokenizer was made with."""
    found = tokenizer.backend_tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the vocabulary has no token {token!r}")
    return found


def encode_example(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], list[bool]]:
    """Token ids of an example, and which of them are learned: plain texts and answers, with their end."""
    end = token_id(tokenizer, END)
    ids: list[int] = []
    learned: list[bool] = []
    for turn in example.turns:
        spoken = tokenizer.backend_tokenizer.encode(turn.text, add_special_tokens=False).ids
        before = [token_id(tokenizer, f"<|{turn.role}|>")] if turn.role in _ROLES else []
        after = [] if turn.role == "prompt" else [end]
        ids += [*before, *spoken, *after]
        learned += [False] * len(before) + [turn.role in ("text", "assistant")] * len([*spoken, *after])
    return ids, learned
