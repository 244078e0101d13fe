"""Warnings on the command line are one line each, said once, without the machinery of Python's own."""

from __future__ import annotations

import pytest


@pytest.mark.filterwarnings("always::loopscope.errors.DepthWarning")
def test_a_depth_beyond_the_trained_one_is_one_line(loopscope, folder):
    result = loopscope("decode", folder("ouro"), "text", "--depth", 6, "--max-new-tokens", 4, "--decoder", "wfd", "--compare")
    assert result.exit_code == 0
    lines = [line for line in result.stderr.splitlines() if "arning" in line or "trained" in line]
    assert lines == ["warning: ouro was trained with 4 recurrences and is fed nothing but its own state: at depth 6 it runs outside what "
                     "it was trained for"]


@pytest.mark.filterwarnings("always::loopscope.errors.DepthWarning")
def test_at_the_models_own_depth_nothing_is_said(loopscope, folder):
    assert "warning" not in loopscope("decode", folder("ouro"), "text", "--max-new-tokens", 4, "--compare").stderr
