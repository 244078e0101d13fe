"""Special tokens: where a checkpoint's config.json and its tokenizer disagree, and which of the two is right.

Released configs are wrong in known ways. Retrofits keep Huginn's ids (65504, 65505, 65509), which are ordinary words of a
Llama or OLMo vocabulary, or lie beyond TinyLlama's. Ouro's base configs end at id 0 (end of text) though their chat format
ends a turn with id 2, so that a chat runs on (docs/families.md, sections 2 and 4, problems 7 and 16 of section 7).

The rule, and why:
- An id beyond the vocabulary names nothing: it is dropped. (-1 is how some configs write "none".)
- Beginning of sequence and padding are one token each, and the tokenizer wrote the training texts: what it declares is used.
- Several tokens may end a text: the config's stay, unless the tokenizer declares special tokens and has an ordinary word
  there. What the tokenizer declares is added, and what generation_config.json lists, if the tokenizer has control tokens
  there; and the token that closes a turn, if the chat template writes it.
- Where the tokenizer declares no special tokens at all there is no evidence, and nothing is changed or made up.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loopscope.errors import CheckpointError, SpecialTokenNotice
from loopscope.models.config import LoopedConfig, as_ids

if TYPE_CHECKING:
    from loopscope.text import TextFiles

# How chat formats close a turn. Only what a checkpoint's own template writes counts.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_turn|>", "<end_of_turn>", "<|eot|>", "<|end|>", "<|eom_id|>")


def settle(config: LoopedConfig, tokenizer: Any, files: TextFiles, source: str) -> LoopedConfig:
    """The config with the special tokens to use. Warns (SpecialTokenNotice) of every one that is not what config.json says."""
    tokens = _Tokens(config.vocab_size, tokenizer, files)
    bos, why_bos = _single("bos", config.bos, tokens)
    pad, why_pad = _single("pad", config.pad, tokens)
    eos, why_eos = _several(config.eos, tokens)
    changes = [f"{name}_token_id {_shown(old)} is now {_shown(new)}: {why}"
               for name, old, new, why in (("bos", config.bos, bos, why_bos), ("eos", config.eos, eos, why_eos),
                                           ("pad", config.pad, pad, why_pad)) if why and old != new]
    if not changes:
        return replace(config, bos=bos, eos=eos, pad=pad)
    warnings.warn(f"{source}: config.json's special tokens are not its tokenizer's. {'. '.join(changes)}.", SpecialTokenNotice,
                  stacklevel=4)
    return replace(config, bos=bos, eos=eos, pad=pad)


class _Tokens:
    """What the tokenizer and the files beside it say about ids."""

    def __init__(self, vocab_size: int, tokenizer: Any, files: TextFiles) -> None:
        self.vocab_size, self.tokenizer, self.files = vocab_size, tokenizer, files
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self.control = {i: token.content for i, token in added.items() if i < vocab_size}
        self.declared = {name: found for name in ("bos", "eos", "pad") if (found := self._declared(name))}

    def _declared(self, name: str) -> tuple[int, str] | None:
        """(id, where it is declared)."""
        found = self.files.token(name)
        if found is None or self.tokenizer is None:
            return None
        token, file = found
        index = self.tokenizer.token_to_id(token)
        return None if index is None or index >= self.vocab_size else (index, f"{file} has {token!r}")

    def wrong(self, index: int) -> str:
        """Why an id cannot be a special token; "" if nothing speaks against it."""
        if not 0 <= index < self.vocab_size:
            return f"{index} is outside the vocabulary of {self.vocab_size}"
        if self.declared and index not in self.control and index not in [i for i, _ in self.declared.values()]:
            return f"{index} is {self.tokenizer.id_to_token(index)!r}, an ordinary token"
        return ""

    def turn_ends(self) -> dict[int, str]:
        """Tokens that close a turn in the chat template."""
        text = "".join(self.files.templates.values())
        return {i: f"the chat template closes turns with {token!r}" for i, token in self.control.items()
                if token in TURN_ENDS and token in text}


def _single(name: str, old: int | None, tokens: _Tokens) -> tuple[int | None, str]:
    """(id to use, why it is not the config's)."""
    old = None if old == -1 else old
    against = "" if old is None else tokens.wrong(old)
    if name in tokens.declared and tokens.declared[name][0] != old:
        new, where = tokens.declared[name]
        return new, " and ".join(filter(None, (against, where)))
    return (None, against) if against else (old, "")


def _several(old: tuple[int, ...], tokens: _Tokens) -> tuple[tuple[int, ...], str]:
    """As _single, for all the tokens that end a text."""
    against = {i: why for i in old if i != -1 and (why := tokens.wrong(i))}
    kept = [i for i in old if i != -1 and i not in against]
    extra = dict([tokens.declared["eos"]] if "eos" in tokens.declared else [])
    try:
        listed = as_ids(tokens.files.generation.get("eos_token_id"))
    except CheckpointError as error:
        raise CheckpointError(f"generation_{error}") from error  # as_ids names config.json
    extra |= {i: "generation_config.json lists it" for i in listed if i in tokens.control} | tokens.turn_ends()
    new = dict.fromkeys([*kept, *extra])
    return tuple(new), " and ".join([*against.values(), *(why for i, why in extra.items() if i not in kept)])


def _shown(ids: int | tuple[int, ...] | None) -> str:
    if isinstance(ids, tuple):
        return str(ids[0]) if len(ids) == 1 else str(list(ids)) if ids else "none"
    return "none" if ids is None else str(ids)
