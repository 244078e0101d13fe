"""The tokenizer: any text survives, digits stand alone, both libraries load it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscope.tiny import NAMES, WEIGHTS, data
from loopscope.tiny import tokenizer as tok


@pytest.fixture(scope="module", params=NAMES)
def folder(request):
    return WEIGHTS / request.param


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_a_round_trip(text):
    tokenizer = tok.load(WEIGHTS / NAMES[0])
    if any(special in text for special in (tok.BOS, tok.EOS, tok.PAD)):
        return
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_single_tokens(folder):
    tokenizer = tok.load(folder)
    ids = tokenizer.encode("12+345=7890, x10").ids
    digits = [tokenizer.decode([i]) for i in ids if any(c.isdigit() for c in tokenizer.decode([i]))]
    assert digits == list("12345789010")
    assert not [t for t in tokenizer.get_vocab() if len(t) > 1 and any(c in "0123456789" for c in t)]


def test_transformers_and_tokenizers_read_the_same(folder):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    text = "def f(x):\n    return x + 12  # Grüße\n"
    assert fast(text, add_special_tokens=False)["input_ids"] == tok.load(folder).encode(text).ids
    assert (fast.bos_token, fast.eos_token, fast.pad_token) == (tok.BOS, tok.EOS, tok.PAD)
    assert (fast.bos_token_id, fast.eos_token_id, fast.pad_token_id) == (0, 1, 2)
    assert fast.decode(fast(text)["input_ids"]) == text


def test_both_models_have_the_same_tokenizer():
    first, second = ((WEIGHTS / name / "tokenizer.json").read_bytes() for name in NAMES)
    assert first == second


def test_prompt_and_answer_tokenize_apart():
    """The boundary is clean: tokens of prompt + answer are those of the prompt followed by those of the answer."""
    tokenizer = tok.load(WEIGHTS / NAMES[0])
    validation = data.Validation(tokenizer)
    for problem in validation.problems("worked", 5) + validation.problems("direct", 5):
        whole = tokenizer.encode(problem.prompt + problem.answer).ids
        assert whole == tokenizer.encode(problem.prompt).ids + tokenizer.encode(problem.answer).ids


def test_training_the_tokenizer_is_deterministic():
    texts = ["def f(x):\n    return x\n", "Q: 1+2\nA: 3\n"] * 20
    assert tok.train(texts, 300).to_str() == tok.train(texts, 300).to_str()
