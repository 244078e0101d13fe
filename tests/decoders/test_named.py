import pytest

from decoders import Autoregressive, DASWave, DraftThenVerify, LoopSpec, PromptLookup, Wavefront
from decoders.named import DECODERS, decoder
from loopscope.errors import SettingError


@pytest.mark.parametrize("made", [Autoregressive(), Wavefront(3), DraftThenVerify(2, 5), DraftThenVerify(1, 8, read="deep_v"),
                                  DASWave(12, 1), DASWave(4, 2, capacity=9, initial_width=3, read="aligned", carry=False),
                                  DASWave(5, 1, growth=2, stable=1, bonus=False), DASWave(5, 1, growth=0, carry=True),
                                  Wavefront(1, redraft=1),
                                  Wavefront(1, slots=4), Wavefront(2, redraft=2, exit="state-change:0.01"), Autoregressive(slots=4),
                                  Autoregressive(exit="gate:0.5"), Autoregressive(exit="kl:5e-4"), LoopSpec(1, 2), LoopSpec(1, None),
                                  LoopSpec(2, 8, gate=0.05, lanes=9), PromptLookup(), PromptLookup(4, 2)], ids=lambda d: d.label)
def test_every_label_makes_its_decoder_again(made):
    again = decoder(made.label)
    assert type(again) is type(made) and vars(again) == vars(made)
    assert again.label == made.label and again.fidelity == made.fidelity
    assert ("approximate" in made.label, "lossy" in made.label) == (made.fidelity == "approximate", made.fidelity == "lossy")


def test_short_names_have_defaults_and_take_settings():
    for name in DECODERS:
        assert decoder(name).label
    assert decoder("wfd", draft_depth=2, block=None).label == "WFD d=2"
    assert decoder("DtV", read="deep_kv").label == decoder("mature-spec").label == "DtV d=1 K=8 deep_kv"
    assert decoder("LoopSpec").label == "LoopSpec d1=1 d2=2" and decoder("prompt-lookup", block=4).label == "PLD K=4 n=3"
    assert decoder("wfd s=4").label == decoder("wfd", slots=4).label == "WFD d=1 s=4 (approximate)"


@pytest.mark.parametrize("name, message", [
    ("wafe", "decoder 'wafe' is unknown; use one of ar, dtv, wfd, loopspec, das-wave, pld"), ("wavefornt", "unknown"), ("", "unknown"),
    ("WFD q=1", "'q=1' in decoder 'WFD q=1' is not a setting"), ("WFD K=1", "does not take block"),
    ("AR d=1", "'ar' does not take draft_depth; it takes slots, exit"),
    ("WFD d=1 (approximate)", "says approximate, but 'WFD d=1' is lossless"), ("WFD d=1 s=4 (lossless)", "is approximate"),
    ("WFD d=1 d=2", "draft_depth is given twice"), ("DtV deep_k deep_v", "'deep_v' in decoder"),
    ("LoopSpec d1=1 d2=2 gate=..", "not a number"),
    ("DAS carry=yes", "'carry=yes'"), ("AR exit=never:1", "exit rule 'never' is unknown"),
    ("WFD d=\u00b2", "'d=\u00b2' in decoder 'WFD d=\u00b2' is not a setting"), ("WFD d=" + "9" * 5000, "is not a setting")])
def test_what_cannot_be_read_is_said(name, message):
    with pytest.raises(SettingError, match=message):
        decoder(name)


def test_a_setting_of_another_decoder_is_refused():
    with pytest.raises(SettingError, match="'wfd' does not take block"):
        decoder("wfd", block=4)


def test_a_setting_given_twice_is_refused_and_not_overruled():
    with pytest.raises(SettingError, match="draft_depth is given twice: 3, and 2 by the name 'WFD d=2'"):
        decoder("WFD d=2", draft_depth=3)
