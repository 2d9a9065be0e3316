"""torch.export and ONNX, for any length: what is exported computes the same, the rest refuses clearly."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from hf_posenc import UnsupportedCell, patch_model, save
from hf_posenc.runtime.masks import ordered_queries
from hf_posenc.serving.verify import verify

SHAPE = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=32,
    initializer_range=0.3,
    pad_token_id=0,
)


def model_of(kind):
    torch.manual_seed(0)
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    return auto.from_config(AutoConfig.for_model(kind, **SHAPE)).eval()


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids, use_cache=False).logits


@pytest.mark.parametrize(("kind", "scheme"), [("llama", "alibi"), ("bert", "alibi"), ("llama", "self_extend")])
def test_torch_exports_for_any_length(kind, scheme):
    model = patch_model(model_of(kind), scheme, target_length=128)
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    traced = torch.ones(3, 24, dtype=torch.long)
    program = torch.export.export(Logits(model), (traced,), dynamic_shapes=(dynamic,), strict=False).module()
    with torch.no_grad():
        for length in (7, 31, 100):
            ids = torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(0))
            torch.testing.assert_close(program(ids), model(ids).logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "scheme", "says"),
    [
        ("llama", "shaw", "tables as long as the text"),
        ("llama", "dynamic_ntk", "for each stage of the length.*'yarn'"),
        ("bert", "dynamic_ntk", "for each stage"),
        ("llama", "longrope", "for each stage"),
    ],
)
@pytest.mark.filterwarnings("ignore::hf_posenc.UntrainedWarning")
def test_what_follows_the_text_is_not_exported(kind, scheme, says):
    given = {} if scheme == "shaw" else {"target_length": 128}
    model, traced = patch_model(model_of(kind), scheme, **given), torch.ones(3, 24, dtype=torch.long)
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with pytest.raises(UnsupportedCell, match=says):
        torch.export.export(Logits(model), (traced,), dynamic_shapes=(dynamic,), strict=False)


def test_running_maxima_are_exported_as_comparisons(monkeypatch):
    positions = torch.tensor([[0, 1, 2, 3, 4], [1, 1, 0, 1, 2], [5, 0, 1, 2, 6]])
    expected = [[all(q >= p for p in row[: i + 1]) for i, q in enumerate(row)] for row in positions.tolist()]
    for exporting in (False, True):
        monkeypatch.setattr(torch.compiler, "is_exporting", lambda exporting=exporting: exporting)
        assert ordered_queries(positions).tolist() == expected


@pytest.mark.parametrize(
    ("kind", "scheme", "cached"), [("llama", "yarn", True), ("llama", "self_extend", False), ("bert", "alibi", False)]
)
def test_onnxruntime_computes_the_same(kind, scheme, cached, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"ONNX graphs need {package}: pip install {package}")
    import onnxruntime

    from hf_posenc.serving.onnx.export import export_onnx

    save(patch_model(model_of(kind), scheme, target_length=128), tmp_path / "a")
    proof = export_onnx(tmp_path / "a", tmp_path / "b")
    assert proof is not None and proof.holds and proof.furthest < 1e-3
    assert proof.lengths == (24, 120)  # traced at 5 tokens after 7, or at 12
    assert json.loads((tmp_path / "b" / "proof.onnx.json").read_text())["holds"]
    session = onnxruntime.InferenceSession(str(tmp_path / "b" / "model.onnx"))
    assert any(given.name == "past_key_values.0.value" for given in session.get_inputs()) == cached
    assert verify(tmp_path / "b", "onnx", against=tmp_path / "a").verdict == "same"
    assert cached or verify(tmp_path / "a", "onnx").verdict == "same"  # by the way of an export
    other = patch_model(model_of(kind), "none", target_length=128)
    save(other, tmp_path / "c")
    assert verify(tmp_path / "b", "onnx", against=tmp_path / "c").verdict == "differs"


def test_what_follows_the_length_is_refused(tmp_path):
    pytest.importorskip("onnxscript", reason="ONNX graphs need onnxscript: pip install onnxscript")
    from hf_posenc.serving.onnx.write import write_onnx

    model = patch_model(model_of("llama"), "dynamic_ntk", factor=4.0)
    with pytest.raises(UnsupportedCell, match=r"traced once .* nearest scheme that can be exported is 'ntk'"):
        write_onnx(model, tmp_path)
    assert not list(tmp_path.iterdir())
