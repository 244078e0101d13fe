"""The training loop on a micro-model: data, optimizer, resuming, exporting."""

import random
from dataclasses import replace

import pytest
import torch

from loopscope.models.loading import load_core
from loopscope.tiny import data, optim, recipe, tasks, train
from loopscope.tiny import tokenizer as tok


def micro(name, steps=6, **changes):
    config = recipe.huginn_config(1) if name == "tiny-huginn" else recipe.ouro_config(1)
    if name == "tiny-huginn":
        config |= {"n_embd": 32, "head_dim": 8, "intermediate_size": 48, "mean_recurrence": 3}
    else:
        config |= {"hidden_size": 32, "head_dim": 8, "intermediate_size": 48}
    return replace(recipe.Recipe(config, steps=steps, rows=2, length=48, warmup=2), **changes)


@pytest.fixture(scope="module")
def tokenizer():
    return tok.train(data.tokenizer_texts())


def started(name, folder, tokenizer, **changes):
    tok.save(tokenizer, folder / "tokenizer")
    return train.Run(name, micro(name, **changes), folder)


@pytest.mark.parametrize("name", ["tiny-huginn", "tiny-ouro"])
def test_a_resumed_run_equals_an_undisturbed_one(name, tmp_path, tokenizer):
    whole = started(name, tmp_path / "whole", tokenizer)
    assert whole.train()
    stopped = started(name, tmp_path / "stopped", tokenizer)
    for _ in range(3):
        stopped.one_step()
    stopped.save()
    resumed = started(name, tmp_path / "stopped", tokenizer)
    resumed.resume()
    assert resumed.step == 3
    assert resumed.train()
    for (key, a), b in zip(whole.core.state_dict().items(), resumed.core.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path, tokenizer):
    run = started("tiny-ouro", tmp_path, tokenizer)
    run.save()
    with pytest.raises(ValueError, match="another recipe"):
        started("tiny-ouro", tmp_path, tokenizer, steps=7).resume()
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        started("tiny-ouro", tmp_path / "empty", tokenizer).resume()


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, tokenizer):
    run = started("tiny-ouro", tmp_path, tokenizer)
    with torch.no_grad():
        run.core.wte.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 0"):
        run.one_step()


@pytest.mark.parametrize("name", ["tiny-huginn", "tiny-ouro"])
def test_the_loss_falls(name, tmp_path, tokenizer):
    run = started(name, tmp_path, tokenizer, steps=40, warmup=5)
    losses = [run.one_step() for _ in range(40)]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.5


def test_the_exit_gate_shapes_nothing_but_itself(tmp_path, tokenizer):
    run = started("tiny-ouro", tmp_path, tokenizer)
    gradients = []
    for weight in (0.0, 5.0):
        run.core.zero_grad()
        x, y = run.stream.batch(0)
        train.ouro_loss(run.core, x, y, replace(run.recipe, gate_entropy=weight), None).backward()
        gradients.append({n: p.grad.clone() for n, p in run.core.named_parameters()})
    for name, g in gradients[0].items():
        assert torch.equal(g, gradients[1][name]) == (not name.startswith("gate.")), name


def test_recurrence_counts_follow_the_official_distribution():
    r = replace(micro("tiny-huginn"), mean_recurrences=8.0, most_recurrences=24)
    counts = [train.draw_recurrences(r, train.generator(r, step)) for step in range(3000)]
    assert min(counts) >= 1 and max(counts) == 24
    assert sum(counts) / len(counts) == pytest.approx(8, abs=0.3)


def test_batches_are_functions_of_seed_and_step(tokenizer):
    stream, other = data.Stream(tokenizer, 0, 3, 100), data.Stream(tokenizer, 1, 3, 100)
    x, y = stream.batch(7)
    assert x.shape == y.shape == (3, 100)
    assert torch.equal(x, data.Stream(tokenizer, 0, 3, 100).batch(7)[0])
    assert not torch.equal(x, stream.batch(8)[0]) and not torch.equal(x, other.batch(7)[0])
    assert torch.equal(y[:, :-1][y[:, :-1] != data.IGNORE], x[:, 1:][y[:, :-1] != data.IGNORE])
    assert (x[:, 0] == stream.bos).all() and not (y == stream.bos).any()


def test_the_mix_keeps_its_shares(tokenizer):
    stream, used = data.Stream(tokenizer, 0, 1, 400), dict.fromkeys(data.MIX, 0)
    rng = random.Random(0)
    sizes = {kind: len(stream.document(kind, rng)) for kind in data.MIX}
    assert all(size > 10 for size in sizes.values())
    for step in range(20):
        text = tokenizer.decode(stream.batch(step)[0][0].tolist(), skip_special_tokens=False)
        for document in text.split(tok.BOS)[1:]:
            kind = "code" if not document.startswith("Q: ") else "worked" if len(document) > 90 else "direct"
            used[kind] += len(document)
    assert all(used.values())


def test_direct_validation_counts_exactly_the_answer_token(tokenizer):
    x, y, problems = data.Validation(tokenizer).direct(6)
    for row, problem in zip(y, problems, strict=True):
        assert tokenizer.decode(row[row != data.IGNORE].tolist()).strip() == problem.final
        assert problem.task in tasks.DIRECT
    assert x.shape == y.shape


def test_orthogonalise_brings_singular_values_near_one():
    g = torch.randn(24, 60, generator=torch.Generator().manual_seed(0))
    for matrix in (g, g.T):
        values = torch.linalg.svdvals(optim.orthogonalise(matrix))
        assert optim.orthogonalise(matrix).shape == matrix.shape
        assert values.min() > 0.5 and values.max() < 1.3


def test_embeddings_biases_and_norms_are_left_to_adamw(tmp_path, tokenizer):
    run = started("tiny-huginn", tmp_path, tokenizer)
    muon = {id(p) for group in run.optimizers[0].param_groups for p in group["params"]}
    names = {n for n, p in run.core.named_parameters() if id(p) in muon}
    assert "adapter.weight" in names and "blocks.0.attn.qkv.weight" in names
    assert not any(word in n for n in names for word in ("wte", "norm", "bias"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-huginn", "tiny-ouro"])
def test_an_exported_folder_loads_and_carries_its_card(name, tmp_path, tokenizer):
    run = started(name, tmp_path / "run", tokenizer, steps=1)
    run.train()
    out = tmp_path / "out"
    run.export(out, "a test")
    core = load_core(out)
    for (key, p), q in zip(core.named_parameters(), run.core.parameters(), strict=True):
        assert torch.equal(p, q.detach().bfloat16().float()), key
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "card.md", "card.json"} == {
        f.name for f in out.iterdir()
    }
