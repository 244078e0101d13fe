"""Importing the rooms is cheap, and they need no TransformerLens."""

from __future__ import annotations

import subprocess
import sys


def _python(code: str) -> None:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_importing_probes_and_interventions_costs_no_torch_and_no_pandas():
    _python("import sys, probes, interventions\nassert not {'torch', 'pandas', 'scipy'} & set(sys.modules)")


def test_every_public_name_resolves_whatever_was_imported_before():
    _python("import probes.settling, probes.lens, interventions.prefix, interventions.grid, probes, interventions\n"
            "for room in (probes, interventions):\n"
            "    for name in room.__all__:\n"
            "        assert callable(getattr(room, name)), name")


def test_probes_and_interventions_run_with_transformer_lens_blocked():
    _python("import sys; sys.modules['transformer_lens'] = None\n"
            "from loopscope.random_models import make_random_core\n"
            "from probes import convergence, depth_lens\nfrom interventions import depth_grid, prefix_channels\n"
            "core, prompts = make_random_core('ouro'), [list(range(12)), list(range(20, 32))]\n"
            "for measure in (convergence, depth_lens, prefix_channels, depth_grid):\n"
            "    assert len(measure(core, prompts, progress=False).frame)")
