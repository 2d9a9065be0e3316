"""lm-evaluation-harness on our models: RULER's synthetic tasks as they are, and its traps, each of which is sprung."""

import json
import sys

import pytest
import torch
from cells import tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_posenc import PosencError, describe, load, patch_model, save

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is an extra: pip install 'hf-posenc[eval]'")
pytest.importorskip("wonderwords", reason="RULER's words are an extra: pip install 'hf-posenc[eval]'")

from hf_posenc.cli.main import app  # noqa: E402
from hf_posenc.evaluation.measures.processes import Processes  # noqa: E402
from hf_posenc.evaluation.suites import harness  # noqa: E402
from hf_posenc.evaluation.suites.harness import evaluate_harness, task_names  # noqa: E402
from hf_posenc.evaluation.suites.harness_model import PatchedLM  # noqa: E402
from hf_posenc.evaluation.suites.lm_eval_command import run_lm_eval, with_paths  # noqa: E402
from hf_posenc.models import model_path  # noqa: E402

WORDS = ["the", "grass", "is", "green", ".", "sky", "blue", "sun", "yellow", "..."]


def tokenizer_of_words(first: str = "[PAD]", by: str = r"\w+|[^\w\s]+") -> PreTrainedTokenizerFast:
    """Words to tokens, most of them unknown ones; `first` is token 0, `by` what a token is."""
    vocab = {word: i for i, word in enumerate(dict.fromkeys([first, "[UNK]", "</s>", "<s>", *WORDS]))}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(by), "removed", invert=True)
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", eos_token="</s>", bos_token="<s>", pad_token="<s>"
    )


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of_words()


@pytest.fixture(scope="module")
def yarn():
    return patch_model(tiny("llama", max_position_embeddings=256), "yarn", factor=4.0)


@pytest.fixture(scope="module")
def rows(yarn, tokenizer):
    return evaluate_harness(yarn, tokenizer, "ruler_fwe", [1024, 512], samples=3, batch_size=2)


def test_a_row_for_each_length_that_was_asked_and_for_no_other(rows):
    assert [(row.task, row.protocol, row.scheme, row.length, row.n) for row in rows] == [
        ("ruler_fwe", "lm-eval", "yarn", 512, 3),
        ("ruler_fwe", "lm-eval", "yarn", 1024, 3),
    ]
    for row in rows:
        assert 0 <= row.value <= 1 and row.metric == "accuracy"
        assert row.stderr > 0  # also where three answers of three are wrong
        assert json.loads(json.dumps(row.to_dict())) == row.to_dict()


def test_the_tokens_that_prompts_really_took_are_kept(rows, tokenizer):
    """RULER's `fwe` fills the length with its prompt alone, so that HFLM at that length would cut it."""
    for row in rows:
        assert row.details["tokens"]["longest"] > row.length
        assert row.details["tokens"]["longest"] <= row.length + 50  # what it may write
        assert row.details["tokens"]["shortest"] > 0.8 * row.length


def test_documents_do_not_depend_on_the_other_lengths_or_the_model(rows, tokenizer):
    (alone,) = evaluate_harness(tiny("gpt2", max_position_embeddings=2048), tokenizer, "ruler_fwe", [1024], samples=3)
    targets = [answer["target"] for answer in alone.details["answers"]]
    assert targets == [answer["target"] for answer in rows[1].details["answers"]]
    assert alone.scheme == "unpatched"


def test_processes_share_the_documents_and_find_what_one_does(yarn, tokenizer):
    class Two(Processes):
        """Two processes, one after the other."""

        count, parts = 2, []

        def each(self, items, work):
            self.parts += items
            return [work(item) for item in items]

    alone = evaluate_harness(yarn, tokenizer, "ruler_fwe", [512], samples=3)
    assert evaluate_harness(yarn, tokenizer, "ruler_fwe", [512], samples=3, shared=Two()) == alone
    assert Two.parts == [[0, 2], [1]]
    with pytest.raises(PosencError, match="leave --batch-size out"):
        evaluate_harness(yarn, tokenizer, "ruler_fwe", [512], samples=3, batch_size=2, shared=Two())


def test_a_right_answer_counts(rows):
    """A model that always writes token 0, which is one of the three words that the first document asks for."""
    word = rows[0].details["answers"][0]["target"][0]
    model = tiny("llama", max_position_embeddings=1024)
    torch.nn.init.zeros_(model.model.norm.weight)  # all logits alike, and the first is taken
    (row,) = evaluate_harness(model, tokenizer_of_words(first=word), "ruler_fwe", [512], samples=3)
    answers = row.details["answers"]
    assert [a["target"] for a in answers] == [a["target"] for a in rows[0].details["answers"]]
    assert word in answers[0]["answer"]
    assert [a["score"] for a in answers] == [pytest.approx(1 / 3), 0.0, 0.0]
    assert row.value == pytest.approx(1 / 9)


def test_names_stand_for_their_tasks():
    assert len(task_names("ruler")) == 13
    assert task_names("ruler_offline, niah_single_1") == list(harness.OFFLINE)
    assert task_names("babilong") == [f"babilong_qa{i}" for i in range(1, 6)]
    assert "longbench_narrativeqa" in task_names("longbench_single")
    assert len(task_names("longbench")) == 21
    assert set(task_names("longbench_single_tasks")) == set(task_names("longbench_single"))


@pytest.mark.parametrize(
    "group, lengths, words",
    [
        ("rulr", [4096], "Unknown harness task 'rulr'.*Did you mean 'ruler'"),
        (",", [4096], "No harness task"),
        ("ruler_vt", [512, 2048], "never ends.*1024 or more"),
        ("ruler_cwe", [1024], "2048 or more"),
        ("ruler_fwe", [256], "512 or more"),
        ("babilong", [5000], "BABILong has no length 5000"),
        ("ruler_fwe", [], "needs lengths"),
    ],
)
def test_what_cannot_mean_anything_is_refused(yarn, tokenizer, group, lengths, words):
    with pytest.raises(PosencError, match=words):
        evaluate_harness(yarn, tokenizer, group, lengths)


@pytest.mark.parametrize("group", ["longbench", "babilong", "ruler_qa_squad"])
def test_what_needs_a_hub_says_what_does_not(yarn, tokenizer, group):
    if group == "longbench":
        pytest.importorskip("jieba")
    with pytest.raises(PosencError, match=r"cannot be reached.*ruler_fwe; together they are called ruler_offline"):
        evaluate_harness(yarn, tokenizer, group, [4096], samples=1)


def test_a_tokenizer_that_makes_vt_endless_is_refused(yarn):
    letters = tokenizer_of_words(by=".")
    with pytest.raises(PosencError, match="ruler_vt has no prompt that fits 2048 tokens"):
        evaluate_harness(yarn, letters, "ruler_vt", [2048])


def test_an_encoder_and_a_table_that_ends_are_refused(tokenizer):
    with pytest.raises(PosencError, match="does not generate"):
        evaluate_harness(tiny("bert"), tokenizer, "ruler_fwe", [512])
    with pytest.raises(PosencError, match="table of 512 positions"):
        evaluate_harness(tiny("gpt2", max_position_embeddings=512), tokenizer, "ruler_fwe", [512], samples=1)


def test_documents_with_lengths_of_their_own_go_where_they_fit(yarn, tokenizer, tmp_path):
    """LongBench's way, on a task of four documents that is read from a file."""
    data = [{"text": "sun " * n, "answers": "sky"} for n in (20, 60, 70, 300)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    (tmp_path / "local.yaml").write_text(
        "task: longbench_local\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path / 'data.jsonl'}\ntest_split: test\noutput_type: generate_until\n"
        "doc_to_text: '{{text}}'\ndoc_to_target: '{{answers}}'\ngeneration_kwargs:\n  max_gen_toks: 10\n  until: []\n"
    )
    from lm_eval.tasks import TaskManager

    task = TaskManager(include_path=tmp_path, include_defaults=False).load(["longbench_local"])["tasks"]
    task = task["longbench_local"]
    lm = PatchedLM(pretrained=yarn, tokenizer=tokenizer)
    assert harness.chosen_documents(lm, task, (0, 40), 5)[0] == [0]
    chosen, details = harness.chosen_documents(lm, task, (40, 128), 5)
    assert chosen == [1, 2]
    assert details["too_long"] == 1
    assert details["tokens"]["longest"] - details["tokens"]["shortest"] == 10
    assert harness.chosen_documents(lm, task, (40, 128), 1)[0] == [1]
    assert harness.chosen_documents(lm, task, (128, 256), 5)[0] == []


@pytest.fixture(scope="module")
def checkpoint(yarn, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(yarn, folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def request(kind: str, *args):
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=args, idx=0)


def test_a_patched_checkpoint_is_loaded_as_it_was_saved(checkpoint):
    lm = PatchedLM(checkpoint, device="cpu", dtype="float32")
    assert describe(lm.model).scheme == "yarn"
    assert lm.max_length == 1024


def test_an_adapter_is_a_model_and_its_base_brings_the_tokenizer(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(load(checkpoint), config)
    save(adapted, tmp_path)
    lm = PatchedLM(str(tmp_path))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(lm.model(ids).logits, adapted(ids).logits)
    assert lm.tok_encode("sun") == [WORDS.index("sun") + 4]
    assert lm.get_model_info()["model_dtype"] == "torch.float32"


def test_a_prompt_that_would_be_cut_is_refused(checkpoint):
    lm = PatchedLM(checkpoint, max_length=64)
    settings = {"do_sample": False, "max_gen_toks": 10, "until": []}
    with pytest.raises(PosencError, match=r"needs 70 tokens and max_length is 64.*max_length=70"):
        lm.generate_until([request("generate_until", "sun" + " sun" * 59, settings)], disable_tqdm=True)
    assert lm.generate_until([request("generate_until", "sun" + " sun" * 9, settings)], disable_tqdm=True)
    with pytest.raises(PosencError, match="needs 79 tokens"):
        lm.loglikelihood([request("loglikelihood", "sun" + " sun" * 77, " sky is")], disable_tqdm=True)
    assert lm.loglikelihood([request("loglikelihood", "sun" + " sun" * 9, " sky is")], disable_tqdm=True)


def test_arguments_that_would_pass_by_our_loading_are_refused(checkpoint, tmp_path):
    with pytest.raises(PosencError, match="peft cannot be given"):
        PatchedLM(checkpoint, peft="adapter")
    with pytest.raises(PosencError, match=r"Unknown model argument 'max_lenght'.*'max_length'"):
        PatchedLM(checkpoint, max_lenght=64)
    with pytest.raises(PosencError, match=r"not a directory|neither"):
        PatchedLM(str(tmp_path / "nothing"))
    save(load(checkpoint), tmp_path / "bare")
    with pytest.raises(PosencError, match="No tokenizer can be read"):
        PatchedLM(str(tmp_path / "bare"))


def test_a_limit_that_would_take_one_length_only_is_refused(checkpoint):
    common = ["run", "--model", "hf-posenc", "--model_args", f"pretrained={checkpoint}", "--limit", "2", "--metadata"]
    before = list(sys.argv)
    with pytest.raises(PosencError, match="all have the length 512; the other lengths would not run"):
        run_lm_eval([*common, '{"max_seq_lengths": [512, 1024]}', "--tasks", "niah_single_1"])
    with pytest.raises(PosencError, match="ruler_vt at 512 tokens"):
        run_lm_eval([*common, '{"max_seq_lengths": [512]}', "--tasks", "ruler_vt"])
    assert sys.argv == before


def test_without_lm_eval_it_says_what_to_install(yarn, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "hf_posenc.evaluation.suites.harness_model")
    for name in [name for name in sys.modules if name.startswith("lm_eval.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PosencError, match=r"pip install 'hf-posenc\[eval\]'"):
        evaluate_harness(yarn, tokenizer, "ruler_fwe", [512])
    with pytest.raises(PosencError, match=r"pip install 'hf-posenc\[eval\]'"):
        run_lm_eval(["ls"])


def test_lm_evals_own_command_line_through_ours(ruler_alone, checkpoint, tmp_path):
    """As a user calls it, at a length where lm-eval has -1 for another one that was not asked."""
    arguments = [
        "run", "--model", "hf-posenc", "--model_args", f"pretrained={checkpoint},max_length=1024", "--tasks",
        "niah_single_1", "--limit", "2", "--metadata", '{"max_seq_lengths": [512]}', "--output_path", str(tmp_path),
    ]  # fmt: skip
    done = CliRunner().invoke(app, ["lm-eval", *arguments])
    assert done.exit_code == 0, done.output[-2000:]
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 3 and "niah_single_1" in table[2] and "512" in table[2], table
    assert "-1" not in table[2] and "4096" not in "".join(table)
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]["niah_single_1"]
    assert results["512,none"] == 0 and not any(key.startswith("4096") for key in results)


def test_the_model_of_the_package_is_a_path_to_lm_evals_tasks():
    """RULER's load the tokenizer of that name, and no hub has one."""
    given = {"pretrained": "tiny", "tokenizer": "somebody/words", "max_length": 8192}
    assert with_paths(given) == {**given, "pretrained": model_path("tiny")}
    assert with_paths(None) is None and with_paths({}) == {}


def test_errors_of_the_command_are_one_message(checkpoint):
    wrong = [
        "--model_args",
        f"pretrained={checkpoint}",
        "--tasks",
        "ruler",
        "--metadata",
        "max_seq_lengths=[512,4096]",
    ]
    done = CliRunner().invoke(app, ["lm-eval", "run", "--model", "hf-posenc", *wrong])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("hf-posenc: ruler_vt at 512 tokens never ends")
