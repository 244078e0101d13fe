"""Token grid: the top token of every position and depth."""

from __future__ import annotations

import pytest
import torch

from probes import TokenGridResult, token_grid

IDS = [3, 141, 59, 26, 5]


@pytest.mark.parametrize("family", ["huginn", "ouro", "parcae"])
def test_every_cell_is_the_model_stopped_there(family, random_core, tmp_path):
    core = random_core(family)
    result = token_grid(core, [IDS, [1]], depth=3, progress=False)
    frame = result.frame
    assert len(frame) == 3 * 6
    final = core(torch.tensor(IDS), 3)[0].argmax(-1)
    for r in (1, 2, 3):
        logits = core(torch.tensor(IDS), r)[0]
        cells = frame[(frame.prompt == 0) & (frame.depth == r)].sort_values("position")
        assert cells.top.tolist() == logits.argmax(-1).tolist() and cells.token.tolist() == list(map(str, IDS))
        assert cells.top_text.tolist() == [str(t) for t in cells.top]
        assert cells.probability.tolist() == pytest.approx(logits.softmax(-1).max(-1).values.tolist())
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        assert cells.final_rank.tolist() == [1 + order[i].tolist().index(int(final[i])) for i in range(len(IDS))]
    assert frame[frame.depth == 1].final_rank.max() > 1 and (frame[frame.depth == 3].final_rank == 1).all()
    result.save(tmp_path)
    assert TokenGridResult.load(tmp_path).frame.equals(frame)
