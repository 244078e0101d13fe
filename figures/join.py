"""Join: what a probe saw of a prompt against how many of its drafts were accepted, per prompt and per draft depth.

The question is whether the probes could have told which prompts decode fast. Everything comes from saved tables: a probe's value at
the depth and read policy of a decoder's drafts, and the benchmark's accepted / proposed on the same prompt. Only prompts that both
saw are used (a task's prompts have the same numbers in all tables of one run); decoders that are not lossless, or whose drafts have
no depth, are left out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

import numpy as np

from figures import intervals, marks, ratios, style
from loopscope.errors import SettingError

COLUMNS = ("model", "task", "prompt", "decoder", "depth", "policy", "probe", "value", "acceptance")
SOURCES = ("depth_lens", "prefix_channels", "convergence", "bench")  # the tables that it is made of
PROBES = {
    "agreement": "top-1 agreement at the draft depth\n(depth lens)",
    "agreement_as_read": "top-1 agreement behind the prefix,\nread as the drafts read it",
    "v_cosine": "cosine of V at the draft depth\nto depth T",
}
FEWEST = 4  # prompts for a correlation


def table(tables: Mapping):
    """The tidy join: one row per model, task, prompt, decoder and probe (columns COLUMNS). Empty where nothing meets."""
    import pandas as pd

    if "bench" not in tables or not {"proposed", "accepted"} <= set(tables["bench"]):
        return pd.DataFrame(columns=list(COLUMNS))
    bench = style.labelled(tables["bench"])
    told = ratios.fidelities(bench)
    drafts = {d: at for d in bench["decoder"].unique() if told[d] == style.LOSSLESS and (at := draft_of(d))}
    keys = ["model", "task", "prompt", "decoder"]
    counted = bench[bench["decoder"].isin(drafts)].groupby(keys, observed=True)[["proposed", "accepted"]].sum().reset_index()
    counted = counted[counted["proposed"] > 0]
    counted = counted.assign(acceptance=counted["accepted"] / counted["proposed"], depth=[drafts[d][0] for d in counted["decoder"]],
                             policy=[drafts[d][1] for d in counted["decoder"]])
    found = [counted.merge(values, on=on).assign(probe=probe) for probe, values, on in _values(tables)]
    out = pd.concat(found, ignore_index=True) if found else counted.assign(probe="", value=np.nan)[:0]
    return out[list(COLUMNS)].sort_values(["probe", *keys], kind="stable", ignore_index=True)


def draft_of(label: str) -> tuple[int, str] | None:
    """(depth, read policy) of the drafts of 'DtV d=2 K=8 deep_kv'; a round's recurrences for DAS-Wave; None without a depth."""
    family, policy = style.family(label), next((w for w in str(label).split() if w in style.POLICIES), "aligned")
    found = re.search(r"\bk=(\d+)" if family == "DAS-Wave" else r"\bd1?=(\d+)", str(label))
    return (int(found[1]), policy) if found else None


def _values(tables):
    """(probe, a prompt's value at each depth (and policy), the columns to join on)."""
    keys = ["model", "task", "prompt", "depth"]
    if "depth_lens" in tables:
        lens = _own_start(tables["depth_lens"])
        yield "agreement", lens.groupby(keys, observed=True)["agreement"].mean().rename("value").reset_index(), keys
    if "prefix_channels" in tables:
        read = _own_start(tables["prefix_channels"])
        read = read[read["control"] == "none"]  # all lags: a decoder's drafts stand at all of them
        yield ("agreement_as_read", read.groupby([*keys, "policy"], observed=True)["agreement"].mean().rename("value").reset_index(),
               [*keys, "policy"])
    if "convergence" in tables:
        settled = _own_start(tables["convergence"])
        settled = settled[(settled["null"] == "none") & (settled["channel"] == "v") & (settled["metric"] == "cosine")]
        yield "v_cosine", settled.groupby(keys, observed=True)["value"].mean().reset_index(), keys


def _own_start(frame):
    """Rows of the start state that the benchmark decoded with: each model's own."""
    held = frame.groupby("model", observed=True)["start"].agg(lambda s: next((x for x in ("keyed", "embedding", "zero", "given")
                                                                              if x in set(s)), next(iter(s))))
    return frame[frame["start"] == frame["model"].map(held)]


def correlations(frame, resamples: int = intervals.RESAMPLES):
    """Columns model, task, probe, decoder, rho, low, high, n: Spearman's rank correlation of a probe's value with acceptance.

    One row per decoder (over prompts) and one for all of a task ("", over prompts and decoders: prompts and depths together).
    low, high: 95 % percentile bootstrap interval over prompts, a prompt's rows drawn together. NaN where there are fewer than
    FEWEST prompts, or where one side does not vary.
    """
    import pandas as pd

    rows = []
    for (model, task, probe), part in frame.groupby(["model", "task", "probe"], sort=False, observed=True):
        decoders = style.decoders_in_order(part["decoder"])
        for decoder in decoders + [""] * (len(decoders) > 1):
            own = part if decoder == "" else part[part["decoder"] == decoder]
            rows.append((model, task, probe, decoder, *spearman(own, resamples), own["prompt"].nunique()))
    return pd.DataFrame(rows, columns=["model", "task", "probe", "decoder", "rho", "low", "high", "n"])


def spearman(rows, resamples: int = intervals.RESAMPLES) -> tuple[float, float, float]:
    """(rho, low, high) of columns value and acceptance; prompts are what is resampled, those that some decoder lacks left out."""
    from scipy import stats

    grid = rows.pivot(index="prompt", columns="decoder", values=["value", "acceptance"]).dropna()
    if len(grid) < FEWEST:
        return np.nan, np.nan, np.nan
    x, y = grid["value"].to_numpy(float), grid["acceptance"].to_numpy(float)  # [prompts, decoders]

    def rho(picked, axis=-1):
        """Spearman's rho of the picked prompts [..., prompts]: Pearson's of ranks; NaN where one side does not vary."""
        a, b = (stats.rankdata(v[picked.astype(int)].reshape(*picked.shape[:-1], -1), axis=-1) for v in (x, y))
        a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
        size = np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
        return np.where(size > 0, (a * b).sum(-1) / np.where(size > 0, size, 1), np.nan)

    everyone = np.arange(len(grid))
    middle = float(rho(everyone))
    if middle != middle:
        return np.nan, np.nan, np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # samples in which one side does not vary are left out below
        drawn = stats.bootstrap((everyone,), rho, n_resamples=resamples, method="percentile", vectorized=True,
                                rng=np.random.default_rng(0)).bootstrap_distribution
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) < 0.9 * resamples:
        return middle, np.nan, np.nan
    low, high = np.percentile(drawn, (2.5, 97.5))
    return middle, float(low), float(high)


def draw(frame, *, model=None):
    """frame: the tidy join, or {table name: table} to make it of. A row of panels per task, a column per probe; small marks are
    prompts, large ones a decoder's mean over prompts with intervals of both."""
    frame = table(frame) if isinstance(frame, Mapping) else frame
    if frame.empty:
        raise SettingError(f"nothing to join: no prompt is in both the bench table, with a decoder that drafts, and one of the probes' "
                           f"({', '.join(SOURCES[:-1])})")
    style.check(frame, COLUMNS, "join")
    frame, model = style.choose(frame, "model", model, "join")
    tasks, probes = style.order(frame["task"], style.TASKS), [p for p in PROBES if p in set(frame["probe"])]
    decoders = style.decoders_in_order(frame["decoder"])
    looks, found = _looks(decoders), correlations(frame)
    fig = style.figure(1.0 + 4.1 * len(probes), 1.5 + 3.3 * len(tasks) + 0.21 * -(-len(decoders) // 3))
    axes = fig.subplots(len(tasks), len(probes), squeeze=False, sharey="row")
    for row, task in enumerate(tasks):
        for ax, probe in zip(axes[row], probes):
            part = frame[(frame["task"] == task) & (frame["probe"] == probe)]
            told = found[(found["task"] == task) & (found["probe"] == probe)].set_index("decoder")
            _panel(ax, part, looks, told)
            ax.set_title(f"{task or 'prompts'}: {_said(told)}")
            ax.set_xlabel(PROBES[probe])
        low, high = axes[row, 0].get_ylim()  # shared by the row; the words in the corners stand below the lowest mark
        ticks = [t for t in axes[row, 0].get_yticks() if max(low, 0) <= t <= 1]
        axes[row, 0].set_ylim(low - 0.085 * frame[frame["task"] == task]["decoder"].nunique() * (high - low), high)
        axes[row, 0].set_yticks(ticks)
        axes[row, 0].set_ylabel("drafts accepted / proposed")
    return style.finish(
        fig,
        f"{model}: do the probes know which prompts decode fast?",
        style.caption(
            frame, None, "crosses",
            "Small marks: prompts that were probed and timed; large: a decoder's mean, at its draft depth. rho: Spearman's rank "
            f"correlation with a bootstrap interval over prompts, of all marks in the panel's title, of one decoder's in its corner; n/a "
            f"below {FEWEST} prompts or where nothing varies. DAS-Wave: the depth of one round",
        ),
        _alt(model, found, tasks, probes),
        _handles(looks),
        3,
    )


def _panel(ax, part, looks, told):
    for decoder, look in looks.items():
        own = part[part["decoder"] == decoder]
        if own.empty:
            continue
        ax.plot(own["value"], own["acceptance"], linestyle="none", marker=look.marker, markersize=4, color=look.colour, alpha=0.5,
                markeredgewidth=0)
        x, y = (intervals.table(own, ["decoder"], column).iloc[0] for column in ("value", "acceptance"))
        marks.whisker(ax, y["mean"], x, look.colour, width=1.6)
        marks.whisker(ax, x["mean"], y, look.colour, horizontal=False, width=1.6)
        ax.plot(x["mean"], y["mean"], marker=look.marker, markersize=10, color=look.colour, markeredgecolor="white", zorder=4)
    lines = [f"{_short(d)}: {_rho(told.loc[d])}" for d in looks if d in told.index]
    ax.text(0.98, 0.03, "\n".join(lines), transform=ax.transAxes, ha="right", va="bottom", fontsize=style.TICK - 1.5, color=style.QUIET,
            zorder=5, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5})
    ax.margins(x=0.08)


def _looks(decoders):
    """One colour per family, one marker per decoder."""
    from figures.acceptance import looks

    return looks(decoders)


def _short(decoder):
    """'DAS J=12 k=1' of 'DAS-Wave J=12 k=1 deep_kv'."""
    return str(decoder).replace("DAS-Wave", "DAS").replace(" deep_kv", " kv").replace(" deep_v", " v").replace(" deep_k", " k")


def _said(told):
    """The panel's own correlation: of all decoders' marks, or of the only one's."""
    return _rho(told.loc[""] if "" in told.index else told.iloc[0]) if len(told) else "rho n/a"


def _rho(r):
    if r["rho"] != r["rho"]:
        return "rho n/a"
    return f"rho {r['rho']:.2f} {intervals.words(r['low'], r['high'], r['n'])}".rstrip()


def _handles(looks):
    from matplotlib.lines import Line2D

    return [Line2D([], [], linestyle="none", marker=look.marker, markersize=7, color=look.colour, label=decoder)
            for decoder, look in looks.items()]


def _alt(model, found, tasks, probes):
    said = []
    for task in tasks:
        for probe in probes:
            told = found[(found["task"] == task) & (found["probe"] == probe)].set_index("decoder")
            if len(told):
                said.append(f"{task or 'prompts'}, {PROBES[probe].replace(chr(10), ' ')}: {_said(told)}")
    return f"Scatter of drafts accepted in the benchmark against probe values of the same prompts on {model}. {'; '.join(said)}."


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("join"))
