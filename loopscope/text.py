"""Text in, text out: the tokenizer that comes with a model, under TransformerLens's method names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from loopscope.errors import CheckpointError, PromptError

# What a checkpoint may hold beside config and weights that says how text becomes tokens, and when to stop.
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
              "generation_config.json")


def load_tokenizer(folder: Path):
    """The folder's tokenizer.json as a `tokenizers.Tokenizer`, or None if it has none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error


class TextMixin:
    """to_tokens, to_string and to_str_tokens for anything with `.tokenizer`, `.config` and `.device`."""

    tokenizer: Any

    def _need_tokenizer(self):
        if self.tokenizer is None:
            raise PromptError("this model came without a tokenizer.json; pass token ids instead of text")
        return self.tokenizer

    def to_tokens(self, text: str | list[str], prepend_bos: bool = True) -> torch.Tensor:
        """Token ids [batch, n]. A list of texts must tokenize to one length: padding is not supported yet."""
        tokenizer = self._need_tokenizer()
        texts = [text] if isinstance(text, str) else list(text)
        bos = [self.config.bos] if prepend_bos and self.config.bos is not None else []
        try:
            ids = [bos + tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        except TypeError as error:  # a lone surrogate is a str to Python, but not text
            raise PromptError(f"the prompt is not valid Unicode text: {error}") from error
        if len({len(i) for i in ids}) > 1:
            raise PromptError(f"texts of different lengths ({sorted({len(i) for i in ids})} tokens) cannot be batched without padding")
        return torch.tensor(ids, dtype=torch.long, device=self.device)

    def to_string(self, tokens: torch.Tensor | list[int]) -> str | list[str]:
        """Text of [n] ids; of [batch, n] ids a list of texts. Special tokens are left out."""
        tokenizer = self._need_tokenizer()
        ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
        if ids and isinstance(ids[0], list):
            return [tokenizer.decode(i) for i in ids]
        return tokenizer.decode(ids)

    def to_str_tokens(self, text: str | torch.Tensor | list[int], prepend_bos: bool = True) -> list[str]:
        """One string per token; a byte that is not text by itself shows as the replacement character."""
        tokenizer = self._need_tokenizer()
        ids = self.to_tokens(text, prepend_bos)[0].tolist() if isinstance(text, str) else torch.as_tensor(text).reshape(-1).tolist()
        return [tokenizer.decode([i], skip_special_tokens=False) for i in ids]

    def prompt_tokens(self, prompt: str | list[int] | torch.Tensor) -> torch.Tensor:
        """Text, a list of ids or a 1-d tensor -> ids [n]. Raises PromptError for an empty or impossible prompt."""
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty; give at least one token of text")
            tokens = self.to_tokens(prompt)[0]
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
