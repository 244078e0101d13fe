import pytest

from loopscope.cli.folder import run_folder
from loopscope.errors import RunFolderError


def test_a_run_appears_under_its_name_only_when_complete(tmp_path):
    out = tmp_path / "deep" / "run"
    with run_folder(out) as part:
        (part / "report.html").write_text("page")
        assert not out.exists() and part.parent == out.parent and part.name.startswith("run.part-")
    assert (out / "report.html").read_text() == "page"
    assert [p.name for p in out.parent.iterdir()] == ["run"]
    assert out.stat().st_mode & 0o500 == 0o500 and out.stat().st_mode == out.parent.stat().st_mode


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_whatever_stops_a_run_removes_its_part(tmp_path, error):
    with pytest.raises(error), run_folder(tmp_path / "run") as part:
        (part / "tables").mkdir()
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_name_taken_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(RunFolderError, match="exists"), run_folder(tmp_path / "run"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "other").touch()
    assert [p.name for p in tmp_path.iterdir()] == ["run"] and (tmp_path / "run" / "other").exists()


def test_a_dangling_link_is_an_existing_name(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(RunFolderError, match="exists"), run_folder(tmp_path / "run"):
        pass
