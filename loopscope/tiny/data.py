"""The training stream and the validation sets, as token tensors.

A batch is a pure function of (seed, step): resuming needs no stored position in the stream, and any step can be
looked at again. A row is filled with whole documents, each opened by a begin token and closed by an end token, and cut at its end.
"""

from __future__ import annotations

import random
from functools import cached_property

import tokenizers
import torch
from torch import Tensor

from loopscope.tiny import corpus, tasks
from loopscope.tiny import tokenizer as tok

#: Share of each kind among the tokens of a batch.
MIX = {"worked": 0.45, "direct": 0.15, "code": 0.40}
#: Target of a position that carries no loss.
IGNORE = -100


def tokenizer_texts(seed: int = 0) -> list[str]:
    """The texts the tokenizer learns from: training code and a matching amount of training problems."""
    rng = random.Random(f"tokenizer {seed}")
    code = [corpus.window(text, rng, 2000, 8000) for text in corpus.documents(held_out=False).values()]
    maths = ["".join(tasks.draw(rng, kind)[:2]) for kind in ("worked", "worked", "direct") for _ in range(2000)]
    return code + maths


class Stream:
    """Training batches: ``stream.batch(step) -> (inputs, targets)``, both [rows, length]."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, seed: int, rows: int, length: int):
        self.tokenizer, self.seed, self.rows, self.length = tokenizer, seed, rows, length
        self.bos, self.eos, _ = tok.special_ids(tokenizer)

    @cached_property
    def _code(self) -> tuple[list[str], list[int]]:
        texts = list(corpus.documents(held_out=False).values())
        return texts, [len(t) for t in texts]

    def document(self, kind: str, rng: random.Random) -> list[int]:
        """One document's tokens, begin and (where the document does end) end included."""
        if kind == "code":
            texts, sizes = self._code
            module = rng.choices(texts, sizes)[0]
            text = corpus.window(module, rng)
            ends = module.endswith(text)  # a window that stops in mid-file has no end to learn
        else:
            problem = tasks.draw(rng, kind)
            text, ends = problem.prompt + problem.answer, True
        return [self.bos, *self.tokenizer.encode(text).ids, *([self.eos] if ends else [])]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step: inputs and next-token targets."""
        rng = random.Random(f"batch {self.seed} {step}")
        used = dict.fromkeys(MIX, 0)
        rows = []
        for _ in range(self.rows):
            row: list[int] = []
            while len(row) < self.length + 1:
                # the kind furthest behind its share comes next (documents differ in length); ties by chance
                kind = min(MIX, key=lambda k: (used[k] / MIX[k], rng.random()))
                document = self.document(kind, rng)
                row += document
                used[kind] += len(document)
            rows.append(row[: self.length + 1])
        tokens = torch.tensor(rows)
        # where the next document begins is not the model's to predict
        targets = tokens[:, 1:].masked_fill(tokens[:, 1:].eq(self.bos), IGNORE)
        return tokens[:, :-1], targets


class Validation:
    """Held-out documents, one per row, padded at the end; ``targets`` are IGNORE where nothing is counted."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, seed: int = 0, length: int = 256):
        self.tokenizer, self.seed, self.length = tokenizer, seed, length
        self.bos, self.eos, self.pad = tok.special_ids(tokenizer)

    def _rows(self, pairs: list[tuple[str, str]], ends: bool = True) -> tuple[Tensor, Tensor]:
        """Rows of prompt and counted text (and the end token, if the text ``ends``)."""
        inputs = torch.full((len(pairs), self.length), self.pad)
        targets = torch.full((len(pairs), self.length), IGNORE)
        for i, (prompt, text) in enumerate(pairs):
            head = [self.bos, *self.tokenizer.encode(prompt).ids]
            ids = [*head, *self.tokenizer.encode(text).ids, *[self.eos] * ends][: self.length + 1]
            inputs[i, : len(ids) - 1] = torch.tensor(ids[:-1])
            targets[i, len(head) - 1 : len(ids) - 1] = torch.tensor(ids[len(head) :])
        longest = int(inputs.ne(self.pad).sum(1).max())
        return inputs[:, :longest], targets[:, :longest]

    def code(self, n: int) -> tuple[Tensor, Tensor]:
        """``n`` windows of held-out modules; every token is counted."""
        rng = random.Random(f"held-out code {self.seed}")
        texts = list(corpus.documents(held_out=True).values())
        windows = [corpus.window(t, rng, 500, 1000) for t in rng.choices(texts, [len(t) for t in texts], k=n)]
        return self._rows([("", text) for text in windows], ends=False)

    def maths(self, n: int) -> tuple[Tensor, Tensor]:
        """``n`` held-out worked problems; the answer's tokens are counted."""
        rng = random.Random(f"held-out worked {self.seed}")
        problems = [tasks.draw(rng, "worked", held_out=True) for _ in range(n)]
        return self._rows([(p.prompt, p.answer) for p in problems])

    def problems(self, kind: str, n: int) -> list[tasks.Problem]:
        """Up to ``n`` different held-out problems of each task and difficulty (easy cells have few questions)."""
        rng = random.Random(f"held-out cells {kind} {self.seed}")
        problems: list[tasks.Problem] = []
        for task, difficulty in tasks.every_cell(kind):
            cell: dict[str, tasks.Problem] = {}
            for _ in range(20 * n):
                if len(cell) < n:
                    problem = tasks.make(task, difficulty, rng, held_out=True)
                    cell[problem.prompt] = problem
            problems += cell.values()
        return problems

    def cells(self, kind: str, n: int) -> tuple[Tensor, Tensor, list[tasks.Problem]]:
        """``problems(kind, n)`` as rows; the whole answer is counted."""
        problems = self.problems(kind, n)
        return *self._rows([(p.prompt, p.answer) for p in problems]), problems

    def direct(self, n: int) -> tuple[Tensor, Tensor, list[tasks.Problem]]:
        """``problems("direct", n)`` as rows; only the token that is the answer is counted."""
        problems = self.problems("direct", n)
        # where the blank in " 7." is a token of its own it belongs to the prompt
        pairs = []
        for p in problems:
            blank = " " if self.tokenizer.encode(p.answer).tokens[0] == "Ġ" else ""
            pairs.append((p.prompt + blank, p.answer.removeprefix(blank)))
        inputs, targets = self._rows(pairs)
        counted = targets != IGNORE
        first = counted & (counted.cumsum(1) == 1)
        return inputs, targets.masked_fill(~first, IGNORE), problems
