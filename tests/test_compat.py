"""What this package takes for granted of names that other libraries keep private, one contract for each.

When a release breaks one of these, the message says what no longer holds and who depends on it.
"""

import ast
import copy
import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import transformers
from cells import KINDS, options, tiny, tokens
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, StaticCache, Trainer
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

import hf_posenc
from hf_posenc import UnsupportedModel, patch_model
from hf_posenc.compat import adapters, caches, models, pytorch, trainers

PACKAGE = Path(hf_posenc.__file__).parent
FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if file.parent.name != "compat"]
NAMED_TUPLES = {"_replace", "_asdict", "_fields"}
"""Python's own, and public."""

# --- the rule: bounds say what was run ---


def test_the_bounds_are_the_releases_that_were_run():
    root = PACKAGE.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("an installed package has no pyproject.toml beside it")
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = next(line for line in wanted if line.startswith("transformers"))
    rows = re.findall(r"^\| (5\.\d+)\.\d+ \|.*\| (\d+) of (\d+) \| (\d+) of (\d+) \|", _text("docs/versions.md"), re.M)
    oldest, newest = rows[0][0], rows[-1][0]
    assert bounds == f"transformers>={oldest},<5.{int(newest.split('.')[1]) + 1}"
    assert all(row[1] == row[2] and row[3] == row[4] for row in rows), "not everything passed there"
    assert re.findall(r'"(5\.\d+)\.\d+"', _text("tools/compat.py")) == [row[0] for row in rows]


def _text(name: str) -> str:
    return (PACKAGE.parent / name).read_text(encoding="utf-8")


# --- the rule: private names of others are used in `compat` and nowhere else ---


def private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLES


def own_names() -> set[str]:
    """Private names that the package gives to things of its own."""
    found: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def foreign_names() -> set[str]:
    """Private names that classes of others have, which ours are made of: such a method overrides one of theirs."""
    classes = (nn.Module, nn.Embedding, Trainer, DynamicLayer, DynamicCache, PreTrainedConfig)
    theirs = {name for cls in classes for name in dir(cls)} | set(vars(nn.Linear(1, 1)))
    attributes = {models.ATTENTION, "_loss_shifts_labels", "_max_length", "_orig_mod", "_loglikelihood_tokens"}
    return theirs | attributes | {"_load_model", "_load_with_module_classes"}


def private_uses(source: str) -> set[str]:
    found: set[str | None] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword):
            found.add(node.arg)
        elif isinstance(node, ast.ClassDef):
            found |= {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            found |= {word.value for word in node.args[1:2] if isinstance(word, ast.Constant)}
    return {name for name in found if private(name)}


def test_private_names_of_others_are_used_in_compat_alone():
    ours, theirs = own_names(), foreign_names()
    for file in FILES:
        used = private_uses(file.read_text(encoding="utf-8"))
        strangers = sorted(name for name in used if name not in ours or name in theirs)
        assert not strangers, f"{file.relative_to(PACKAGE)} uses {strangers}: put it behind a function in compat"


@pytest.mark.parametrize(
    "source",
    [
        "x.config._attn_implementation",
        "from lm_eval._cli import HarnessCLI",
        "getattr(model, '_orig_mod', model)",
        "nn.Embedding(1, 2, _weight=w)",
        "class T(nn.Module):\n    def _apply(self, fn): ...",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q)",
    ],
)
def test_the_rule_notices(source):
    ours, theirs = own_names(), foreign_names()
    assert [name for name in private_uses(source) if name not in ours or name in theirs]


def test_compat_brings_no_optional_library_along():
    code = (
        "import sys; import hf_posenc.compat.pytorch, hf_posenc.compat.models, hf_posenc.compat.caches\n"
        "import hf_posenc.compat.adapters\n"
        "print(*{'lm_eval', 'peft', 'sentence_transformers', 'mteb', 'datasets'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


# --- torch ---


def reference(query, key, value, scaling, mask=None, causal=False):
    scores = query.float() @ key.float().transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask.float()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ value.float(), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_the_cpu_kernel_takes_a_mask_with_causal_and_gives_the_sums(dtype, masked):
    assert dtype in pytorch.CPU_ATTENTION, "torch's CPU kernel is gone or differs: alibi and zones run a slower way"
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 70, 16, generator=generator).to(dtype) for _ in range(3))
    mask = torch.randn(2, 3, 1, 70, generator=generator).to(dtype).expand(-1, -1, 70, -1) if masked else None
    output, sums = pytorch.cpu_attention(query, key, value, causal=True, scaling=0.3, mask=mask)
    wanted = reference(query, key, value, 0.3, mask, causal=True)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output.float(), wanted[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(sums.float(), wanted[1], atol=tolerance, rtol=tolerance)


def test_a_kernel_that_is_missing_or_means_something_else_is_not_used(monkeypatch):
    kernel = pytorch.cpu_attention
    monkeypatch.setattr(pytorch, "KERNEL", "_no_such_kernel")
    assert pytorch.proved_dtypes() == ()
    monkeypatch.undo()
    monkeypatch.setattr(
        pytorch, "cpu_attention", lambda *args, **kwargs: tuple(x * 1.1 for x in kernel(*args, **kwargs))
    )
    assert pytorch.proved_dtypes() == ()
    monkeypatch.setattr(pytorch, "cpu_attention", lambda q, k, v, **given: kernel(q, k, v, **{**given, "mask": None}))
    assert pytorch.proved_dtypes() == ()


@pytest.mark.parametrize("scheme", ["alibi", "self_extend", "dca", "lm_infinite", "streaming"])
def test_without_that_kernel_models_run_a_slower_way(scheme, monkeypatch):
    model, ids = patch_model(tiny("llama"), scheme, **options(scheme)), tokens(2, 96)
    calls, kernel = [], pytorch.cpu_attention
    monkeypatch.setattr(pytorch, "cpu_attention", lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs))
    with torch.no_grad():
        fast = model(ids).logits
        assert calls, f"{scheme} did not take the fast way: this test shows nothing"
        calls.clear()
        monkeypatch.setattr(pytorch, "CPU_ATTENTION", ())
        slow = model(ids).logits
    assert not calls
    torch.testing.assert_close(slow, fast, atol=2e-4, rtol=0)


def test_hooks_are_found():
    def hook(module, args):
        return None

    layer = nn.Linear(1, 1)
    assert not pytorch.has_pre_hook(layer, hook)
    handle = layer.register_forward_pre_hook(hook)
    assert pytorch.has_pre_hook(layer, hook), "torch keeps pre-hooks elsewhere: check_model would miss lost hooks"
    handle.remove()
    assert not pytorch.has_pre_hook(layer, hook)
    layer.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    assert not pytorch.has_pre_hook(layer, hook)


@pytest.mark.parametrize("before", ["forward", "state dict"])
def test_hooks_are_dropped_without_their_handle(before):
    calls = []

    def hook(*args):
        calls.append(args)

    layer = nn.Linear(1, 1)
    if before == "forward":
        layer.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        layer.register_state_dict_pre_hook(hook)
    assert pytorch.has_pre_hook(layer, hook, before)
    pytorch.drop_pre_hook(layer, hook, before)
    assert not pytorch.has_pre_hook(layer, hook, before)
    layer(torch.ones(1)), layer.state_dict()
    assert not calls


def test_a_compiled_model_leads_back_to_the_model():
    layer = nn.Linear(1, 1)
    compiled = torch.compile(layer)
    assert pytorch.is_compiled(compiled) and not pytorch.is_compiled(layer)
    assert pytorch.uncompiled(compiled) is layer and pytorch.uncompiled(layer) is layer


def test_a_device_refuses_what_does_not_hold():
    pytorch.assert_later(torch.tensor(True), "said")
    with pytest.raises(RuntimeError, match="said"):
        pytorch.assert_later(torch.tensor(False), "said")


def test_changes_of_a_tensor_are_counted():
    mask = torch.zeros(2)
    before = pytorch.changes_of(mask)
    mask[0] = 1
    assert pytorch.changes_of(mask) > before


def test_a_parameter_is_found_behind_a_property():
    class Rounds(nn.Linear):
        weight = property(lambda self: pytorch.parameter_of(self, "weight").bfloat16())

    layer = nn.Linear(1, 1)
    held, layer.__class__ = layer.weight, Rounds
    assert layer.weight.dtype == torch.bfloat16 and pytorch.parameter_of(layer, "weight") is held


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("meta"),
        lambda m: m.float(),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.share_memory(),
    ],
)
def test_modules_have_a_say_when_they_are_moved(move):
    class Counts(pytorch.Moving):
        moves = 0

        def moved(self, move):
            self.moves += 1
            move()

    inner = Counts()
    inner.weight = nn.Buffer(torch.zeros(1))
    outer = nn.Sequential(nn.Sequential(inner))
    move(outer)
    assert inner.moves == 1, "torch casts modules by another way than `_apply`: positions would be cast to bf16"


def test_modules_have_a_say_in_their_state():
    class Doubles(pytorch.Stored, nn.Embedding):
        def stored(self, state, prefix):
            state[prefix + "weight"] = 2 * state[prefix + "weight"]

        def before_loading(self, state, prefix):
            state[prefix + "weight"] = state[prefix + "weight"] / 2

    one, other = nn.Sequential(Doubles(2, 3)), nn.Sequential(Doubles(2, 3))
    state = one.state_dict()
    assert torch.equal(state["0.weight"], 2 * one[0].weight)
    other.load_state_dict(state)
    assert torch.equal(other[0].weight, one[0].weight)


# --- transformers: models ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_names_the_attention_that_runs(kind, monkeypatch):
    model, seen = tiny(kind), []

    def attention(module, *args, **kwargs):
        seen.append(module)
        return models.own_eager(module)(module, *args, **kwargs)

    transformers.AttentionInterface.register("contract", attention)
    transformers.AttentionMaskInterface.register("contract", transformers.masking_utils.eager_mask)
    assert models.attention_of(model.config) == "sdpa"
    models.set_attention(model.config, "contract")
    assert models.attention_of(model.config) == "contract"
    model(tokens(1, 4))
    assert len(seen) == 2, f"{models.ATTENTION} no longer says which function attends: a patch would have no effect"


def test_masks_are_known_by_the_name_of_the_attention():
    assert models.has_mask_function("sdpa") and models.has_mask_function("hf_posenc_sdpa")
    assert not models.has_mask_function("nobody's")


@pytest.mark.parametrize("kind", KINDS)
def test_attention_layers_are_known_by_their_forward(kind):
    model = tiny(kind)
    layers = [module for module in model.modules() if models.calls_interface(type(module))]
    assert len(layers) == 2, f"forwards name {models.INTERFACE} no more: families would be found to have no attention"
    rotary = kind not in ("gpt2", "bert", "bert_decoder")
    assert all(models.rotates(type(layer)) == rotary for layer in layers), "rotations are applied under another name"
    assert all(callable(models.own_eager(layer)) for layer in layers)


def test_infinity_in_a_config_is_read_as_transformers_writes_it(tmp_path):
    config = transformers.LlamaConfig(vocab_size=7, eps=math.inf, other=[1.5, -math.inf])
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    values = models.decode_floats(copy.deepcopy(raw))
    assert (values["eps"], values["other"], values["vocab_size"]) == (math.inf, [1.5, -math.inf], 7)


def test_a_file_that_a_checkpoint_lacks_is_no_error(tmp_path):
    tiny("llama").config.save_pretrained(tmp_path)
    found = models.file_of(str(tmp_path), "config.json")
    assert found is not None and Path(found).samefile(tmp_path / "config.json")
    assert models.file_of(str(tmp_path), "posenc.json") is None


def test_recurrent_models_say_that_they_are_stateful():
    assert models.is_stateful(transformers.MambaForCausalLM), "a state would be cut back like a cache, silently"
    assert not models.is_stateful(tiny("llama"))


def test_adapters_of_either_kind_are_noticed():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"])
    model = tiny("llama")
    assert not models.carries_adapters(model)
    assert models.carries_adapters(peft.get_peft_model(tiny("llama"), config))
    model.add_adapter(config)
    assert models.carries_adapters(model)


def test_auto_classes_are_known_by_what_they_make():
    assert models.auto_classes(tiny("llama")) == ["AutoModelForCausalLM"]
    assert "AutoModelForMaskedLM" in models.auto_classes(tiny("bert"))
    assert "AutoModel" in models.auto_classes(tiny("gpt2").base_model)


def test_configs_say_where_they_come_from_in_these_keys(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).config.to_dict()
    moved = {key: value for key, value in again.items() if str(tmp_path) in str(value)}
    assert set(moved) <= set(models.ORIGIN), "the same model in another place would get another digest"


def test_a_family_that_an_older_release_builds_otherwise_is_refused(monkeypatch):
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    model = transformers.ViTModel(config)
    monkeypatch.setattr(sys.modules["hf_posenc.families.places"], "release", lambda: (5, 21))
    with pytest.raises(UnsupportedModel, match=r"needs 5\.22 or later"):
        patch_model(model, "sinusoidal")


# --- transformers: caches ---


def test_a_cache_tells_where_the_next_query_stands():
    model, cache = tiny("llama"), DynamicCache()
    assert (caches.query_offset(cache, 0), caches.query_offset(cache, 1)) == (0, 0)
    model(tokens(2, 5), past_key_values=cache)
    assert (caches.query_offset(cache, 0), caches.query_offset(cache, 1)) == (5, 5)
    cache.crop(-2)
    assert caches.query_offset(cache, 1) == 3, "negative numbers no longer say how many tokens a cache is cut by"


def test_a_static_cache_tells_it_on_the_device():
    model = tiny("llama")
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(tokens(2, 5), past_key_values=cache)
    offset = caches.query_offset(cache, 1)
    assert isinstance(offset, torch.Tensor) and int(offset) == 5


def test_a_cache_that_runs_ahead_of_its_model_is_believed():
    class Ahead(DynamicCache):
        def get_query_offset(self, layer_idx=0):
            return self.get_seq_length(layer_idx) + 2

    assert caches.query_offset(Ahead(), 0) == 2


def test_layers_of_a_cache_can_be_made_and_replaced():
    class Mine(DynamicLayer):
        pass

    cache = DynamicCache()
    made = caches.layer_at(cache, 1)
    assert type(made) is DynamicLayer and caches.layer_at(cache, 1) is made
    mine = Mine()
    cache.layers[1] = mine
    model = tiny("llama")
    model(tokens(1, 4), past_key_values=cache)
    assert mine.keys.shape[2] == 4, "caches no longer keep their layers in `layers`"
    caches.clear_layer(mine)
    assert caches.query_offset(cache, 1) == 0
    model.model.layers[1].self_attn(torch.zeros(1, 2, 32), (torch.zeros(1, 2, 8),) * 2, None, past_key_values=cache)
    assert caches.query_offset(cache, 1) == 2


def test_a_layer_can_be_kept_out_of_the_table_of_layers():
    class Indexed(DynamicLayer):
        _layer_type = layer_type = "contract"

    known = [
        value for value in vars(transformers.cache_utils).values() if isinstance(value, dict) and "contract" in value
    ]
    type("Ours", (Indexed,), dict(caches.UNREGISTERED))
    for table in known:
        assert table.pop("contract") is Indexed, "our layers would stand in for the model's own"


def test_an_encoder_decoder_cache_keeps_self_attention_apart():
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert isinstance(cache.self_attention_cache, DynamicCache)


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

        def to_save(self, state):
            self.seen.append("to_save")
            return state

        def saved(self, folder):
            self.seen.append(("saved", folder.name))
            assert (folder / "model.safetensors").exists()

        def checkpointed(self, folder):
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
    assert adapters.without_copies(model.lm_head) is head
    copied = adapters.active_copy(model.lm_head)
    assert isinstance(copied, nn.Linear) and copied is not head and copied.weight.requires_grad
    assert adapters.without_copies(head) is head and adapters.active_copy(head) is head
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
    from hf_posenc.compat.kernels import KernelMode, detached

    class Doubles(KernelMode):
        def kernel(self, name, args, run):
            return detached([run() * 2])[0] if name.startswith("aten.exp") else run()

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
