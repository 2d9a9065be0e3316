"""What is pushed to a hub through the calls of other libraries is what `save` writes, and comes back exactly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import hub
from huggingface_hub import ModelCard

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """The folders that `save` wrote, and what the hub got of the same models."""
    folder = tmp_path_factory.mktemp("pushed")
    with hub() as server:
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": "hf_none"}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-W", "ignore", str(HERE / "pushed.py"), str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert server.asked == []
        yield folder, server.repositories


NAMES = ("yarn", "alibi", "yarn-adapter", "alibi-adapter")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_pushed_is_what_is_saved(name, pushed):
    folder, repositories = pushed
    saved = {file.name: file.read_bytes() for file in (folder / name).iterdir()}
    assert repositories[f"me/{name}-saved"] == saved  # `save(..., push_to_hub=True)`, its card included
    files = repositories[f"me/{name}"]  # `push_to_hub` of transformers or PEFT, which write cards of their own
    assert {key: value for key, value in files.items() if key != "README.md"} == {
        key: value for key, value in saved.items() if key != "README.md"
    }
    assert "posenc.json" in files if "adapter" in name else b"posenc" in files["config.json"]


def test_a_push_leaves_no_weights_of_an_older_one(pushed):
    folder, repositories = pushed
    assert len(list((folder / "shards").glob("*.safetensors"))) > 1
    weights = [name for name in repositories["me/alibi-shards"] if "safetensors" in name]
    assert weights == ["model.safetensors"]


def test_cards_on_a_hub_name_their_base(pushed):
    """Where the base is a folder, there is no name that the hub would know."""
    _, repositories = pushed
    card = ModelCard(repositories["me/yarn-adapter-saved"]["README.md"].decode())
    assert card.data.to_dict() == {"library_name": "peft", "tags": ["hf-posenc", "yarn", "long-context"]}
    assert "# whole" in repositories["me/alibi-shards"]["README.md"].decode()
