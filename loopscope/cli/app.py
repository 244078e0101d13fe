"""The commands and what their help teaches. What they do is in the modules beside this one."""

from __future__ import annotations

from typing import Annotated

import typer

from loopscope.cli.guard import guarded
from loopscope.cli.options import (
    Compare, Count, DType, Decoder, Decoders, Depth, Device, Grid, Limit, Model, OutMaybe, Positions, Read, Seed, Shots, Start,
    SuiteFile, SuiteFormat, Task, Texts, Threads, Truncate,
)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Look inside looped language models, and decode them fast and losslessly.

    A looped model applies one block of layers T times for every token: its recurrence depth. loopscope shows what changes
    from one recurrence to the next (probe), what happens when a shallow draft reads what deeper recurrences left in the
    cache (intervene), and decodes several tokens at once from drafts that were read early (decode), token for token as
    plain decoding would.

    Start with:  loopscope report --quick --out runs/first

    MODEL is a shipped model (loopscope models), a folder with config.json and safetensors files, or a Hub id
    (organisation/name), which is fetched first.""")

def _version(wanted: bool) -> None:
    if wanted:
        from loopscope import __version__

        typer.echo(f"loopscope {__version__}")
        raise typer.Exit()


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False) -> None:
    pass


@app.command(short_help="The whole way from probes to speedups, as one page.")
@guarded
def report(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="Default: all shipped models.")] = None,
    out: Annotated[str, typer.Option(help="The run folder to make. It must not exist yet.")] = "runs/report",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and shorter texts: under three minutes, wider intervals.")] = False,
    published: Annotated[bool, typer.Option("--published", help="Lay the papers' own values over the figures, as marks of their "
                                            "own.")] = False,
    seed: Seed = 0,
    threads: Threads = 1,
) -> None:
    """Probe, intervene, plan, decode and draw: the whole way, on one page.

    For every model, on maths and on code: how fast queries, keys, values and the state settle with recurrence depth
    (convergence), what the model would say if it stopped early (depth lens), what a shallow draft gains or loses by reading
    the prefix's values or keys at full depth (prefix channels; "Mature-V" is the claim that values help), which decoder and
    schedule should follow from that (plan), and what it then did (benchmark: calls, accepted drafts, seconds, tokens compared
    with plain decoding).

    The folder holds report.html (open it in a browser; it needs no network), manifest.json, tables/*.parquet and figures/*;
    predictions/* are what the plan promised before any decoder was timed, findings/* what each plan was made of (docs/tables.md).
    It appears under its name only when it is complete; Ctrl-C leaves nothing behind.
    """
    from loopscope.cli.report import write_run

    typer.echo(write_run(models or [], out, quick=quick, seed=seed, threads=threads, published=published))


@app.command(short_help="What changes with recurrence depth.")
@guarded
def probe(model: Model, task: Task = "maths", prompts: Count = 8, prompt: Texts = None, out: OutMaybe = None, start: Start = "keyed",
          depth: Depth = None,
          new_tokens: Annotated[int, typer.Option("--new-tokens", min=0, help="Greedy tokens that continue each prompt before it is "
                                                  "read. 0: the prompt alone.")] = 0,
          only: Annotated[str | None, typer.Option(metavar="NAME,...", help="These probes instead: convergence, depth_lens, "
                                                   "second_candidate, agreement_runs, block_lens, trajectories, layer_fixed_points, "
                                                   "head_stability, depth_similarity, token_grid, "
                                                   "attribution, head_attribution, linear_probe, patching; or all.")] = None,
          suite: SuiteFile = None, suite_format: SuiteFormat = None, limit: Limit = None, shots: Shots = None, truncate: Truncate = None,
          seed: Seed = 0, device: Device = None, dtype: DType = None, threads: Threads = 1) -> None:
    """What changes with recurrence depth.

    Two probes. Convergence: how near the queries, keys, values, attention outputs and the state of depth r are to those of
    full depth (cosine and relative L2), beside three nulls that say how much of it means nothing. Depth lens: the model's
    output if it stopped at depth r: how often its first choice is already the final one (agreement), and how far its
    distribution still is (KL, in nats).

    Others with --only, each described in docs/howto/probe.md: second candidates and runs of agreement, the rank of the final
    token after every block, where the state and every block come to rest, heads, which component or head makes the logit, what
    a linear map reads off the state, and activation patching. The last two work on built-in sums, whatever the prompts are.

    Under torchrun each process measures its share of the prompts; loopscope merge puts them together (docs/howto/scale.md).
    """
    from loopscope.cli.study import run_probe
    from loopscope.cli.suite import texts_or_suite

    texts, _ = texts_or_suite(prompt, suite, suite_format, limit, shots, truncate, new_tokens + 1)
    run_probe(model, task=task, count=prompts, texts=texts, out=out, start=start, depth=depth, new_tokens=new_tokens, seed=seed,
              threads=threads, device=device, dtype=dtype, only=only)


@app.command(short_help="What a draft gains by reading the prefix deeper.")
@guarded
def intervene(model: Model, task: Task = "maths", prompts: Count = 8, prompt: Texts = None, out: OutMaybe = None, start: Start = "keyed",
              depth: Depth = None,
              new_tokens: Annotated[int, typer.Option("--new-tokens", min=0, help="Greedy tokens that continue each prompt; drafts are "
                                                      "judged there. 0: on the prompt itself.")] = 48,
              positions: Positions = 96, grid: Grid = False,
              draft_depth: Annotated[int, typer.Option(min=1, help="Recurrences of the draft in the grid.")] = 1,
              suite: SuiteFile = None, suite_format: SuiteFormat = None, limit: Limit = None, shots: Shots = None,
              truncate: Truncate = None, seed: Seed = 0, device: Device = None, dtype: DType = None, threads: Threads = 1) -> None:
    """What happens if a shallow draft reads the prefix at another depth.

    A draft that has run d of T recurrences attends to the prefix: by default to the keys and values that the prefix had at
    the same depth (aligned). Here it reads the prefix's values (deep_v, "Mature-V"), keys (deep_k) or both (deep_kv) at full
    depth instead. Agreement: how often the draft's token is the full-depth token. Effects are paired differences to aligned
    with bootstrap intervals over prompts; controls read shuffled values, another prompt's values, and noise.

    Under torchrun each process measures its share of the prompts; loopscope merge puts them together (docs/howto/scale.md).
    """
    from loopscope.cli.study import run_intervene
    from loopscope.cli.suite import texts_or_suite

    texts, _ = texts_or_suite(prompt, suite, suite_format, limit, shots, truncate, new_tokens + 1)
    run_intervene(model, task=task, count=prompts, texts=texts, out=out, start=start, depth=depth, new_tokens=new_tokens,
                  positions=positions, grid=grid, draft_depth=draft_depth, seed=seed, threads=threads, device=device, dtype=dtype)


@app.command(short_help="Continue prompts with any decoder.")
@guarded
def decode(
    model: Model,
    prompt: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Text to continue. Several are decoded together, as one batch.")],
    decoder: Decoder = "wfd",
    max_new_tokens: Annotated[int, typer.Option(help="Stop after so many new tokens.")] = 64,
    depth: Depth = None,
    draft_depth: Annotated[int | None, typer.Option(help="dtv, wfd, loopspec: recurrences before a token is drafted.")] = None,
    block: Annotated[int | None, typer.Option(help="dtv, pld: drafts per block.")] = None,
    redraft: Annotated[int | None, typer.Option(help="wfd: draft anew each so many recurrences; never by default.")] = None,
    second_depth: Annotated[int | None, typer.Option(help="loopspec: recurrences before a second token may be proposed.")] = None,
    gate: Annotated[float | None, typer.Option(help="loopspec: propose it only where its probability is at least this.")] = None,
    rounds: Annotated[int | None, typer.Option(help="das-wave: rounds of refinement, J.")] = None,
    updates: Annotated[int | None, typer.Option(help="das-wave: recurrences per round, k.")] = None,
    growth: Annotated[int | None, typer.Option(help="das-wave: positions that join per round.")] = None,
    stable: Annotated[int | None, typer.Option(help="das-wave: verify after so many rounds without a change; never by default.")] = None,
    read: Read = None,
    slots: Annotated[int | None, typer.Option(help="ar, wfd: K/V slots that depths share. Approximate. Default: one per depth.")] = None,
    exit: Annotated[str | None, typer.Option(metavar="RULE", help="ar, wfd: leave the loop early, as gate:0.5 or state-change:0.01. "
                                             "Lossy.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature. 0, and the default: greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the fewest tokens that hold this much probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Sample from tokens at least this times as likely as the likeliest.")] = None,
    sampler: Annotated[str | None, typer.Option(metavar="NAME", help="shared-noise (ar's text for the same seed; default) or rejection "
                                                "(another text of the same distribution).")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the text at this string; may be repeated.")] = None,
    start: Start = "keyed",
    seed: Seed = 0,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as soon as it is committed. Ctrl-C ends it.")] = False,
    compare: Compare = False,
    device: Device = None,
    dtype: DType = None,
    threads: Threads = 1,
) -> None:
    """Continue prompts with any decoder, greedily or by sampling.

    The new text goes to stdout; what it cost goes to stderr: block calls per token (plain decoding needs T), drafts accepted of
    those compared, and seconds. Decoders are lossless (they give the tokens of plain decoding) unless their label says otherwise.

    \b
    Decoders and their defaults:
      ar
      dtv       --draft-depth 1 --block 8 --read aligned
      wfd       --draft-depth 1
      loopspec  --draft-depth 1 --second-depth 2 --gate 0
      das-wave  --rounds 12 --updates 1 --growth 1 --read deep_kv
      pld       --block 8

    Settings that have no option of their own are written into the name, as tables print it:
      'DAS-Wave J=12 k=1 W=2 gamma=32 carry=off bonus=on'   W: initial width; gamma: capacity of the block
      'LoopSpec d1=1 d2=2 lanes=4'                          lanes: at most so many tokens in flight
      'PLD K=8 n=3'                                         n: longest n-gram that is looked up
    """
    from loopscope.cli.decode import run_decode

    run_decode(model, prompt, decoder, max_new_tokens=max_new_tokens, depth=depth, stop=tuple(stop or ()), start=start, seed=seed,
               compare=compare, stream=stream, threads=threads, device=device, dtype=dtype,
               sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "sampler": sampler},
               draft_depth=draft_depth, block=block, redraft=redraft, second_depth=second_depth, gate=gate, rounds=rounds, updates=updates,
               growth=growth, stable=stable, read=read, slots=slots, exit=exit)


@app.command(short_help="Time decoders against plain decoding.")
@guarded
def bench(model: Model, task: Task = "maths", prompts: Count = 8, prompt: Texts = None, out: OutMaybe = None,
          decoder: Decoders = None,
          max_new_tokens: Annotated[int | None, typer.Option(help="New tokens per prompt. Default: 64.")] = None,
          repeats: Annotated[int, typer.Option(min=1, help="Times each prompt is decoded.")] = 2,
          suite: SuiteFile = None, suite_format: SuiteFormat = None, limit: Limit = None, shots: Shots = None, truncate: Truncate = None,
          as_published: Annotated[bool, typer.Option("--as-published", help="With --suite: the shots and new tokens that the papers give, "
                                                     "or else the usual ones (docs/suites.md).")] = False,
          fresh: Annotated[bool, typer.Option("--fresh", help="Throw away what an interrupted run left for this --out.")] = False,
          all_definitions: Annotated[bool, typer.Option("--all-definitions", help="Also print the speedup by each of the definitions in "
                                                        "use.")] = False,
          plain_loop: Annotated[bool, typer.Option("--plain-loop", help="Also time a plain cached loop over the same modules, written as "
                                                   "a user of transformers would: is ar a fair baseline?")] = False,
          depth: Depth = None, start: Start = "keyed", seed: Seed = 0, device: Device = None, dtype: DType = None,
          threads: Threads = 1) -> None:
    """Time decoders against plain decoding on the same prompts: built-in ones, your own, or those of a file (--suite).

    Orders alternate, warm-up is left out, prefill is timed apart, and every output is compared with plain decoding's, token by
    token. Speedups are given with 95 % bootstrap intervals over prompts. A decoder that is approximate or lossy says so, and is also
    compared with the plain decoding that makes the same approximation.

    With --out every prompt is kept in DIR.partial as soon as it is decoded. After Ctrl-C, a kill or a power cut the same command goes
    on from there, if model, settings, prompts, code and machine are the same. Under
    torchrun each process decodes its share of the prompts; loopscope merge puts them together (docs/howto/scale.md).
    """
    from loopscope.cli.bench import run_bench
    from loopscope.cli.suite import texts_or_suite

    texts, new = texts_or_suite(prompt, suite, suite_format, limit, shots, truncate, max_new_tokens, 64, as_published)
    run_bench(model, decoder, task=task, count=prompts, texts=texts, out=out, max_new_tokens=new, repeats=repeats, depth=depth, start=start,
              seed=seed, threads=threads, plain_loop=plain_loop, fresh=fresh, all_definitions=all_definitions,
              device=device, dtype=dtype)


@app.command(short_help="DAS-Wave's eight switches: carry x deep K x deep V.")
@guarded
def factorial(model: Model, task: Task = "maths", prompts: Count = 8, prompt: Texts = None, out: OutMaybe = None,
              rounds: Annotated[int, typer.Option(help="Rounds of refinement, J.")] = 12,
              updates: Annotated[int, typer.Option(help="Recurrences per round, k.")] = 1,
              capacity: Annotated[int, typer.Option(help="Most positions in a block, gamma.")] = 32,
              initial_width: Annotated[int, typer.Option(help="Positions in the first round, W.")] = 2,
              growth: Annotated[int, typer.Option(help="Positions that join per round.")] = 1,
              bonus: Annotated[bool, typer.Option("--bonus", help="Commit one token more when a whole block is right; the paper does "
                                                  "not.")] = False,
              max_new_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 64,
              repeats: Annotated[int, typer.Option(min=1, help="Times each prompt is decoded.")] = 1,
              suite: SuiteFile = None, suite_format: SuiteFormat = None, limit: Limit = None, shots: Shots = None,
              truncate: Truncate = None, depth: Depth = None, start: Start = "keyed", seed: Seed = 0, threads: Threads = 1) -> None:
    """What carried states, deep keys and deep values each bring to DAS-Wave, and what only together.

    All eight combinations of the three switches decode the same prompts beside plain decoding. Printed are, per cell, drafts
    accepted (A) and tokens committed (G) per verification, calls and speedup, and the effects: of each switch, of each pair
    beyond the sum of the two, and of all three beyond the pairs, with paired 95 % bootstrap intervals over prompts. A model that
    injects nothing into its loop can carry nothing; it runs the four cells without carry.
    """
    from loopscope.cli.factorial import run_factorial
    from loopscope.cli.suite import texts_or_suite

    texts, _ = texts_or_suite(prompt, suite, suite_format, limit, shots, truncate, max_new_tokens)
    run_factorial(model, task=task, count=prompts, texts=texts, out=out, rounds=rounds, updates=updates, capacity=capacity,
                  initial_width=initial_width, growth=growth, bonus=bonus, max_new_tokens=max_new_tokens, repeats=repeats, depth=depth,
                  start=start, seed=seed, threads=threads)


@app.command(short_help="Hold the plan to a grid of schedules, all of them measured.")
@guarded
def grid(models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="Names, folders or Hub ids. Default: the "
                                                            "shipped models.")] = None,
         out: Annotated[str | None, typer.Option("--out", help="Save predictions, tables and the figure in this new folder.")] = None,
         task: Annotated[list[str] | None, typer.Option(help="Built-in prompts: maths or code; may be repeated. Default: both.")] = None,
         prompts: Count = 4,
         max_new_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 48,
         repeats: Annotated[int, typer.Option(min=1, help="Times each prompt is decoded; the median counts.")] = 4,
         calibrate_seconds: Annotated[float, typer.Option(help="How long to time block calls, per model.")] = 20.0,
         fresh: Annotated[bool, typer.Option("--fresh", help="Throw away what an interrupted run left for this --out.")] = False,
         seed: Seed = 0, threads: Threads = 1) -> None:
    """Predict every schedule of a fixed grid, write the predictions down, then measure every one.

    At least 40 schedules per model, of all lossless decoders, whatever the plan thinks of them. Calls and accepts come from a replay
    of the very prompts and are counted; speeds come from call times. Printed are the share of predicted speedups within 15 % of the
    measured ones, and the regret: what the plan's pick loses to the best schedule in the grid.

    Predictions carry their time (UTC) and SHA-256 and are on disk before anything is measured. After Ctrl-C or a kill the same command
    goes on from OUT.partial.
    """
    from loopscope.cli.grid import run_grid
    from loopscope.models.loading import shipped_models

    run_grid(models or shipped_models(), tasks=task or ["maths", "code"], count=prompts, out=out, max_new_tokens=max_new_tokens,
             repeats=repeats, calibrate_seconds=calibrate_seconds, fresh=fresh, seed=seed, threads=threads)


@app.command(short_help="Redraw a run from its tables.")
@guarded
def figures(folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder that `loopscope report` made, or another command's "
                                           "--out.")],
            out: Annotated[str | None, typer.Option("--out", help="Draw into this new folder. Default: redraw in place.")] = None,
            published: Annotated[bool, typer.Option("--published", help="Lay the papers' own values over the figures, as marks of "
                                                    "their own.")] = False) -> None:
    """Draw a run's figures again from its tables, and the report if it has one; no model is loaded."""
    from loopscope.cli.redraw import redraw

    typer.echo(redraw(folder, out, published))


@app.command(short_help="What a checkpoint is, without loading it.")
@guarded
def inspect(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A shipped model's name, a folder, a config.json or a Hub id.")],
    context: Annotated[int | None, typer.Option(min=1, help="Also say how much memory so many positions take.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the K/V cache: float32, bfloat16, float16 or float64.")] = "bfloat16",
) -> None:
    """Say what a checkpoint is: family, loops, layers, widths, K/V per token, and parameters by part.

    Reads the config and the headers of the weight files, never the weights. Tensors that are missing, or that the config does
    not ask for, are named.
    """
    from loopscope.inspecting import inspected

    typer.echo(inspected(source, context, dtype))


@app.command(short_help="Rewrite a checkpoint as safetensors.")
@guarded
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint folder, a Hub id or a shipped model's name.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to make. It must not exist yet, or be empty.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64. Default: as each tensor is stored.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Split what is larger into several files with an index.")] = "5GB",
) -> None:
    """Rewrite a checkpoint as safetensors, with its config and tokenizer files.

    Parcae is released as a pickle, a format that can run code when it is opened. This reads it once, with PyTorch's
    weights-only reader, and leaves a checkpoint that needs no such care. Tensors are copied bit for bit unless --dtype is
    given. OUT appears under its name only when it is complete.
    """
    from loopscope.cli.convert import run_convert

    typer.echo(run_convert(source, out, dtype=dtype, revision=revision, max_shard_size=max_shard_size))


@app.command(short_help="Prove decoders lossless, with a certificate.")
@guarded
def verify(
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="A shipped model or checkpoint folder. Default: random tiny "
                                              "models of all families.")] = None,
    decoder: Annotated[list[str] | None, typer.Option("--decoder", metavar="NAME", help="Only these decoders: names or labels; may be "
                                                      "repeated. Default: all lossless ones.")] = None,
    full: Annotated[bool, typer.Option("--full", help="5,000 generations instead of 300 (about ten minutes on one free core), or with "
                                       "--model more and longer prompts.")] = False,
    out: Annotated[str | None, typer.Option("--out", help="Save the certificate in this new folder, or as this .json file with a .parquet "
                                            "beside it.")] = None,
    case: Annotated[int | None, typer.Option(min=0, help="Run one case of a certificate again, by its number.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, for random models.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Draws other cases, or other prompts.")] = 0,
    threads: Threads = 1,
) -> None:
    """Prove decoders lossless: hold every one of them to plain decoding, and print a certificate.

    L0: in float64 on random models, over drawn families, schedules, read policies, batches of ragged prompts, limits, EOS and stop
    strings, greedy and sampled with shared noise: the tokens must be plain decoding's, the materialised keys and values equal
    after every commit, and the counted calls equal to the predicted ones. With --model, the same in float64 on that model and its
    built-in prompts, then L1 (float32: tokens equal) and L2 (bfloat16: a first difference must be a near tie).

    Exit code 1 if anything fails. Ctrl-C prints what was done so far, marked incomplete. Decoders that are not lossless are refused.
    """
    from loopscope.cli.verify import run_verify

    raise typer.Exit(run_verify(model, decoder, full=full, seed=seed, case=case, workers=workers, out=out, threads=threads))


@app.command("gpu-check", short_help="Check every decoder on a device.")
@guarded
def gpu_check(device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu ...")] = "cuda",
              toy: Annotated[bool, typer.Option("--toy", help="Random tiny models only: a minute on a CPU.")] = False,
              out: Annotated[str | None, typer.Option("--out", help="Write the JSON here instead of to stdout.")] = None,
              seed: Seed = 0) -> None:
    """Check every decoder on a device: its tokens against plain decoding, and what calls cost there.

    float64 and float32 tokens must equal plain decoding's on the same device (and, in float64, the CPU's); in bfloat16, where
    rounding depends on how many rows run together, a difference must lie where the two best tokens are nearly tied. Exit code 1
    if a check fails. Also runs from a bare source tree: python -m loopscope.gpu_check.
    """
    from loopscope.gpu_check import run

    raise typer.Exit(run(device=device, toy=toy, out=out, seed=seed))


@app.command(short_help="List the models that come with loopscope.")
@guarded
def models() -> None:
    """List the models that come with loopscope."""
    from loopscope.cli.study import list_models

    list_models()


from loopscope.cli import many  # noqa: E402, F401  its commands register themselves
