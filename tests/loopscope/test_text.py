"""Text as TransformerLens and transformers have it: tokens, strings, padding, chat templates, on the checkpoint's own tokenizer."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer

from loopscope.errors import CheckpointError, PromptError
from loopscope.models.loading import SHIPPED, load_core

TEXTS = ["Q: 1 + 2", "def f(x):\n    return x", "naïve – über"]
CHAT = [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": "Hello \"you\" & <b>"},
        {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "1 < 2?"}]
TEMPLATES = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
              "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama": "{{- bos_token }}\n{%- set system = '' %}\n{%- if messages[0]['role'] == 'system' %}\n    {%- set system = "
             "messages[0]['content']|trim %}\n    {%- set messages = messages[1:] %}\n{%- endif %}\n{{- system }}\n"
             "{%- for message in messages %}\n    {{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}\n"
             "{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}\n",
    "blocks": "{% for m in messages %}\n  {% if m.role == 'system' %}\n    {% continue %}\n  {% endif %}\n{{ m | tojson }}\n"
              "  {% generation %}{{ loop.index }}{% endgeneration %}\n{% endfor %}\n",
    "state": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
             "{% set ns.last = m.role %}{% if ns.n > 30 %}{% break %}{% endif %}{% endfor %}{{ ns.n }} {{ ns.last }} {{ 7 % 4 }}"
             "{{ '-' * 3 }}{{ tools is none }}{{ dict(a=1) | tojson(indent=2) }}",
    "own": "{{ messages[-1].content }}{% if thinking is defined and thinking %} <think>{% endif %}",
}


@pytest.fixture(scope="module")
def core():
    """tiny-ouro. Shared by the module: do not change it."""
    return load_core("tiny-ouro")


@pytest.fixture
def with_template(tmp_path):
    """A copy of tiny-ouro with a chat template in one of the places where it may lie."""
    def make(template, where: str = "tokenizer_config.json"):
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(SHIPPED / "tiny-ouro", folder)
        if where == "chat_template.jinja":
            (folder / where).write_text(template)
        else:
            path = folder / where
            path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {"chat_template": template}))
        return folder

    return make


def fast(folder):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


# ---- tokens and strings -------------------------------------------------------------------------------------


def test_tokens_and_strings_are_those_of_transformer_lens(core):
    """What TransformerLens does with this tokenizer, written with transformers' class as TransformerBridge writes it."""
    reference = fast(SHIPPED / "tiny-ouro")
    for text in TEXTS:
        wanted = [reference.bos_token_id, *reference(text, add_special_tokens=False)["input_ids"]]
        tokens = core.to_tokens(text)
        assert tokens.tolist() == [wanted] and tokens.dtype == torch.int64
        assert core.to_tokens(text, prepend_bos=False).tolist() == [wanted[1:]]
        assert core.to_string(tokens) == reference.batch_decode(tokens, clean_up_tokenization_spaces=False)
        assert core.to_text(tokens[0]) == text == core.to_string(wanted[1:]) and core.to_string(tokens[0]) != text
        strings = reference.batch_decode([[i] for i in wanted], clean_up_tokenization_spaces=False)
        assert core.to_str_tokens(text) == core.to_str_tokens(tokens) == core.to_str_tokens(wanted) == strings
        assert core.to_str_tokens(text, prepend_bos=False) == strings[1:]
    assert core.to_str_tokens(TEXTS) == [core.to_str_tokens(text) for text in TEXTS]
    assert core.to_string(torch.tensor(5)) == core.to_string([5]) and core.to_string(torch.tensor([[5], [6]]).numpy()) == \
        [core.to_string([5]), core.to_string([6])]


def test_texts_of_different_lengths_are_padded_on_request_only(core):
    rows = [core.to_tokens(text)[0].tolist() for text in TEXTS]
    with pytest.raises(PromptError, match="different lengths .* use to_tokens_and_mask, or padding_side='left'"):
        core.to_tokens(TEXTS)
    left, right = core.to_tokens(TEXTS, padding_side="left"), core.to_tokens(TEXTS, padding_side="right")
    n = max(map(len, rows))
    assert left.tolist() == [[core.config.pad] * (n - len(row)) + row for row in rows]
    assert right.tolist() == [row + [core.config.pad] * (n - len(row)) for row in rows]
    with pytest.raises(PromptError, match="padding_side"):
        core.to_tokens(TEXTS, padding_side="top")


def test_a_padded_batch_with_its_mask_gives_each_texts_own_logits(core):
    tokens, mask = core.to_tokens_and_mask(TEXTS)
    logits = core(tokens, attention_mask=mask)
    for i, text in enumerate(TEXTS):
        alone = core(core.to_tokens(text))[0]
        assert int(mask[i].sum()) == len(alone) and mask.dtype == torch.int64
        torch.testing.assert_close(logits[i, -len(alone) :], alone, atol=1e-4, rtol=1e-4)


def test_without_a_pad_token_the_first_end_pads_and_without_any_it_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED / "tiny-ouro", folder)
    (folder / "tokenizer_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    assert load_core(folder).to_tokens(TEXTS, padding_side="left")[0, 0] == config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": None, "eos_token_id": None}))
    with pytest.raises(PromptError, match="need a pad token"):
        load_core(folder).to_tokens(TEXTS, padding_side="left")


def test_a_tokenizer_saved_with_truncation_and_padding_cuts_and_pads_nothing(tmp_path, core):
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED / "tiny-ouro", folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert torch.equal(load_core(folder).to_tokens(TEXTS[1]), core.to_tokens(TEXTS[1]))


@pytest.mark.parametrize("call", [lambda m: m.to_str_tokens(torch.zeros(2, 3, dtype=torch.long)), lambda m: m.to_tokens([]),
                                  lambda m: m.to_tokens("\ud800")])
def test_what_is_no_text_is_refused(core, call):
    with pytest.raises(PromptError):
        call(core)


# ---- chat templates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_gives_what_transformers_gives(name, with_template):
    folder = with_template(TEMPLATES[name])
    core, reference = load_core(folder), fast(folder)
    for prompt in (True, False):
        wanted = reference.apply_chat_template(CHAT, add_generation_prompt=prompt, tokenize=False, thinking=True)
        assert core.apply_chat_template(CHAT, add_generation_prompt=prompt, tokenize=False, thinking=True) == wanted and wanted
        ids = core.apply_chat_template(CHAT, add_generation_prompt=prompt, thinking=True)
        assert ids.tolist() == reference(wanted, add_special_tokens=False)["input_ids"]


def test_variables_reach_the_template_and_ids_begin_as_the_template_does(with_template):
    core = load_core(with_template(TEMPLATES["own"]))
    assert core.apply_chat_template(CHAT, tokenize=False) == "1 < 2?"
    assert core.apply_chat_template(CHAT, tokenize=False, thinking=True) == "1 < 2? <think>"
    llama = load_core(with_template(TEMPLATES["llama"])).apply_chat_template(CHAT)
    assert llama.tolist().count(core.config.bos) == 1 and llama[0] == core.config.bos


def test_the_jinja_file_comes_before_the_json_file_and_that_before_the_tokenizers_config(with_template):
    folder = with_template("config")
    says = lambda: load_core(folder).apply_chat_template(CHAT, tokenize=False)  # noqa: E731
    assert says() == "config"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert says() == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert says() == "jinja"


def test_named_templates_are_chosen_by_name(with_template):
    core = load_core(with_template([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]))
    assert core.apply_chat_template(CHAT, tokenize=False) == "plain"
    assert core.apply_chat_template(CHAT, tokenize=False, template="tool_use") == "tools"
    with pytest.raises(PromptError, match="without a chat template 'rag'; it has 'default', 'tool_use'"):
        core.apply_chat_template(CHAT, template="rag")


def test_templates_are_saved_with_the_model(with_template, tmp_path):
    core = load_core(with_template("file {{ messages[0].role }}", "chat_template.jinja"))
    core.save_pretrained(tmp_path / "again")
    assert load_core(tmp_path / "again").apply_chat_template(CHAT, tokenize=False) == "file system"
    assert (tmp_path / "again" / "tokenizer_config.json").read_bytes() == (SHIPPED / "tiny-ouro" / "tokenizer_config.json").read_bytes()


def test_a_model_without_a_template_says_so(core):
    with pytest.raises(PromptError, match="came without a chat template; write the prompt as text"):
        core.apply_chat_template(CHAT)


UNSAFE = {
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "attribute '__class__' .* is unsafe"),
    "functions": ("{{ raise_exception.__globals__.json }}", "attribute '__globals__' .* is unsafe"),
    "attributes by filter": ("{{ (''|attr('__class__')).__mro__ }}", "attribute '__class__' .* is unsafe"),
    "formats": ("{{ '{0.__class__.__mro__}'.format(1) }}", "attribute '__class__' .* is unsafe"),
    "changes": ("{{ messages.append(1) }}", "not safe to run"),
    "imports": ("{% include '/etc/passwd' %}", "no loader|refuses"),
    "underscores": ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "underscore"),
    "repetition": ("{{ 'a' * 10000000000 }}", "not safe to run: a repetition"),
    "repeated lists": ("{{ [1] * 10000000000 }}", "not safe to run: a repetition"),
    "powers": ("{{ 10 ** 1000000000 }}", "a power of"),
    "endless output": ("{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
                       "writes more than 16,777,216 characters"),
    "long ranges": ("{% for i in range(10000000) %}{% endfor %}", "OverflowError"),
    "its own refusal": ("{{ raise_exception('roles must alternate') }}", "refuses this conversation, or is broken: roles must alternate"),
    "no template": ("{% for", "is broken"),
    "wrong sums": ("{{ messages[0].role + 1 }}", "TypeError"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_a_template_may_not_do_ends_in_one_error(name, with_template):
    template, message = UNSAFE[name]
    with pytest.raises(PromptError, match=message):
        load_core(with_template(template)).apply_chat_template(CHAT)


def test_a_template_of_absurd_length_is_not_run(with_template):
    with pytest.raises(PromptError, match="at most 1,048,576 are run"):
        load_core(with_template("x" * (2**20 + 1))).apply_chat_template(CHAT)


@pytest.mark.parametrize("messages", ["Hello", [], [1], [{"content": "x"}], {"role": "user"}, [{"role": "user", "content": object()}]])
def test_messages_of_another_form_are_refused(messages, with_template):
    with pytest.raises(PromptError, match="messages"):
        load_core(with_template(TEMPLATES["chatml"])).apply_chat_template(messages)


@pytest.mark.parametrize("name, content", [("tokenizer_config.json", b"{"), ("special_tokens_map.json", b"[]"),
                                           ("generation_config.json", b"\xff"), ("chat_template.jinja", b"\xff\xfe"),
                                           ("chat_template.json", b'{"chat_template": 3}')])
def test_a_damaged_file_is_named(name, content, with_template):
    folder = with_template("x")
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name if name != "chat_template.json" else "chat_template.* found int"):
        load_core(folder)
