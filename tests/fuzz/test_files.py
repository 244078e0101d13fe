"""Prompt files, tables and run folders, spoiled: read, or refused in our own words; nothing in them is executed or fetched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
from hypothesis import example, given
from hypothesis import strategies as st

from decoders.bench import BenchResult
from decoders.bench_journal import Group, Journal
from loopscope.merge import merge
from loopscope.records import SCHEMA_VERSION, read_table, write_table
from loopscope.suites import read_suite

SEEDS = st.integers(0, 2**48)
ROWS = (
    {"messages": [{"role": "user", "content": "Hello"}], "id": "a"},
    {"question_id": 7, "category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]},
    {"task_id": 2, "text": "Write add.", "code": "def add(a, b): return a + b", "test_list": ["assert add(1, 2) == 3"]},
    {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    return 1\n", "test": "check()", "entry_point": "f"},
    {"question": "How many?", "answer": "Two.\n#### 2"},
    {"problem": "$x + 1 = 2$", "solution": "$1$", "answer": "1", "subject": "Algebra", "unique_id": "test/1.json"},
    {"prompt": "plain", "id": 3}, {"text": "\u202eplain é 漢 \U0001f600"},
)


def test_spoiled_prompt_files_are_read_or_refused_in_our_words(spoil, tmp_path):
    path = tmp_path / "prompts.jsonl"
    told = {list: 0}

    @spoil.drawn(1500)
    @given(SEEDS, st.integers(0, len(ROWS) - 1), st.sampled_from((None, 0, 1)), st.booleans())
    @example(0, 0, None, True)
    def check(seed, which, shots, as_bytes):
        rows = [ROWS[which]] * (seed % 2) + [spoil.spoiled_json(ROWS[which], seed, times=1 + seed % 3)]
        raw = b"\n".join(json.dumps(row).encode() for row in rows)
        path.write_bytes(spoil.spoiled_bytes(raw, seed) if as_bytes else raw)
        found = spoil.ours(lambda: read_suite(path, shots=shots))
        told[type(found)] = told.get(type(found), 0) + 1
        if isinstance(found, list):
            assert found and all((p.text or p.messages) and p.text.encode() is not None for p in found)

    check()
    assert len(told) > 1 and told[list] > 30, told


def bench_rows() -> pd.DataFrame:
    row = dict.fromkeys(BenchResult.columns, 1) | {"model": "m", "task": "é", "decoder": "AR", "lossless": True, "prefill_seconds": 0.5}
    return pd.DataFrame([row, row | {"prompt": 2}])


def test_spoiled_tables_are_read_or_refused_in_our_words(spoil, tmp_path):
    path = write_table(bench_rows(), tmp_path / "bench.parquet", {"seed": 0})
    whole = path.read_bytes()
    tail = len(whole) - int.from_bytes(whole[-8:-4], "little") - 8  # where the footer begins

    @spoil.drawn(1000)
    @given(SEEDS, st.booleans())
    @example(12648, False)  # found: text in a column that is not UTF-8 came out as a traceback
    def check(seed, in_footer):
        cut = tail if in_footer else 0
        path.write_bytes(whole[:cut] + spoil.spoiled_bytes(whole[cut:], seed))
        found = spoil.ours(lambda: BenchResult.load(tmp_path))
        assert not isinstance(found, BenchResult) or set(BenchResult.columns) <= set(found.frame.columns)

    check()


def test_spoiled_journals_are_read_or_refused_in_our_words(spoil, tmp_path):
    def begin(folder: Path) -> int:
        with Journal(folder) as journal:
            journal.begin({"seed": 0})
            return len(journal.groups)

    with Journal(tmp_path / "x") as journal:
        journal.begin({"seed": 0})
        for i in range(3):
            journal.add(Group(i, 0, [["m", i, 0.5]], tokens={"AR": [1, 2]}))
    whole = {name: (tmp_path / "x" / name).read_bytes() for name in ("facts.json", "groups.jsonl")}

    @spoil.drawn(400)
    @given(SEEDS, st.sampled_from(sorted(whole)))
    @example(0, "facts.json")
    def check(seed, name):
        (tmp_path / "x").mkdir(exist_ok=True)  # a journal that holds nothing goes away
        for other, raw in whole.items():
            (tmp_path / "x" / other).write_bytes(spoil.spoiled_bytes(raw, seed) if other == name else raw)
        found = spoil.ours(lambda: begin(tmp_path / "x"))
        assert not isinstance(found, int) or found <= 4

    check()


def test_spoiled_parts_of_a_shared_run_are_merged_or_refused_in_our_words(spoil, tmp_path):
    folder, facts = tmp_path / "x.shards", {"prompts": 2, "seed": 0}
    folder.mkdir()
    (folder / "shards.json").write_text(json.dumps({"world": 2, "facts": facts}))
    for rank in (0, 1):
        write_table(bench_rows().iloc[:1].assign(prompt=rank), folder / f"shard-{rank}-of-2" / "tables" / "bench.parquet", {"seed": 0})
        shard = {"rank": rank, "world": 2, "prompts": [rank], "facts": facts}
        (folder / f"shard-{rank}-of-2" / "manifest.json").write_text(json.dumps({"schema": SCHEMA_VERSION, "shard": shard,
                                                                                 "tables": {"bench": 1}}))
    assert merge(folder).tables["bench"][0]["prompt"].tolist() == [0, 1]
    names = ("shards.json", "shard-0-of-2/manifest.json", "shard-1-of-2/manifest.json")
    whole = {name: (folder / name).read_text() for name in names}

    @spoil.drawn(400)
    @given(SEEDS, st.sampled_from(names), st.booleans())
    @example(0, "shards.json", True)
    def check(seed, name, as_bytes):
        for other, text in whole.items():
            (folder / other).write_text(text)
        raw = whole[name].encode()
        spoiled = spoil.spoiled_bytes(raw, seed) if as_bytes else json.dumps(spoil.spoiled_json(json.loads(raw), seed)).encode()
        (folder / name).write_bytes(spoiled)
        found = spoil.ours(lambda: merge(folder))
        if hasattr(found, "tables"):
            assert sorted(found.tables["bench"][0]["prompt"]) == [0, 1]

    check()
    shutil.rmtree(folder)


def test_the_facts_of_a_table_may_be_anything(spoil, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(bench_rows(), preserve_index=False)
    known = {"pandas": json.loads(table.schema.metadata[b"pandas"]), "loopscope": {"schema": SCHEMA_VERSION, "seed": 0}}

    @spoil.drawn(350)
    @given(SEEDS, st.sampled_from(sorted(known)), st.booleans())
    @example(b"\xff{", "pandas", True)  # found: pandas' own notes were believed
    @example(b'{"columns": "x"}', "pandas", True)
    @example(b'{"columns": [{}], "index_columns": []}', "pandas", True)
    def check(seed, name, as_bytes):
        raw = {k: json.dumps(v).encode() for k, v in known.items()}
        if isinstance(seed, bytes):
            raw[name] = seed
        elif as_bytes:
            raw[name] = spoil.spoiled_bytes(raw[name], seed)
        else:
            raw[name] = json.dumps(spoil.spoiled_json(known[name], seed)).encode()
        pq.write_table(table.replace_schema_metadata({k.encode(): v for k, v in raw.items()}), tmp_path / "t.parquet")
        found = spoil.ours(lambda: read_table(tmp_path / "t.parquet"))
        assert not isinstance(found, tuple) or list(found[0].columns) == list(table.schema.names)

    check()
