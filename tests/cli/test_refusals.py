"""Everything a user can get wrong ends in one clear message, exit code 2 and no traceback."""

import errno
import resource
import shutil
import subprocess
import sys

import pytest


def refused(result, *words: str) -> str:
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr, result.exception)
    lines = result.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in errors[0], errors[0]
    return errors[0]


def test_a_wrong_model_name_names_the_closest(loopscope, monkeypatch):
    from loopscope.models import loading

    monkeypatch.setattr(loading, "shipped_models", lambda: ["tiny-huginn", "tiny-ouro"])
    refused(loopscope("decode", "tiny-hugin", "text"), "tiny-hugin", "did you mean 'tiny-huginn'")
    refused(loopscope("report", "tiny-uoro", "--out", "never"), "did you mean 'tiny-ouro'")


@pytest.mark.parametrize("keep", [0, 100, 20_000])
def test_truncated_weights_are_named(loopscope, folder, tmp_path, keep):
    broken = shutil.copytree(folder(), tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    refused(loopscope("decode", broken, "text"), "model.safetensors", "truncated")


def test_unreadable_files_are_named(loopscope, folder, tmp_path):
    broken = shutil.copytree(folder(), tmp_path / "broken")
    (broken / "config.json").write_text("{")
    refused(loopscope("decode", broken, "text"), "config.json", "JSON")
    (broken / "config.json").unlink()
    refused(loopscope("decode", broken, "text"), "no config.json")
    other = shutil.copytree(folder(), tmp_path / "other")
    (other / "tokenizer.json").write_text("{}")
    refused(loopscope("decode", other, "text"), "tokenizer.json")


def test_prompts_that_cannot_be_decoded(loopscope, folder):
    refused(loopscope("decode", folder(), ""), "prompt is empty")
    refused(loopscope("decode", folder(), "x" * 600), "600 tokens", "context is 512")
    refused(loopscope("decode", folder(), "x" * 500, "--max-new-tokens", 64), "at most 13 new tokens")
    refused(loopscope("decode", folder(), "x", "--max-new-tokens", 0), "max_new_tokens", "at least 1")
    refused(loopscope("probe", folder(), "--prompt", ""), "prompt is empty")


def test_depths_that_make_no_sense(loopscope, folder):
    refused(loopscope("decode", folder(), "text", "--depth", 0), "depth must be at least 1")
    refused(loopscope("decode", folder(), "text", "--depth", -3), "depth must be at least 1")
    refused(loopscope("decode", folder(), "text", "--decoder", "wfd", "--draft-depth", 9), "draft_depth 9", "at most 4")
    refused(loopscope("decode", folder(), "text", "--depth", 10**12), "more than the 65536 recurrences")
    refused(loopscope("intervene", folder(), "--prompts", 2, "--grid", "--draft-depth", 9), "draft depth 9")


def test_settings_that_are_not_there(loopscope, folder):
    refused(loopscope("decode", folder(), "text", "--decoder", "wavefornt"), "'wavefornt'", "ar, dtv, wfd, loopspec, das-wave, pld")
    refused(loopscope("decode", folder(), "text", "--decoder", "wfd", "--block", 4), "does not take block")
    refused(loopscope("decode", folder(), "text", "--decoder", "dtv", "--read", "deep"), "'deep'", "'deep_kv'")
    refused(loopscope("decode", folder(), "text", "--start", "cold"), "'cold'", "keyed")
    refused(loopscope("probe", folder(), "--task", "poems"), "'poems'", "maths")
    refused(loopscope("gpu-check", "--device", "abacus"), "'abacus'", "--device cpu")
    refused(loopscope("gpu-check", "--device", "meta"), "'meta'", "holds no values", "--device cpu")


@pytest.mark.parametrize("command", [("decode", "text"), ("report", "--out", "never")])
def test_more_threads_than_a_machine_can_run_are_refused(loopscope, folder, command):
    refused(loopscope(command[0], folder(), *command[1:], "--threads", 100_000), "threads 100000", "expected 1 to")


def test_two_models_of_one_name_are_refused(loopscope, folder, tmp_path):
    twin = shutil.copytree(folder(), tmp_path / folder().name)
    refused(loopscope("report", folder(), twin, "--out", tmp_path / "run"), str(folder()), str(twin), "both be called")
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_not_overwritten(loopscope, folder, tmp_path):
    kept = tmp_path / "run"
    kept.mkdir()
    (kept / "precious").write_text("mine")
    refused(loopscope("report", folder(), "--out", kept), "exists; choose another --out")
    refused(loopscope("probe", folder(), "--prompt", "some text", "--out", kept), "exists; choose another --out")
    assert (kept / "precious").read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_cannot_be_made(loopscope, folder, tmp_path):
    (tmp_path / "file").write_text("")
    refused(loopscope("report", folder(), "--out", tmp_path / "file" / "run"), "cannot be made")


def test_a_full_disk_is_said_and_nothing_is_left(loopscope, folder, tmp_path, monkeypatch):
    import pyarrow.parquet

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    message = refused(loopscope("probe", folder(), "--prompt", "some text", "--out", tmp_path / "run"), "No space left")
    assert "parquet" in message and list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr("pathlib.Path.write_text", full)
    refused(loopscope("probe", folder(), "--prompt", "some text", "--out", tmp_path / "run"), "No space left")
    assert list(tmp_path.iterdir()) == []


def test_writes_that_the_system_refuses_are_said(folder, tmp_path):
    """Not simulated: the system stops every file of this process at 4 kB."""
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command = [sys.executable, "-B", "-m", "loopscope.cli", "probe", folder(), "--prompt", "some text", "--out", tmp_path / "run"]
    run = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert run.returncode == 2, run.stderr
    assert run.stderr.strip().splitlines()[-1].startswith("error: ") and "too large" in run.stderr and "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_cannot_be_redrawn(loopscope, tmp_path):
    refused(loopscope("figures", tmp_path), "nothing to draw")
    refused(loopscope("figures", tmp_path / "nowhere"), "is not a folder")


def test_a_mistake_in_the_program_is_not_hidden(loopscope, folder, monkeypatch):
    import decoders.named

    def broken(*args, **kwargs):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(decoders.named, "decoder", broken)
    assert isinstance(loopscope("decode", folder(), "text").exception, RuntimeError)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_request_beyond_the_memory_is_said_in_one_line(error, capsys):
    import typer

    from loopscope.cli.guard import guarded

    @guarded
    def command():
        raise error

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == 2 and "not enough memory" in capsys.readouterr().err
