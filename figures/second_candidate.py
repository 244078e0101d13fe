"""Second candidates: how often a depth's top token is the full-depth one, and how often its runner-up is where it is not."""

from __future__ import annotations

from figures import intervals, marks, style

COLUMNS = ("model", "task", "prompt", "start", "depth", "first", "second", "n_positions")
_ALL = {"linestyle": (0, (4, 1.5)), "markerfacecolor": "white"}
ENOUGH = 5  # positions where the top token is wrong: a rate of fewer is noise


def draw(frame, *, model=None, start=None):
    """Two panels against depth, a line per task: the top token right (and either of two), and the hit rate of the runner-up."""
    frame, model, start = style.rows(frame, COLUMNS, "second_candidate", model, start)
    frame = frame.assign(either=frame["first"] + frame["second"], hits=frame["second"] * frame["n_positions"],
                         wrong=(1 - frame["first"]) * frame["n_positions"])
    fig = style.figure(9.0, 4.0)
    left, right = fig.subplots(1, 2)
    said = []
    for task in style.order(frame["task"], style.TASKS):
        look, part = style.look(style.TASKS, task), frame[frame["task"] == task]
        name = task or "prompts"
        marks.line(left, intervals.table(part, ["depth"], "first"), "depth", look, f"{name}: top token")
        marks.line(left, intervals.table(part, ["depth"], "either"), "depth", look, f"{name}: top token or runner-up", **_ALL)
        missed = part[part["wrong"] > 0.5]
        rates = intervals.ratio_table(missed, ["depth"], "hits", "wrong") if len(missed) else missed[:0]
        if len(missed) and (rates["total"] > ENOUGH - 0.5).any():
            marks.line(right, rates[rates["total"] > ENOUGH - 0.5], "depth", look, name)
        first = part[part["depth"] == part["depth"].min()]
        said.append(f"{name}, depth {first['depth'].iloc[0]}: top token {style.number(first['first'].mean(), 2)}, either "
                    f"{style.number(first['either'].mean(), 2)}")
    left.set_ylabel("share of positions right")
    left.set_title("Right at the first or second try")
    right.set_ylabel("runner-up right, of those wrong")
    right.set_title("Hit rate of the runner-up")
    right.set_ylim(-0.02, 1.02)
    for ax in (left, right):
        style.depth_axis(ax, frame["depth"].unique())
    return style.finish(
        fig,
        f"{model}: what a second proposal could save",
        style.caption(frame, start, extra=f"Hit rate: pooled over the positions where the top token is wrong, drawn where they are "
                                          f"{ENOUGH} or more"),
        f"Lines against recurrence depth on {model}: share of positions whose full-depth token is the top token, or one of two. "
        f"{'; '.join(said)}.",
        style.handles_of(left),
        2,
    )


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("second_candidate"))
