import pytest

from decoders import Autoregressive, DASWave, DraftThenVerify, Wavefront
from decoders.named import DECODERS, decoder
from loopscope.errors import SettingError


@pytest.mark.parametrize("made", [Autoregressive(), Wavefront(3), DraftThenVerify(2, 5), DraftThenVerify(1, 8, read="deep_v"),
                                  DASWave(12, 1), DASWave(4, 2, capacity=9, initial_width=3, read="aligned", carry=False)])
def test_every_label_makes_its_decoder_again(made):
    again = decoder(made.label)
    assert type(again) is type(made) and vars(again) == vars(made)


def test_short_names_have_defaults_and_take_settings():
    for name in DECODERS:
        assert decoder(name).label
    assert decoder("wfd", draft_depth=2, block=None).label == "WFD d=2"
    assert decoder("DtV", read="deep_kv").label == "DtV d=1 K=8 deep_kv"


@pytest.mark.parametrize("name, message", [
    ("wafe", "decoder 'wafe' is unknown; use one of ar, dtv, wfd, das-wave"), ("wavefornt", "unknown"), ("", "unknown"),
    ("WFD q=1", "'q=1' in decoder 'WFD q=1' is not a setting"), ("WFD K=1", "does not take block"), ("AR d=1", "no settings"),
    ("WFD d=\u00b2", "'d=\u00b2' in decoder 'WFD d=\u00b2' is not a setting"), ("WFD d=" + "9" * 5000, "is not a setting")])
def test_what_cannot_be_read_is_said(name, message):
    with pytest.raises(SettingError, match=message):
        decoder(name)


def test_a_setting_of_another_decoder_is_refused():
    with pytest.raises(SettingError, match="'wfd' does not take block"):
        decoder("wfd", block=4)
