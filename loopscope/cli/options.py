"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A shipped model's name (tiny-huginn, tiny-ouro), a folder or a Hub id.")]
Task = Annotated[str, typer.Option(help="Built-in held-out prompts to use: maths (worked problems) or code (Python).")]
Count = Annotated[int, typer.Option("--prompts", min=1, help="How many of them. Intervals are over prompts, so more is narrower.")]
Texts = Annotated[list[str] | None, typer.Option("--prompt", help="Your own text instead of the built-in prompts; may be repeated.")]
OutMaybe = Annotated[str | None, typer.Option("--out", help="Save tables and figures in this new folder.")]
SuiteFile = Annotated[str | None, typer.Option("--suite", metavar="FILE", help="Prompts from a file of JSON lines instead: GSM8K, "
                                               "MATH-500, HumanEval, MBPP, Spec-Bench, plain texts or chats (docs/suites.md).")]
SuiteFormat = Annotated[str | None, typer.Option(metavar="NAME", help="Its format. Default: seen from the fields of its first line.")]
Limit = Annotated[int | None, typer.Option(help="With --suite: at most so many prompts. Default: all.")]
Shots = Annotated[int | None, typer.Option(help="With --suite: worked examples before each question, from the file's first rows.")]
Truncate = Annotated[str | None, typer.Option(metavar="left", help="With --suite: cut prompts that are too long on the left. "
                                              "Default: refuse them.")]
Start = Annotated[str, typer.Option(help="Start state of the loop: keyed (the checkpoint's own random draw, fixed per seed and position) "
                                         "or zero. Models without a start state ignore it.")]
Depth = Annotated[int | None, typer.Option(help="Full depth T: recurrences per token. Default: the model's own.")]
Seed = Annotated[int, typer.Option(help="Keys the start state, the bootstrap and every other draw.")]
Positions = Annotated[int, typer.Option("--positions", min=1, help="At most so many positions per prompt, evenly spread.")]
Grid = Annotated[bool, typer.Option("--grid", help="Also read keys and values at every pair of depths.")]
Decoder = Annotated[str, typer.Option(metavar="NAME", help="ar (plain, all T recurrences per token), dtv (draft a block, then verify it), "
                                      "wfd (wavefront: tokens a few recurrences apart run together), loopspec (a wave that may propose "
                                      "twice), das-wave (refine a block of guesses, then verify), pld (copy what followed the same words "
                                      "before), or a label from a table, such as 'DtV d=1 K=8 deep_kv'.")]
Decoders = Annotated[list[str] | None, typer.Option("--decoder", metavar="NAME", help="Decoders to compare with ar: names or labels; may "
                                                    "be repeated. Default: a common setting of each.")]
Read = Annotated[str | None, typer.Option(help="dtv, das-wave: depth at which drafts read the prefix: aligned, deep_v, deep_k, deep_kv.")]
Compare = Annotated[bool, typer.Option("--compare", help="Also decode with ar, compare the tokens, and say how much faster it was.")]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda (under torchrun, each process its own card), cuda:1, or auto: "
                                            "blocks spread over all cards, for a model larger than one. Default: cpu.")]
DType = Annotated[str | None, typer.Option("--dtype", help="float32 (default), bfloat16, float16 or float64.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads. One is fastest for the shipped models: they are small.")]
