"""Hub ids: what is asked of the Hub, in which order, and what is never asked for. The Hub here is a server of this file's own."""

from __future__ import annotations

import json
import shutil
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import loopscope
from loopscope.errors import CheckpointError, SettingError, UnknownModelError
from loopscope.inspecting import inspect_checkpoint
from loopscope.models.hub import is_repo_id
from loopscope.models.loading import SHIPPED, load_core

NEVER = (".py", ".pkl", ".pt", ".bin", ".msgpack", ".gguf")


class FakeHub:
    """Repositories as folders, by id and revision. `asked`: every file that was requested, in order."""

    def __init__(self, root: Path) -> None:
        self.root, self.asked, self.refuse = root, [], {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def repo(self, repo_id: str, revision: str = "main") -> Path:
        folder = self.root / repo_id / revision
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def commit(self, repo_id: str, revision: str) -> str:
        """A made-up commit, 40 digits of it, of a revision; the same for its name."""
        return revision if len(revision) == 40 else (revision + repo_id).encode().hex().ljust(40, "0")[:40]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        parts = request.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo_id, (kind, revision) = "/".join(parts[2:4]), (parts[4:6] or ["revision", "main"])
            file = None
        else:
            repo_id, (_, revision), file = "/".join(parts[:2]), parts[2:4], "/".join(parts[4:])
            kind = "file"
        if repo_id in self.refuse:
            return self.send(request, *self.refuse[repo_id])
        known = {self.commit(repo_id, p.name): p for p in (self.root / repo_id).glob("*")}
        if not known:
            return self.send(request, 404, {"X-Error-Code": "RepoNotFound"})
        folder = known.get(self.commit(repo_id, revision))
        if folder is None:
            return self.send(request, 404, {"X-Error-Code": "RevisionNotFound"})
        commit, files = self.commit(repo_id, revision), [p for p in sorted(folder.rglob("*")) if p.is_file()]
        if kind == "revision":
            return self.json(request, {"id": repo_id, "sha": commit, "siblings": []})
        if kind == "tree":
            return self.json(request, [{"type": "file", "path": str(p.relative_to(folder)), "size": p.stat().st_size,
                                        "oid": p.name.encode().hex().ljust(40, "0")[:40]} for p in files])
        if body:
            self.asked.append(file)
        if not (folder / file).is_file():
            return self.send(request, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data, code, headers = (folder / file).read_bytes(), 200, {"ETag": f'"{commit[:8]}-{file}"', "X-Repo-Commit": commit}
        if span := request.headers.get("Range"):
            first, last = (int(x) for x in span.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
            data, code = data[first : last + 1], 206
        self.send(request, code, headers, data, body)

    def json(self, request, value) -> None:
        self.send(request, 200, {"Content-Type": "application/json"}, json.dumps(value).encode(), True)

    def send(self, request, code, headers, data: bytes = b"", body: bool = False) -> None:
        request.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(data)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import HfApi, constants

    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.HfApi", partial(HfApi, endpoint=fake.url))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield fake
    fake.close()


def publish(hub: FakeHub, source: Path, repo_id: str = "looped/tiny", revision: str = "main") -> Path:
    """The checkpoint, and beside it what a repository may hold that must not be fetched."""
    folder = hub.repo(repo_id, revision)
    for path in source.iterdir():
        name = "model.safetensors" if path.name == "weights.safetensors" else path.name
        if name != "io.safetensors":
            shutil.copy(path, folder / name)
    (folder / "modeling_looped.py").write_text("raise RuntimeError('remote code ran')")
    (folder / "tokenizer.pkl").write_bytes(b"\x80\x04K\x01.")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    (folder / "optimizer.pt").write_bytes(b"\x80\x04K\x01.")
    (folder / "original").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "original" / "model.safetensors")
    return folder


def test_a_hub_id_loads_as_the_folder_does_and_nothing_but_safetensors_config_and_tokenizer_is_asked_for(hub):
    publish(hub, SHIPPED / "tiny-ouro")
    model, here = loopscope.load("looped/tiny", hooked=False), load_core("tiny-ouro")
    assert torch.equal(model(torch.arange(9)), here(torch.arange(9)))
    assert model.to_tokens("Q: 1 + 1").tolist() == here.to_tokens("Q: 1 + 1").tolist()
    assert (model.source, model.revision) == ("looped/tiny", hub.commit("looped/tiny", "main"))
    assert set(hub.asked) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert hub.asked[0] == "config.json" and hub.asked[-1] == "model.safetensors"


def test_a_second_load_fetches_nothing_and_works_offline(hub, monkeypatch):
    from huggingface_hub import constants

    publish(hub, SHIPPED / "tiny-ouro")
    first = load_core("looped/tiny")
    hub.asked.clear()
    load_core("looped/tiny")
    assert hub.asked == []
    hub.close()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = load_core("looped/tiny")
    assert torch.equal(first(torch.arange(9)), again(torch.arange(9))) and again.revision == first.revision


def test_the_revision_chooses_the_files(hub, goldens):
    publish(hub, goldens / "ouro", revision="main")
    other = publish(hub, goldens / "ouro", revision="v2")
    state = load_file(other / "model.safetensors")
    save_file(state | {"model.norm.weight": state["model.norm.weight"] * 2}, other / "model.safetensors")
    main, second = load_core("looped/tiny"), load_core("looped/tiny", revision="v2")
    assert torch.equal(second.norm.weight, 2 * main.norm.weight)
    commit = hub.commit("looped/tiny", "v2")
    assert second.revision == commit != main.revision
    assert torch.equal(load_core("looped/tiny", revision=commit).norm.weight, second.norm.weight)
    with pytest.raises(UnknownModelError, match=r"looped/tiny on the Hub has no revision 'v3'; give a branch, a tag or a commit"):
        load_core("looped/tiny", revision="v3")


def test_shards_are_those_of_the_index_and_no_other_safetensors(hub, goldens):
    folder = publish(hub, goldens / "ouro")
    state = load_file(folder / "model.safetensors")
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: state[name] for name in held}, folder / file)
    where = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    core = load_core("looped/tiny")
    assert torch.equal(core(torch.arange(9)), load_core(goldens / "ouro")(torch.arange(9)))
    assert {file for file in hub.asked if file.endswith(".safetensors")} == set(parts)


def test_an_index_that_leaves_the_folder_fetches_nothing_from_there(hub, goldens):
    folder = publish(hub, goldens / "ouro")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="'../../secret.safetensors'; expected the name of a .* in the same folder"):
        load_core("looped/tiny")
    assert not [file for file in hub.asked if file.endswith(".safetensors")]


def test_a_family_that_cannot_run_is_refused_before_its_weights_are_fetched(hub, goldens):
    folder = publish(hub, goldens / "ouro")
    for model_type, message in (("llama", "'llama'.* is not supported; supported: "), ("inkling", "multimodal")):
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        shutil.rmtree(hub.root.parent / "cache", ignore_errors=True)
        hub.asked.clear()
        with pytest.raises(UnknownModelError, match=message):
            load_core("looped/tiny")
        assert hub.asked == ["config.json"]


def test_parcaes_pickle_is_fetched_only_where_there_is_no_safetensors_file(hub, goldens):
    folder = publish(hub, goldens / "parcae")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    tokens = torch.arange(9)
    safe = load_core("looped/tiny")
    assert "pytorch_model.bin" not in hub.asked
    (folder / "model.safetensors").unlink()
    shutil.rmtree(hub.root.parent / "cache")
    with pytest.warns(UserWarning, match=r"is a pickle, a format that can run code.*weights_only=True"):
        pickled = load_core("looped/tiny")
    assert torch.equal(pickled(tokens), safe(tokens))
    assert [file for file in hub.asked if file.endswith(NEVER)] == ["pytorch_model.bin"]


def test_a_pickle_of_another_family_is_not_fetched(hub, goldens):
    folder = publish(hub, goldens / "ouro")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"looped/tiny on the Hub has no \*.safetensors file .*pickled weights are never fetched"):
        load_core("looped/tiny")
    assert not [file for file in hub.asked if file.endswith(NEVER)]


def test_inspect_fetches_the_headers_only(hub, goldens):
    publish(hub, SHIPPED / "tiny-huginn")
    found, here = inspect_checkpoint("looped/tiny"), inspect_checkpoint("tiny-huginn")
    assert str(found).splitlines()[1:] == str(here).splitlines()[1:]
    cached = [p for p in (hub.root.parent / "cache").rglob("*") if p.is_file() and p.stat().st_size > 100_000]
    assert not cached and "model.safetensors" in hub.asked


def test_inspect_says_what_a_repository_lacks(hub, goldens):
    folder = publish(hub, goldens / "nanbeige")
    state = load_file(folder / "model.safetensors")
    state.pop("model.layers.0.mlp.up_proj.weight")
    save_file(state, folder / "model.safetensors")
    assert "INCOMPLETE: looped/tiny/model.safetensors lacks 1 of" in str(inspect_checkpoint("looped/tiny"))


# ---- what can go wrong --------------------------------------------------------------------------------------


def test_a_repository_that_is_not_there_is_said_as_a_name_that_may_be_a_mistyped_path(hub):
    with pytest.raises(UnknownModelError, match="'runs/frist' is neither a shipped model nor a folder here, and the Hub has no such "):
        load_core("runs/frist")


def test_a_gated_repository_tells_what_to_do(hub, goldens):
    publish(hub, goldens / "ouro")
    hub.refuse["looped/tiny"] = 403, {"X-Error-Code": "GatedRepo"}
    with pytest.raises(UnknownModelError, match="looped/tiny on the Hub is gated: .*hf auth login"):
        load_core("looped/tiny")


def test_a_broken_hub_is_one_error(hub, goldens):
    publish(hub, goldens / "ouro")
    hub.refuse["looped/tiny"] = 418, {}
    with pytest.raises(UnknownModelError, match="looped/tiny.* could not be fetched: ") as error:
        load_core("looped/tiny")
    assert "\n" not in str(error.value)


def test_no_connection_is_one_error(hub):
    hub.close()
    with pytest.raises(UnknownModelError, match="the Hub cannot be reached, and the cache does not hold all of it") as error:
        load_core("looped/tiny")
    assert "\n" not in str(error.value)


def test_a_download_that_was_cut_short_is_said_offline(hub, monkeypatch):
    from huggingface_hub import constants

    publish(hub, SHIPPED / "tiny-ouro")
    load_core("looped/tiny")
    next((hub.root.parent / "cache").rglob("model.safetensors")).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="looped/tiny.* has no .*.safetensors file .*found: config.json"):
        load_core("looped/tiny")


def test_a_repository_without_a_config_is_no_checkpoint(hub):
    (hub.repo("looped/data") / "README.md").write_text("hello")
    with pytest.raises(CheckpointError, match="looped/data on the Hub has no config.json"):
        load_core("looped/data")


@pytest.mark.parametrize("source", ["tiny-ouro", "folder"])
def test_a_revision_of_what_is_not_on_the_hub_is_refused(source, goldens):
    with pytest.raises(SettingError, match="revision='main' is for Hub ids"):
        load_core(goldens / "ouro" if source == "folder" else source, revision="main")


@pytest.mark.parametrize("source", ["./runs/first", "/nowhere/at/all", "a/b/c", "a", "a/", "/a", "~/x", "a b/c", "a//b", "a/..", "a/b.git",
                                    "-a/b", Path("runs/first")])
def test_what_can_be_no_hub_id_is_not_asked_for(source, hub):
    assert not is_repo_id(source)
    with pytest.raises(UnknownModelError, match="nor a Hub id"):
        load_core(source)


def test_a_local_folder_comes_before_a_hub_id(hub, goldens, tmp_path, monkeypatch):
    publish(hub, goldens / "ouro")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SHIPPED / "tiny-ouro", tmp_path / "looped" / "tiny")
    assert load_core("looped/tiny").config.vocab_size == 1024 and hub.asked == []
