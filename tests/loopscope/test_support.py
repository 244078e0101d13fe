"""The support file says what the suite checks of every family, and only the suite can write it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from loopscope.cli.app import app
from loopscope.errors import SettingError
from loopscope.models.registry import CLASSES
from loopscope.support import CHECKS, FILE, PACKAGES, Record, read_support

OF_EVERY_FAMILY = {"golden logits", "golden tokens", "batches", "splits", "padding", "hooks", "decoders", "save", "inspect"}
AGAIN = "run pytest --write-support -m support"


def test_the_committed_file_says_what_the_suite_checks_no_more_and_no_less(support_of_the_suite):
    collected, whole = support_of_the_suite
    listed = {(family, check) for family, checks in read_support().families.items() for check in checks}
    assert collected <= listed, AGAIN  # of the files that were collected
    if whole:
        assert collected == listed, AGAIN


def test_every_family_that_loads_is_in_it_with_the_checks_that_all_need():
    support = read_support()
    assert set(support.families) == set(CLASSES)
    for family, checks in support.families.items():
        assert OF_EVERY_FAMILY <= set(checks) <= set(CHECKS), family
    assert {"dory", "hrm_text"} <= {family for family, checks in support.families.items() if "transformers" in checks}
    assert set(support.versions) == {"python", *PACKAGES}


def test_nothing_is_written_unless_every_test_ran_and_passed(tmp_path):
    file, both = tmp_path / "support.json", {("ouro", "padding"), ("dory", "padding")}
    record = Record()
    with pytest.raises(SettingError, match="no test with a support marker ran"):
        record.write(set(), file)
    record.add(["ouro"], "padding", True)
    with pytest.raises(SettingError, match="padding of dory did not pass"):
        record.write(both, file)
    record.add(["dory"], "padding", True)
    record.add(["dory"], "padding", False)  # one of several tests
    with pytest.raises(SettingError, match="padding of dory did not pass"):
        record.write(both, file)
    assert not file.exists()
    record.outcomes["dory", "padding"] = [True, True]
    record.add(["ouro"], "golden logits", True)
    record.write(both, file)
    written = read_support(file)
    assert written.families == {"dory": ("padding",), "ouro": ("golden logits", "padding")}
    assert set(written.versions) == {"python", *PACKAGES}
    with pytest.raises(SettingError, match="'paddings' is not one of the checks"):
        record.add(["ouro"], "paddings", True)


def test_the_command_prints_families_checks_versions_and_where_they_are_from():
    shown = CliRunner().invoke(app, ["models"])
    assert shown.exit_code == 0
    support = read_support()
    versions = [f"{name} {number}" for name, number in support.versions.items()]
    for text in ("tiny-ouro", FILE.name, "written by the test suite", *support.families, *versions):
        assert text in shown.stdout
    line = next(line for line in shown.stdout.splitlines() if line.split()[:1] == ["dory"])
    assert line.split(None, 1)[1] == ", ".join(support.families["dory"])
