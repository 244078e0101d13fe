"""Text in, text out: the tokenizer that comes with a model, under TransformerLens's method names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from loopscope.chat import render, templates_of
from loopscope.errors import CheckpointError, PromptError
from loopscope.models.tensors import read_json

# What a checkpoint may hold beside config and weights that says how text becomes tokens, and when to stop.
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
              "generation_config.json")
_MOST = 2**26  # bytes of one such file


@dataclass(frozen=True)
class TextFiles:
    """What a checkpoint's small files say about text. raw: their bytes by name, so that they can be saved as they came."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    special: Mapping[str, Any] = field(default_factory=dict)  # special_tokens_map.json
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    templates: Mapping[str, str] = field(default_factory=dict)  # chat templates by name
    raw: Mapping[str, bytes] = field(default_factory=dict)

    def token(self, name: str) -> tuple[str, str] | None:
        """The text of a special token ("bos", "eos", "pad", "unk") and the file that declares it, or None."""
        for file, values in (("tokenizer_config.json", self.settings), ("special_tokens_map.json", self.special)):
            value = values.get(f"{name}_token")
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str):
                return value, file
        return None


def read_text_files(folder: Path) -> TextFiles:
    """Raises CheckpointError for one that is damaged, or too large to be what its name says."""
    raw: dict[str, bytes] = {}
    for name in TEXT_FILES:
        path = folder / name
        if path.is_file():
            if path.stat().st_size > _MOST:
                raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes; at most {_MOST:,} are read")
            raw[name] = path.read_bytes()

    def read(name: str) -> dict:
        return read_json(folder / name) if name in raw else {}

    try:
        jinja = raw["chat_template.jinja"].decode() if "chat_template.jinja" in raw else None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{folder / 'chat_template.jinja'} is not text: {error}") from error
    settings = read("tokenizer_config.json")
    try:
        templates = templates_of(jinja, read("chat_template.json"), settings)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return TextFiles(settings, read("special_tokens_map.json"), read("generation_config.json"), templates, raw)


def load_tokenizer(folder: Path):
    """The folder's tokenizer.json as a `tokenizers.Tokenizer`, or None if it has none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # settings of a training run that some files carry along; a prompt is never cut silently
        tokenizer.no_padding()
        return tokenizer
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error


class TextMixin:
    """Text for anything with `.tokenizer`, `.config`, `.device` and `.core`."""

    tokenizer: Any
    text_files: TextFiles = TextFiles()

    def _need_tokenizer(self):
        if self.tokenizer is None:
            raise PromptError("this model came without a tokenizer.json; pass token ids instead of text")
        return self.tokenizer

    def to_tokens(self, text: str | Sequence[str], prepend_bos: bool = True, padding_side: str | None = None) -> torch.Tensor:
        """Token ids [batch, n], the beginning-of-sequence token first where the model has one.

        padding_side: "left" or "right" pads texts to the longest one, with the pad token or, without one, the first
        end-of-sequence token. None, the default, refuses texts of different lengths: a padded batch means nothing without its
        mask (to_tokens_and_mask).
        """
        rows = self._encode(text, prepend_bos)
        lengths = sorted({len(row) for row in rows})
        if padding_side not in (None, "left", "right"):
            raise PromptError(f"padding_side must be 'left', 'right' or None, got {padding_side!r}")
        if len(lengths) > 1 and padding_side is None:
            raise PromptError(f"texts of different lengths ({lengths} tokens) cannot be batched without padding; use "
                              "to_tokens_and_mask, or padding_side='left'")
        if len(lengths) > 1:
            pad = self._pad_id()
            rows = [[pad] * (lengths[-1] - len(row)) + row if padding_side == "left" else row + [pad] * (lengths[-1] - len(row))
                    for row in rows]
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def to_tokens_and_mask(self, texts: Sequence[str], prepend_bos: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Texts padded on the left: ids [batch, n], and the mask [batch, n] (int64) that `forward` takes, 1 for tokens, 0 for pads."""
        lengths = torch.tensor([len(row) for row in self._encode(texts, prepend_bos)])
        tokens = self.to_tokens(texts, prepend_bos, "left")
        n = tokens.shape[1]
        return tokens, (torch.arange(n) >= n - lengths[:, None]).long().to(tokens.device)

    def to_string(self, tokens: torch.Tensor | Sequence) -> str | list[str]:
        """Text of [n] ids, special tokens and all, as TransformerLens gives it; of [batch, n] ids a list of texts."""
        return self._decode(tokens, False)

    def to_text(self, tokens: torch.Tensor | Sequence) -> str | list[str]:
        """to_string without special tokens: what a reader of the model's answer sees."""
        return self._decode(tokens, True)

    def _decode(self, tokens: torch.Tensor | Sequence, skip: bool) -> str | list[str]:
        tokenizer = self._need_tokenizer()
        ids = torch.as_tensor(tokens).tolist()
        if ids and isinstance(ids, list) and isinstance(ids[0], list):
            return [tokenizer.decode(i, skip_special_tokens=skip) for i in ids]
        return tokenizer.decode(ids if isinstance(ids, list) else [ids], skip_special_tokens=skip)

    def to_str_tokens(self, text: str | Sequence | torch.Tensor, prepend_bos: bool = True) -> list:
        """One string per token; of a list of texts a list of such lists. Also of ids [n] or [1, n].

        A byte that is not text by itself shows as the replacement character.
        """
        tokenizer = self._need_tokenizer()
        if isinstance(text, str):
            ids = self._encode(text, prepend_bos)[0]
        elif isinstance(text, (list, tuple)) and text and isinstance(text[0], str):
            return [self.to_str_tokens(t, prepend_bos) for t in text]
        else:
            tokens = torch.as_tensor(text)
            if tokens.ndim > 1 and tokens.numel() != tokens.shape[-1]:
                raise PromptError(f"to_str_tokens takes one sequence of ids, got shape {list(tokens.shape)}; call it for each row")
            ids = tokens.reshape(-1).tolist()
        return [tokenizer.decode([i], skip_special_tokens=False) for i in ids]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, tokenize: bool = True,
                            template: str = "default", **variables: Any) -> Any:
        """A conversation as the model was trained to read it: ids [n], or with tokenize=False the text.

        messages: [{"role": "user", "content": "Hello"}, ...]. add_generation_prompt: end with what opens the model's own turn.
        The ids hold what the template wrote, no more: where it begins with the beginning-of-sequence token, do not prepend
        another to the text. template: its name, where a checkpoint has several. variables: what else it reads, such as
        tools or enable_thinking. Raises PromptError where there is no such template, or it fails (loopscope/chat.py).
        """
        files = self.core.text_files
        if template not in files.templates:
            if files.templates:
                raise PromptError(f"this model came without a chat template {template!r}; it has {', '.join(map(repr, files.templates))}")
            raise PromptError("this model came without a chat template; write the prompt as text, in the form that its card describes")
        names = {f"{name}_token": found[0] for name in ("bos", "eos", "pad", "unk") if (found := files.token(name))}
        text = render(files.templates[template], messages, add_generation_prompt, names | variables)
        return torch.tensor(self._encode(text, False)[0], dtype=torch.long, device=self.device) if tokenize else text

    def _encode(self, text: str | Sequence[str], prepend_bos: bool) -> list[list[int]]:
        tokenizer = self._need_tokenizer()
        texts = [text] if isinstance(text, str) else list(text)
        if not texts:
            raise PromptError("there is no text; give at least one")
        bos = [self.config.bos] if prepend_bos and self.config.bos is not None else []
        try:
            return [bos + tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        except TypeError as error:  # a lone surrogate is a str to Python, but not text
            raise PromptError(f"the prompt is not valid Unicode text: {error}") from error

    def _pad_id(self) -> int:
        config = self.config
        if config.pad is None and not config.eos:
            raise PromptError("texts of different lengths need a pad token, and this model has neither that nor an end-of-sequence token; "
                              "pass them one by one")
        return config.eos[0] if config.pad is None else config.pad

    def prompt_tokens(self, prompt: str | list[int] | torch.Tensor) -> torch.Tensor:
        """Text, a list of ids or a 1-d tensor -> ids [n]. Raises PromptError for an empty or impossible prompt."""
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty; give at least one token of text")
            tokens = self.to_tokens(prompt)[0]
        elif isinstance(prompt, (list, tuple)) and prompt and (
                isinstance(prompt[0], (str, list, tuple)) or isinstance(prompt[0], torch.Tensor) and prompt[0].ndim):
            raise PromptError(f"a prompt is one text or one list of token ids, got a list of {len(prompt)}: generate_batch decodes several "
                              "prompts together, generate takes one of them")
        else:
            try:
                tokens = torch.as_tensor(prompt)
                tokens = tokens.long() if tokens.numel() == 0 else tokens
            except (TypeError, ValueError, RuntimeError) as error:
                raise PromptError(f"a prompt is text, a list of token ids or a 1-d tensor; got {type(prompt).__name__}: {error}") from error
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise PromptError(f"token ids are whole numbers, got {tokens.dtype}; a mask or probabilities passed by mistake?")
        if tokens.ndim != 1:
            raise PromptError(f"a prompt is one sequence: text, a list of ids or a 1-d tensor, got shape {list(tokens.shape)}")
        if len(tokens) == 0:
            raise PromptError("the prompt is empty; give at least one token")
        return self.core.as_tokens(tokens)[0]
