"""`loopscope decode`: sampling, streaming, several prompts, settings of every decoder, and what may not be combined."""

import inspect
import os
import signal
import subprocess
import sys

import pytest


def refused(result, *words: str) -> None:
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr, result.exception)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and all(word in last for word in words), last


def done(result):
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def test_sampling_gives_ars_text_by_shared_noise_and_another_by_rejection(loopscope, folder):
    hot = ("--temperature", 1.5, "--top-p", 0.95, "--max-new-tokens", 12)
    greedy = done(loopscope("decode", folder(), "text", "--max-new-tokens", 12)).stdout
    plain = done(loopscope("decode", folder(), "text", "--decoder", "ar", *hot)).stdout
    assert plain != greedy
    for name in ("wfd", "dtv", "das-wave", "loopspec", "pld"):
        assert done(loopscope("decode", folder(), "text", "--decoder", name, *hot)).stdout == plain
    assert done(loopscope("decode", folder(), "text", *hot, "--seed", 1)).stdout != plain
    assert done(loopscope("decode", folder(), "text", *hot, "--top-k", 1)).stdout == greedy
    assert done(loopscope("decode", folder(), "text", *hot, "--min-p", 1)).stdout == greedy
    assert done(loopscope("decode", folder(), "text", *hot, "--sampler", "rejection")).stdout not in (plain, greedy)
    assert done(loopscope("decode", folder(), "text", "--max-new-tokens", 12, "--temperature", 0)).stdout == greedy


def test_several_prompts_are_one_batch_and_each_gives_what_it_gives_alone(loopscope, folder):
    prompts = ("one", "a longer prompt", "x")
    alone = [done(loopscope("decode", folder(), p, "--max-new-tokens", 9)).stdout for p in prompts]
    result = done(loopscope("decode", folder(), *prompts, "--max-new-tokens", 9, "--compare"))
    assert result.stdout == "".join(f"--- {i} of 3\n{text}" for i, text in enumerate(alone, 1))
    assert "together: " in result.stderr and "gave the same tokens as AR" in result.stderr
    assert result.stderr.count("9 tokens") == 3


def test_settings_reach_their_decoder_and_its_label_says_so(loopscope, folder):
    for options, label in [
            (("wfd", "--redraft", 1), "WFD d=1 re=1 (lossless)"), (("wfd", "--slots", 2), "WFD d=1 s=2 (approximate)"),
            (("ar", "--exit", "state-change:0.5"), "AR exit=state-change:0.5 (lossy)"), (("pld", "--block", 4), "PLD K=4 n=3 (lossless)"),
            (("loopspec", "--second-depth", 3, "--gate", 0.1), "LoopSpec d1=1 d2=3 gate=0.1 (lossless)"),
            (("das-wave", "--rounds", 3, "--growth", 2, "--stable", 1), "DAS-Wave J=3 k=1 deep_kv growth=2 stable=1 (lossless)")]:
        assert f"{label}: 6 tokens" in done(loopscope("decode", folder(), "text", "--decoder", *options, "--max-new-tokens", 6)).stderr


def test_what_cannot_be_combined_is_refused(loopscope, folder):
    for options, words in [
            (("--top-p", 0.9), ("--top-p", "greedy until --temperature")), (("--temperature", 0, "--top-k", 3), ("--temperature 0",)),
            (("--sampler", "rejection"), ("--sampler", "--temperature")), (("--temperature", -1), ("temperature", "-1")),
            (("--temperature", 1, "--top-p", 2), ("top_p", "2")), (("--temperature", 1, "--sampler", "dice"), ("'dice'", "rejection")),
            (("another", "--stream"), ("--stream", "one prompt")),
            (("--temperature", 1, "--sampler", "rejection", "--compare"), ("--compare", "shared-noise")),
            (("--decoder", "WFD d=1", "--draft-depth", 2), ("given twice",)), (("--decoder", "pld", "--gate", 0.5), ("does not take",)),
            (("--decoder", "wfd", "--slots", 2, "--exit", "gate:0.5"), ("choose one",)), (("",), ("prompt 2 of 2", "empty"))]:
        refused(loopscope("decode", folder(), "text", *options), *words)


@pytest.mark.parametrize("name", ["ar", "wfd", "das-wave"])
def test_a_stream_prints_the_same_text(loopscope, folder, name):
    options = ("--decoder", name, "--max-new-tokens", 14)
    plain = done(loopscope("decode", folder(), "text", *options))
    stream = done(loopscope("decode", folder(), "text", *options, "--stream", "--compare"))
    assert stream.stdout == plain.stdout and "14 tokens" in stream.stderr and "the same tokens as AR" in stream.stderr
    part = plain.stdout.strip()[:3]
    assert done(loopscope("decode", folder(), "text", *options, "--stream", "--stop", part)).stdout == "\n"


def test_ctrl_c_ends_a_stream_and_what_it_cost_is_said(folder):
    """The interrupt comes when the first piece has come, so pieces are flushed one by one or this test waits for ever."""
    run = subprocess.Popen([sys.executable, "-m", "loopscope.cli", "decode", folder(), "text", "--decoder", "ar", "--stream",
                            "--max-new-tokens", "500"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = os.read(run.stdout.fileno(), 100)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    lines = err.decode().splitlines()
    assert run.returncode == 130 and first and out.endswith(b"\n"), err
    assert lines[0] == "interrupted" and lines[1].startswith("AR (lossless): ") and "Traceback" not in err.decode()
    assert int(lines[1].split()[2]) < 500


def test_the_help_tells_the_defaults_that_there_are(loopscope):
    from decoders.named import DECODERS

    shown = done(loopscope("decode", "-h")).stdout
    for name, (build, defaults, _) in DECODERS.items():
        line = next(line.split() for line in shown.splitlines() if line.split()[:1] == [name])
        told = {option[2:].replace("-", "_"): value for option, value in zip(line[1::2], line[2::2])}
        own = {key: p.default for key, p in inspect.signature(build).parameters.items() if p.default is not p.empty} | defaults
        assert told == {key: f"{own[key]:g}" if isinstance(own[key], float) else str(own[key]) for key in told}
        assert set(defaults) <= set(told)


def test_the_version_is_said(loopscope):
    from loopscope import __version__

    assert done(loopscope("--version")).stdout == f"loopscope {__version__}\n"
    assert done(loopscope("-h")).stdout == done(loopscope("--help")).stdout
