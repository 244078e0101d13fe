"""Acceptance by depth: of the drafts made after r recurrences, how many were right, and how many there were."""

from __future__ import annotations

from figures import acceptance, style

COLUMNS = ("model", "task", "prompt", "decoder", "position", "depth", "compared", "accepted")


def draw(frame, *, model=None):
    """A column per task: acceptance rate by the depth a draft was made at above, drafts of that depth below."""
    style.check(frame, COLUMNS, "acceptance_by_depth")
    keys = ["model", "task", "prompt", "decoder", "depth"]
    summed = frame.groupby(keys, as_index=False, sort=False)[["compared", "accepted"]].sum()
    return acceptance.rates_and_counts(
        summed.rename(columns={"depth": "position", "compared": "reached"}),
        model,
        "acceptance_by_depth",
        "recurrences after which the draft was made",
        ("accepted / compared", "drafts compared"),
        ("acceptance by draft depth", "Acceptance rate by the depth of the draft", "At each decoder's shallowest"),
        "Rates are pooled over prompts and drawn where {enough} drafts or more were compared; depth 0: copied from the text",
    )


if __name__ == "__main__":
    from figures.command import main

    raise SystemExit(main("acceptance_by_depth"))
