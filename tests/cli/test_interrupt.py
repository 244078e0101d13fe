"""Ctrl-C (and a polite kill) end in one line and leave nothing that looks like a finished run."""

import os
import signal
import subprocess
import sys
import time

import pytest


@pytest.mark.parametrize("how, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_report_leaves_nothing(folder, tmp_path, how, code):
    run = subprocess.Popen([sys.executable, "-m", "loopscope.cli", "report", folder(), "--quick", "--out", tmp_path / "run"],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    first = run.stderr.readline()  # the first stage has begun, so the part folder exists
    assert "[1/" in first, first + run.stderr.read()
    assert [p.name.startswith("run.part-") for p in tmp_path.iterdir()] == [True]
    time.sleep(0.3)
    run.send_signal(how)
    _, err = run.communicate(timeout=60)
    assert run.returncode == code, err
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in err
    if how == signal.SIGINT:
        assert err.strip().splitlines()[-1].startswith("interrupted")


def test_an_interrupt_before_the_command_begins_is_one_line():
    code = ("import sys\nclass Stop:\n def find_spec(self, name, path=None, target=None):\n"
            "  if name == 'loopscope.cli.app': raise KeyboardInterrupt\nsys.meta_path.insert(0, Stop())\n"
            "from loopscope.cli import main; main()")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (130, "interrupted\n")
