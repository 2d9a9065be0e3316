"""What this package takes for granted of the trainer, peft, lm-eval and sentence-transformers: a contract each."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from cells import tiny, tokens
from torch import nn

from hf_posenc.compat import adapters, trainers

# --- transformers: the trainer ---


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        ids = tokens(1, 8, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def trainer(tmp_path, cls, **options):
    args = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        save_steps=1,
        report_to="none",
        use_cpu=True,
        **options,
    )
    return cls(model=tiny("llama"), args=args, train_dataset=Rows())


@pytest.mark.parametrize("next_token", [True, False])
def test_a_trainer_tells_what_it_saved_and_counts_targets(tmp_path, next_token):
    class Watched(trainers.WatchedTrainer):
        seen, counts = [], []

        def state_to_save(self, state):
            self.seen.append("to_save")
            return state

        def after_save(self, folder):
            self.seen.append(("saved", folder.name))
            assert (folder / "model.safetensors").exists()

        def after_checkpoint(self, folder):
            self.seen.append(("checkpointed", folder.name))
            assert (folder / "trainer_state.json").exists()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.counts.append(int(num_items_in_batch))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    Watched.next_token, Watched.seen, Watched.counts = next_token, [], []
    trainer(tmp_path, Watched).train()
    assert Watched.seen == ["to_save", ("saved", "checkpoint-1"), ("checkpointed", "checkpoint-1")]
    assert Watched.counts == [14 if next_token else 16], "a step's loss would be divided by another number of tokens"


def test_a_trainer_lets_texts_be_shared_in_another_way(tmp_path):
    class Shares(trainers.WatchedTrainer):
        entered = 0

        def shared_inputs(self, inputs):
            Shares.entered += 1
            import contextlib

            return contextlib.nullcontext, inputs

    trainer(tmp_path, Shares, save_strategy="no").train()
    assert Shares.entered == 1, "transformers asks another method: patched models could not share a text"


def test_a_trainer_shares_texts_as_ever_unless_told(tmp_path):
    made = trainer(tmp_path, trainers.WatchedTrainer, save_strategy="no")
    made.train()
    assert made.state.global_step == 1


# --- peft ---


def test_what_peft_trains_whole_is_a_copy_behind_a_wrapper():
    peft = pytest.importorskip("peft")
    model = tiny("llama", tie_word_embeddings=False)
    head = model.lm_head
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert model.lm_head is not head
    assert adapters.unwrap_copies(model.lm_head) is head
    copied = adapters.active_copy(model.lm_head)
    assert isinstance(copied, nn.Linear) and copied is not head and copied.weight.requires_grad
    assert adapters.unwrap_copies(head) is head and adapters.active_copy(head) is head
    assert adapters.knows_embeddings(["norm", "lm_head"]) and not adapters.knows_embeddings(["q_proj"])


def test_peft_saves_adapters_through_their_config_objects(tmp_path):
    """Where our sidecar file is written: `config.save_pretrained` of the object on the model, after its state dict."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    order, config = [], model.peft_config["default"]
    own = type(config).save_pretrained
    config.save_pretrained = lambda folder, **kwargs: (order.append("config"), own(config, folder, **kwargs))[1]
    model.base_model.model.register_state_dict_pre_hook(lambda *args: order.append("state"))
    model.save_pretrained(tmp_path)
    assert order[-1] == "config" and "state" in order, "PEFT saves in another way: adapters would lose their scheme"


# --- lm-eval and sentence-transformers ---


@pytest.fixture(scope="module")
def harness():
    pytest.importorskip("lm_eval")
    from hf_posenc.compat import harness

    return harness


def test_lm_evals_command_line_is_where_it_was(harness, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lm-eval", "run", "--model", "hf", "--tasks", "niah_single_1", "--limit", "2"])
    given = harness.command_line().parse_args()
    assert (given.command, given.tasks, given.limit) == ("run", ["niah_single_1"], 2)
    assert hasattr(given, "metadata") and hasattr(given, "model_args")


def test_lm_evals_tasks_import_what_they_call(harness, tmp_path):
    (tmp_path / "drawn.py").write_text("import random\nrandom.random()\ndef documents(**kwargs): return {}\n")
    (tmp_path / "task.yaml").write_text("task: contract\ncustom_dataset: !function drawn.documents\n")
    import random

    random.seed(0)
    before = random.getstate()
    harness.import_functions(tmp_path / "task.yaml")
    assert random.getstate() != before, "what a task imports would draw from our seed, and documents would differ"


def test_what_lm_eval_finds_can_be_changed(harness, monkeypatch):
    import lm_eval

    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **given: {"results": given})
    with harness.results_through(lambda found: {**found, "seen": True}):
        assert lm_eval.simple_evaluate(a=1) == {"results": {"a": 1}, "seen": True}
    assert lm_eval.simple_evaluate(a=1) == {"results": {"a": 1}}
    source = (Path(lm_eval.__file__).parent / "_cli" / "run.py").read_text()
    assert "simple_evaluate" in source, "lm-eval's command evaluates through another function"


def test_lm_evals_model_says_what_it_is_about_to_read(harness):
    class Counts(harness.CountedLM):
        def about_to_read(self, needed):
            self.needed = list(needed)

    from lm_eval.models.huggingface import HFLM

    calls = []
    lm = Counts.__new__(Counts)
    lm.set_max_length(33)
    assert HFLM.max_length.fget(lm) == 33, "lm-eval would cut prompts at the length that the config promises"
    before = HFLM._loglikelihood_tokens
    HFLM._loglikelihood_tokens = lambda self, requests, *args, **kwargs: calls.append(requests) or []
    try:
        lm._loglikelihood_tokens([(("a", "b"), [1, 2, 3], [4, 5])])
    finally:
        HFLM._loglikelihood_tokens = before
    assert lm.needed == [4] and len(calls) == 1


def test_every_kernel_passes_a_mode_below_autograd():
    from hf_posenc.compat.kernels import KernelMode, detach_all

    class Doubles(KernelMode):
        def kernel(self, name, args, run):
            return detach_all([run() * 2])[0] if name.startswith("aten.exp") else run()

    x = torch.zeros(3, requires_grad=True)
    with Doubles():
        y = x.exp()
    y.sum().backward()
    assert y.tolist() == x.grad.tolist() == [2.0] * 3, "autograd takes the kernel's output for its own"


def test_an_embedder_is_made_around_a_model_that_is_there(tmp_path):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from tokenizers import Tokenizer
    from tokenizers import models as tokenizer_models

    from hf_posenc.compat.embedders import embedder_around

    inner = tiny("bert").base_model
    inner.save_pretrained(tmp_path / "model")
    words = Tokenizer(tokenizer_models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a").save_pretrained(tmp_path / "model")
    whole = SentenceTransformer(modules=[Transformer(str(tmp_path / "model")), Pooling(32)])
    whole.save_pretrained(str(tmp_path / "whole"))
    kind = json.loads((tmp_path / "whole" / "modules.json").read_text())[0]["type"]
    other = tiny("bert", seed=5).base_model
    made = embedder_around(other, str(tmp_path / "whole"), kind)
    assert next(module for module in made.modules() if isinstance(module, type(other))) is other
    assert type(made[0]) is Transformer
