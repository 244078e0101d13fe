"""Text as it is committed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from decoders.calls import Steps, advance
from decoders.generation import Generation
from loopscope.errors import SettingError
from loopscope.tap import Hooks, tapped

if TYPE_CHECKING:
    from decoders.session import Session
    from loopscope.cache import DepthCache

_PARTIAL = "\ufffd"  # what the first bytes of a character decode to until the rest has come


class Stream(Iterator[str]):
    """An iterator over pieces of committed text; together they are the text that `generate` returns.

    Text that could still turn into a stop string or a longer character is held back until it is decided. Stop iterating
    whenever you like: `tokens` are the committed new tokens, `cache` holds the K/V of all committed positions but the newest
    (`cache.length` = prompt + tokens - 1) and can be continued from, and `result()` is the Generation so far. Iterating on resumes.
    Hooks act only while a piece is being made. An error or Ctrl-C inside a piece ends the stream, and all this still holds.
    """

    def __init__(self, decoder: Any, session: Session, steps: Steps, fwd_hooks: Hooks = (), hook_drafts: bool = False) -> None:
        if session.core.tokenizer is None:
            raise SettingError("stream gives text, and this model came without a tokenizer; use generate with token ids")
        self._decoder, self._session, self._hooks = decoder, session, (fwd_hooks, hook_drafts)
        self._advance: Iterator[None] | None = advance(session, steps)
        self._given = ""
        self._check_hooks()

    def _check_hooks(self) -> None:
        with tapped(self._session.model, *self._hooks, self._session.depth):  # a wrong hook name is said before any work
            pass

    @property
    def tokens(self) -> list[int]:
        """The new tokens committed so far."""
        return self._session.new_tokens

    @property
    def cache(self) -> DepthCache:
        return self._session.cache

    @property
    def finished(self) -> bool:
        """Whether the text has ended by itself: at its limit, an EOS or a stop string."""
        return self._session.finished

    def result(self) -> Generation:
        """What has been committed so far. Raises SettingError before the first piece."""
        if not self.tokens:
            raise SettingError("nothing has been decoded yet; take a piece from the stream first")
        return self._session.result(self._decoder)

    def close(self) -> None:
        """End the stream here; what was committed stays."""
        self._advance = None

    @torch.inference_mode()
    def __next__(self) -> str:
        while self._advance is not None:
            session = self._session
            try:
                with tapped(session.model, *self._hooks, session.depth) as session.tap:
                    next(self._advance)
            except StopIteration:
                self._advance = None
            except BaseException:
                self._advance = None
                if session.new_tokens:  # broken off between a token and its K/V: both are there, so let them agree
                    session.cache.commit(len(session.tokens) - 1)
                raise
            finally:
                session.tap = None
            piece = self._text()[len(self._given) :]
            if piece:
                self._given += piece
                return piece
        raise StopIteration

    def _text(self) -> str:
        """The committed text, without an end that is not decided yet."""
        session = self._session
        text = session.core.to_text(session.new_tokens)
        cuts = [text.index(s) for s in session.stop if s in text]
        if cuts:
            return text[: min(cuts)]
        if session.finished:
            return text
        text = text.rstrip(_PARTIAL)
        for s in session.stop:
            held = next((n for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n])), 0)
            text = text[: len(text) - held] if held else text
        return text if text.startswith(self._given) else self._given
