"""What a reader should look for in each figure of the report: (heading, one or two sentences)."""

from __future__ import annotations

READING = {
    "convergence": (
        "How channels settle",
        "Each line compares a channel at depth r with itself at full depth; 1 means that it no longer changes. A channel counts as slow "
        "or fast only where it leaves its nulls (grey): a map that merely contracts makes every line rise.",
    ),
    "depth_lens": (
        "What each depth would already say",
        "The model's own readout after every recurrence. The higher the agreement at small depths, the more often a cheap draft is right.",
    ),
    "settle": (
        "When the answer stops changing",
        "How many recurrences a position needs before its top token is final. The late ones are what full depth is for.",
    ),
    "second_candidate": (
        "What a second guess could save",
        "Where a depth's first choice is wrong, its second is often the final token. A decoder that proposes twice (LoopSpec) lives on the "
        "hit rate on the right; where first and second together are no higher than the first alone, it has nothing to gain.",
    ),
    "agreement_runs": (
        "How long a depth stays right",
        "Solid above dotted: misses come together, so that the stretches between them are longer than the mean agreement would let one "
        "expect, and decoders that draft far ahead keep more of what they drafted.",
    ),
    "attribution": (
        "Which components make the logit",
        "What attention and MLPs of every recurrence put into the stream, seen through all norms and maps behind it. Contributions of "
        "early recurrences that are near zero were overwritten by later ones; opposite signs cancel.",
    ),
    "trajectories": (
        "Where the state goes",
        "On the left every path ends in the middle: a straight way in is a plain contraction, a winding one an orbit or a spiral. Steps "
        "that shrink by the same factor make a straight line; a line that goes flat has stopped shrinking.",
    ),
    "head_stability": (
        "When heads look where they will look",
        "A head that is near zero early could be read from a shallow pass; one that stays high decides late what it attends to.",
    ),
    "depth_similarity": (
        "Which depths hold the same picture",
        "A bright block is a stretch of recurrences that leave positions where they lie to each other; a dark corner says that early and "
        "late states are organised differently.",
    ),
    "token_grid": (
        "The next token at every depth",
        "One prompt, read across: what a position would answer after each recurrence. Bold letters are already the final answer.",
    ),
    "prefix_channels": (
        "Reading full-depth prefixes",
        "Above zero, a draft that reads the prefix's full-depth values (deep V, which is Mature-V), keys (deep K) or both guesses better "
        "than the aligned draft at the same positions. A gain counts only if the controls, which read wrong values, do not have it too.",
    ),
    "prefix_effects": (
        "The effects that the verdict rests on",
        "One line per way of reading. A filled mark: the interval excludes zero on the good side.",
    ),
    "depth_grid": (
        "Any depth of keys with any depth of values",
        "The framed cells are the named ways of reading; the others show whether the change between them is gradual.",
    ),
    "hops": (
        "How far right guesses travel",
        "DAS-Wave refines a block of guesses together. A guess can become right only after the one before it is, so every round moves the "
        "front of right guesses by about one place; where the lines stop rising, more rounds bring nothing.",
    ),
    "plan": (
        "What the plan predicted, and what happened",
        "Hollow marks were computed from the findings and a timing sweep, and written to a file with its time and hash, before the "
        "benchmark; filled marks are the benchmark. A prediction that names the block calls exactly is right or wrong; seconds can only be "
        "estimated.",
    ),
    "miss": (
        "Why a prediction was missed",
        "Speed is calls times seconds per call. A miss by acceptance means that more or fewer drafts were right than expected; by kernel, "
        "that the block's own calls took another time than in the timing sweep; by host, that what Python does between them did.",
    ),
    "bench": (
        "How fast it was",
        "Each bar is AR's time over the decoder's on the same prompts. Calls tell what the algorithm saves, wall clock what this machine "
        "made of it.",
    ),
    "acceptance": (
        "How many drafts were right",
        "A rate that stays flat along the run means that late drafts are as good as early ones.",
    ),
    "acceptance_by_depth": (
        "At which depth the right drafts were made",
        "A draft made after more recurrences is a better informed one, and costs more. Only drafts that still stood when the target's "
        "token came are counted.",
    ),
    "join": (
        "Did the probes know which prompts decode fast?",
        "Every mark is a prompt that was both probed and timed. Where the marks rise to the right, what the probe saw of a prompt told how "
        "many of its drafts would be right; rho says how well the two orders agree (1: the same order, 0: unrelated). Few prompts make "
        "wide intervals.",
    ),
    "factorial": (
        "What carry, deep keys and deep values bring to DAS-Wave",
        "Above, every combination of the three switches; below, what each adds on average, and what two or three of them add together "
        "beyond their sum. An interval that excludes zero has a filled mark. Cells near the length of a block leave no room for more.",
    ),
    "trace": (
        "The schedule of a real decode",
        "Read a column as one block call: every cell in it is a position that advanced by one recurrence.",
    ),
    "timing": (
        "What one call costs",
        "If more rows cost little more time, running many positions at once is nearly free.",
    ),
}
