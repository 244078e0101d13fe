"""Probes: what changes with recurrence depth.

    from probes import convergence, depth_lens

Imported on first use, so that `import probes` costs no torch and no pandas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopscope.lazy import lazy

_LAZY = {
    "agreement_runs": "probes.runs",
    "AgreementRunsResult": "probes.runs",
    "attribution": "probes.direct",
    "AttributionResult": "probes.direct",
    "block_lens": "probes.blocks",
    "BlockLensResult": "probes.blocks",
    "convergence": "probes.settling",
    "ConvergenceResult": "probes.settling",
    "depth_lens": "probes.lens",
    "DepthLensResult": "probes.lens",
    "SettleResult": "probes.lens",
    "depth_similarity": "probes.similarity",
    "DepthSimilarityResult": "probes.similarity",
    "head_attribution": "probes.head_shares",
    "HeadAttributionResult": "probes.head_shares",
    "head_stability": "probes.heads",
    "HeadStabilityResult": "probes.heads",
    "layer_fixed_points": "probes.layer_paths",
    "LayerFixedPointsResult": "probes.layer_paths",
    "linear_probe": "probes.linear",
    "Labelled": "probes.linear",
    "LinearProbeResult": "probes.linear",
    "sum_digits": "probes.targets",
    "replay_table": "probes.replay",
    "ReplayResult": "probes.replay",
    "second_candidate": "probes.candidates",
    "SecondCandidateResult": "probes.candidates",
    "token_grid": "probes.tokens",
    "TokenGridResult": "probes.tokens",
    "trajectories": "probes.paths",
    "TrajectoriesResult": "probes.paths",
}

if TYPE_CHECKING:
    from probes.blocks import BlockLensResult, block_lens
    from probes.candidates import SecondCandidateResult, second_candidate
    from probes.direct import AttributionResult, attribution
    from probes.head_shares import HeadAttributionResult, head_attribution
    from probes.heads import HeadStabilityResult, head_stability
    from probes.layer_paths import LayerFixedPointsResult, layer_fixed_points
    from probes.lens import DepthLensResult, SettleResult, depth_lens
    from probes.linear import Labelled, LinearProbeResult, linear_probe
    from probes.paths import TrajectoriesResult, trajectories
    from probes.replay import ReplayResult, replay_table
    from probes.runs import AgreementRunsResult, agreement_runs
    from probes.similarity import DepthSimilarityResult, depth_similarity
    from probes.settling import ConvergenceResult, convergence
    from probes.targets import sum_digits
    from probes.tokens import TokenGridResult, token_grid

__all__ = ["agreement_runs", "AgreementRunsResult", "second_candidate", "SecondCandidateResult", "attribution", "AttributionResult",
           "block_lens", "BlockLensResult", "layer_fixed_points", "LayerFixedPointsResult",
           "head_attribution", "HeadAttributionResult", "convergence", "ConvergenceResult", "depth_lens", "DepthLensResult", "ReplayResult",
           "SettleResult", "HeadStabilityResult", "TrajectoriesResult", "depth_similarity", "DepthSimilarityResult", "head_stability",
           "linear_probe", "Labelled", "LinearProbeResult", "sum_digits", "replay_table", "token_grid", "TokenGridResult", "trajectories"]

__getattr__, __dir__ = lazy(__name__, _LAZY)
