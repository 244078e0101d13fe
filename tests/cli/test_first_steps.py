"""What a newcomer stumbles over is said where it happens."""

from __future__ import annotations

import copy

import pytest

from decoders import Autoregressive, DASWave, PromptLookup, Wavefront
from loopscope.errors import ContextError, PromptError, SettingError
from loopscope.random_models import make_random_core


@pytest.mark.parametrize("prompts", [["a text", "another"], [[1, 2], [3]], ([1, 2],)])
def test_several_prompts_passed_as_one_are_pointed_to_generate_batch(prompts):
    with pytest.raises(PromptError, match=f"got a list of {len(prompts)}: generate_batch"):
        Autoregressive().generate(make_random_core("ouro"), prompts)


def test_a_prompt_that_fills_the_context_is_not_told_to_ask_for_no_tokens():
    core = make_random_core("ouro", context=16)
    with pytest.raises(ContextError, match="shorten it by 4 tokens or more") as raised:
        Autoregressive().generate(core, [1] * 20, 1)
    assert "at most" not in str(raised.value) and "context is 16" in str(raised.value)
    with pytest.raises(ContextError, match="shorten it by 1 tokens or more"):
        Autoregressive().generate(core, [1] * 17, 1)
    with pytest.raises(ContextError, match="ask for at most 1 new tokens"):
        Autoregressive().generate(core, [1] * 16, 2)
    assert len(Autoregressive().generate(core, [1] * 16, 1).tokens) == 1


def test_a_setting_that_a_decoder_does_not_have_is_named_with_those_it_has():
    with pytest.raises(SettingError, match="PromptLookup does not take slots; it takes block, ngram"):
        PromptLookup(slots=2)
    with pytest.raises(SettingError, match="DASWave does not take block"):
        DASWave(2, 1, block=3)
    assert copy.deepcopy(Wavefront(1, slots=1)).label == Wavefront(1, slots=1).label


def test_a_generation_shows_itself_and_what_a_model_writes_is_no_markup():
    core = make_random_core("ouro")
    page = Wavefront(1).generate(core, [1, 2, 3], 4)._repr_html_()
    assert "block calls per token" in page and "WFD d=1" in page and "new tokens</th><td>4<" in page
    from dataclasses import replace

    page = replace(Wavefront(1).generate(core, [1, 2, 3], 1), text="<script>alert(1)</script>&")._repr_html_()
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in page


def test_a_recorded_run_shows_what_it_holds():
    loopscope = pytest.importorskip("loopscope")
    model = loopscope.LoopedModel(make_random_core("ouro", depth=3))
    _, run = model.run_with_cache([1, 2, 3], names_filter=lambda name: "hook_v" in name)
    page = run._repr_html_()
    assert "depth.{r}.blocks.0.attn.hook_v" in page and "1 to 3" in page and "<script" not in page


def test_compare_names_what_it_is_compared_with(loopscope, folder):
    said = loopscope("decode", folder(), "Q: 1+1", "--slots", "1", "--max-new-tokens", "4", "--compare").stderr
    assert "as AR (plain decoding without approximation; approximate, so they may differ)" in said
    assert "also compares it with AR s=1 (approximate), plain decoding with the same approximation" in said
    assert "also compares" not in loopscope("decode", folder(), "Q: 1+1", "--max-new-tokens", "4", "--compare").stderr


def test_the_certificate_names_its_decoders_and_what_it_did_not_try(loopscope, folder):
    said = loopscope("verify", "--model", folder(), "--decoder", "WFD d=2").stdout
    assert "decoders: WFD d=2\n" in said and "not tried: sampling" in said and "verify without --model" in said


def test_help_says_how_to_reach_settings_without_an_option(loopscope):
    from decoders.named import decoder

    page = loopscope("decode", "--help").stdout
    for label in ("DAS-Wave J=12 k=1 W=2 gamma=32 carry=off bonus=on", "LoopSpec d1=1 d2=2 lanes=4", "PLD K=8 n=3"):
        assert label in page
        assert decoder(label)
    assert decoder("DAS-Wave J=12 k=1 W=2 gamma=32").capacity == 32


def test_a_benchmark_explains_its_columns_and_counts_what_it_says(loopscope, folder):
    result = loopscope("bench", folder(), "--prompt", "one", "--prompt", "two", "--decoder", "wfd", "--max-new-tokens", "3",
                       "--repeats", "2")
    assert "decoding: 4 passes over a prompt, 2 decoders" in result.stderr and "4 of 4 passes over a prompt" in result.stderr
    for column in ("alpha", "repetition_rate", "calls_per_token"):
        assert any(line.strip().startswith(column + " ") for line in result.stdout.splitlines())
    once = loopscope("bench", folder(), "--prompt", "one", "--decoder", "wfd", "--max-new-tokens", "3", "--repeats", "1").stderr
    assert "decoding: 1 prompt, 2 decoders" in once
