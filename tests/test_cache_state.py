"""What a cache holds of positions moves with its keys: operations drawn at random, judged by a fresh pass in fp64."""

import copy
import os
import pickle

import pytest
import torch
from cells import LENGTH, PATTERNS, options, tiny, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep.shrink import tiny_model
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, QuantizedLayer

from hf_posenc import PosencError, patch_model
from hf_posenc.runtime.cache_layers import OPERATIONS, CarryingLayer, GrowingLayer, carrying_class, select_slots

BUDGET = int(os.environ.get("HF_POSENC_ATTACK", "10"))
"""Cases for each scheme and kind of cache."""
some = settings(max_examples=BUDGET, deadline=None, derandomize="HF_POSENC_ATTACK" not in os.environ)
TOL = 2e-4
SCHEMES = ["alibi", "t5", "dynamic_ntk", "longrope", *PATTERNS]
KINDS = {"rope": "gpt2", "alibi": "gpt2", "longrope": "qwen3"}
"""Families, where not LLaMA."""
POOL = [tokens(1, n, seed=n)[0].tolist() for n in (3, 9, 20, LENGTH, LENGTH + 7)]


class Lossless(QuantizedLayer):
    """A quantised layer that loses nothing, so that what it gives back can be judged."""

    def _quantize(self, tensor, axis):
        return tensor.clone()

    def _dequantize(self, tensor):
        return tensor


def quantize(config):
    return Cache(layers=[Lossless(residual_length=6) for _ in range(config.num_hidden_layers)])


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "lazy": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=3 * LENGTH),
    "quantised": quantize,
}
rows_moved = st.one_of(
    st.tuples(st.just("reorder"), st.permutations(range(3))),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
)
fed = st.tuples(st.just("feed"), st.integers(1, 5))
copied = st.tuples(st.sampled_from(["deepcopy", "pickle", "offload"]), st.none())
reset = st.tuples(st.just("reset"), st.none())
changed = st.one_of(
    st.tuples(st.just("select"), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("crop"), st.integers(1, 30)),
)
ALLOWED = {
    "dynamic": st.one_of(rows_moved, fed, copied, reset, changed),
    "lazy": st.one_of(rows_moved, fed, copied, changed),
    "static": st.one_of(rows_moved, fed, reset, st.tuples(st.just("deepcopy"), st.none())),
    "quantised": st.one_of(rows_moved, fed, copied, reset),
}


class Batch:
    """Rows in a cache, and beside it what they should be: operations are done to both."""

    def __init__(self, model, judge, cache, rows, sizes):
        self.model, self.judge, self.cache = model, judge, cache
        self.rows, self.fresh = [list(row) for row in rows], 100
        width = max(map(len, rows))
        self.mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        ids = torch.tensor([[0] * (width - len(row)) + row for row in self.rows])
        start = 0
        for end in (*sorted({s for s in sizes if 0 < s < width}), width):
            self.run(ids[:, start:end], end)
            start = end

    def run(self, ids, end):
        mask = self.mask[:, :end]
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            return self.model(ids, attention_mask=mask, position_ids=places, past_key_values=self.cache).logits

    def feed(self, count):
        """New tokens, whose logits are those of each row alone, in one pass and twice the precision."""
        self.fresh += 1
        new = tokens(len(self.rows), count, seed=self.fresh)
        self.mask = torch.cat([self.mask, torch.ones_like(new)], 1)
        found = self.run(new, self.mask.shape[1])
        self.rows = [[*row, *more] for row, more in zip(self.rows, new.tolist(), strict=True)]
        with torch.no_grad():
            meant = [self.judge(torch.tensor([row]), use_cache=False).logits[0, -count:] for row in self.rows]
        torch.testing.assert_close(found.double(), torch.stack(meant), atol=TOL, rtol=0)

    def choose(self, rows):
        self.rows, self.mask = [list(self.rows[i]) for i in rows], self.mask[torch.tensor(rows)]

    def do(self, operation, argument):
        cache, many = self.cache, len(self.rows)
        if operation == "feed":
            self.feed(argument)
        elif operation in ("reorder", "select"):
            rows = [i % many for i in argument]
            rows = (rows * many)[:many] if operation == "reorder" else rows
            (cache.reorder_cache if operation == "reorder" else cache.batch_select_indices)(torch.tensor(rows))
            self.choose(rows)
        elif operation == "repeat":
            cache.batch_repeat_interleave(argument)
            self.choose([i for i in range(many) for _ in range(argument)])
        elif operation == "crop":
            gone = min(argument, min(map(len, self.rows)) - 1)
            if gone < 1:
                return
            cache.crop(-gone)
            self.rows, self.mask = [row[:-gone] for row in self.rows], self.mask[:, :-gone]
        elif operation == "reset":
            cache.reset()
            self.__init__(self.model, self.judge, cache, [row[:9] for row in self.rows], [4])
        elif operation == "offload":
            for layer in cache.layers:
                layer.offload()
                layer.prefetch()
        else:
            self.cache = copy.deepcopy(cache) if operation == "deepcopy" else pickle.loads(pickle.dumps(cache))


MODELS: dict = {}


def pair(scheme, kind):
    """A patched model, and the same in fp64 and with the kernel that writes all scores out."""
    if (scheme, kind) not in MODELS:
        model = patch_model(tiny(kind), scheme, **options(scheme))
        judge = patch_model(tiny(kind, attn_implementation="eager").double(), scheme, **options(scheme))
        MODELS[scheme, kind] = model, judge
    return MODELS[scheme, kind]


def attack(scheme, kind, cache_name, rows, sizes, operations):
    model, judge = pair(scheme, kind)
    batch = Batch(model, judge, CACHES[cache_name](model.config), [POOL[i] for i in rows], sizes)
    for operation in (*operations, ("feed", 2), ("feed", 1)):
        if operation[0] == "crop" and scheme == "streaming":
            continue  # which refuses: see below
        batch.do(*operation)


def cases(cache_name, most=5):
    indices = st.lists(st.integers(0, len(POOL) - 1), min_size=3, max_size=3)
    chunks = st.lists(st.integers(1, LENGTH), max_size=2)
    return dict(rows=indices, sizes=chunks, operations=st.lists(ALLOWED[cache_name], min_size=1, max_size=most))


@pytest.mark.parametrize("scheme", SCHEMES)
@some
@given(**cases("dynamic"))
def test_a_dynamic_cache(scheme, rows, sizes, operations):
    attack(scheme, "llama", "dynamic", rows, sizes, operations)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "dynamic_ntk", "longrope"])
@some
@given(**cases("lazy"))
def test_a_cache_whose_layers_come_one_by_one(scheme, rows, sizes, operations):
    attack(scheme, KINDS.get(scheme, "gpt2"), "lazy", rows, sizes, operations)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "streaming"])
@some
@given(**cases("static", 3))
def test_a_static_cache(scheme, rows, sizes, operations):
    attack(scheme, "llama", "static", rows, sizes, operations)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "streaming"])
@some
@given(**cases("quantised"))
def test_a_quantised_cache(scheme, rows, sizes, operations):
    attack(scheme, "llama", "quantised", rows, sizes, operations)


# --- caches of other makes ---


@pytest.mark.parametrize("scheme", ["dynamic_ntk", "alibi", "rope"])
def test_a_cache_beside_an_encoder(scheme):
    """Rows leave, and stay with what they look at."""
    model = patch_model(tiny("gpt2", add_cross_attention=True), scheme, **options(scheme))
    ids, states = tokens(3, LENGTH + 9), torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :12], mask[2, :20] = 0, 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    past, kept = EncoderDecoderCache(DynamicCache(), DynamicCache()), torch.tensor([2, 0])
    with torch.no_grad():
        model(
            ids[:, :-5],
            attention_mask=mask[:, :-5],
            position_ids=places[:, :-5],
            past_key_values=past,
            encoder_hidden_states=states,
        )
        past.batch_select_indices(kept)
        found = model(
            ids[kept, -5:],
            attention_mask=mask[kept],
            position_ids=places[kept, -5:],
            past_key_values=past,
            encoder_hidden_states=states[kept],
        ).logits
        for row, got in zip(kept, found, strict=True):
            real = ids[row : row + 1, mask[row].bool()]
            alone = model(real, encoder_hidden_states=states[row : row + 1], use_cache=False).logits
            torch.testing.assert_close(got, alone[0, -5:], atol=TOL, rtol=0)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("scheme", ["alibi", "dynamic_ntk", "rerope", "window"])
@pytest.mark.filterwarnings("ignore:This model's RoPE is scaled already")
def test_layers_with_a_sliding_window(scheme, kind):
    """They drop old keys, and with them where these stood."""
    model = tiny(kind, sliding_window=16) if kind == "mistral" else tiny_model(kind)
    patch_model(model, scheme, **options(scheme))
    ids, mask = tokens(3, LENGTH + 20), torch.ones(3, LENGTH + 20, dtype=torch.long)
    mask[0, :12], mask[2, :25] = 0, 0
    places, kept = (mask.cumsum(-1) - 1).clamp(min=0), torch.tensor([2, 2, 0])
    past, start, chosen = DynamicCache(config=model.config), 0, torch.arange(3)
    for end in (10, 30, 38, *range(39, LENGTH + 21)):
        if end == 40:
            past.reorder_cache(kept)
            chosen = kept
        inputs = dict(attention_mask=mask[chosen, :end], position_ids=places[chosen, start:end])
        with torch.no_grad():
            found = model(ids[chosen, start:end], past_key_values=past, **inputs).logits
        start = end
    for row, got in zip(chosen, found, strict=True):
        with torch.no_grad():
            alone = model(ids[row : row + 1, mask[row].bool()], use_cache=False).logits
        torch.testing.assert_close(got, alone[0, -1:], atol=TOL, rtol=0)


def test_slots_are_taken_from_one_row_as_from_many():
    rows, slots = torch.randn(3, 2, 5, 4), torch.tensor([[0, 3, 4], [1, 2, 4], [0, 1, 2]])
    wanted = torch.stack([row[:, chosen] for row, chosen in zip(rows, slots, strict=True)])
    assert torch.equal(select_slots(rows, slots), wanted)
    for row in range(3):
        assert torch.equal(select_slots(rows[row : row + 1], slots[row : row + 1]), wanted[row : row + 1])


def test_a_streaming_cache_is_cut_back_until_it_forgets():
    model, judge = pair("streaming", "llama")
    short, long = POOL[0], POOL[2]
    batch = Batch(model, judge, DynamicCache(config=model.config), [short, long[:5]], [])
    batch.do("crop", 2)
    batch.feed(1)
    batch = Batch(model, judge, DynamicCache(config=model.config), [long, long], [])
    with pytest.raises(PosencError, match="dropped"):
        batch.do("crop", 2)


# --- what is refused ---


def test_tokens_of_another_model_are_noticed():
    model, ids = patch_model(tiny("llama"), "alibi"), tokens(2, 9)
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=past)
        tiny("llama")(ids, past_key_values=past)
        with pytest.raises(PosencError, match="9"):
            model(ids, past_key_values=past)


def test_rows_that_come_from_nowhere_are_noticed():
    model, ids = patch_model(tiny("llama"), "alibi"), tokens(2, 9)
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=past)
        for layer in past.layers:  # behind its back
            layer.keys, layer.values = layer.keys.repeat(2, 1, 1, 1), layer.values.repeat(2, 1, 1, 1)
        with pytest.raises(PosencError, match="rows"):
            model(ids.repeat(2, 1), past_key_values=past)


def test_another_scheme_goes_on_from_the_same_keys():
    """Keys are cached as the model made them; what one scheme derived from them is not read by another."""
    model, ids = tiny("llama"), tokens(1, LENGTH + 20)
    past = DynamicCache(config=model.config)
    for scheme, end in (("dynamic_ntk", 45), ("longrope", 47), ("dca", 49), ("self_extend", 52)):
        patch_model(model, scheme, **options(scheme))
        start = past.get_seq_length()
        with torch.no_grad():
            for i in range(start, end):
                found = model(ids[:, i : i + 1], past_key_values=past).logits
    layer = past.layers[0]
    fresh = DynamicCache(config=model.config)
    for i, layer in enumerate(past.layers):
        fresh.update(layer.keys[:, :, :-1], layer.values[:, :, :-1], i)
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, 51:52], past_key_values=fresh).logits, found, atol=TOL, rtol=0)


def test_a_static_cache_that_was_cut_back_by_hand_is_noticed():
    model, ids = patch_model(tiny("llama"), "dynamic_ntk"), tokens(2, 9)
    past = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        model(ids, past_key_values=past)
        for layer in past.layers:
            layer.cumulative_length.fill_(5)
        with pytest.raises(PosencError, match="holds 5 tokens and knows the positions of 9"):
            model(ids[:, :1], past_key_values=past)


@pytest.mark.parametrize("scheme", ["dynamic_ntk", "longrope", "self_extend", "dca"])
def test_a_static_cache_derives_keys_once(scheme, monkeypatch):
    """What was read is kept, so that a step rotates its own key and, of zones, those that are near."""
    model, ids = patch_model(tiny("llama"), scheme, **options(scheme)), tokens(1, LENGTH + 8)
    past, lengths, derived = StaticCache(config=model.config, max_cache_len=2 * LENGTH), [], CarryingLayer._read_keys

    def counted(self, call, new, keys):
        if call.reading is not None:
            derive = call.reading.derive
            call.reading = call.reading._replace(derive=lambda k, at: lengths.append(k.shape[2]) or derive(k, at))
        return derived(self, call, new, keys)

    monkeypatch.setattr(CarryingLayer, "_read_keys", counted)
    with torch.no_grad():
        model(ids[:, :LENGTH], past_key_values=past)
        for i in range(LENGTH, LENGTH + 8):
            model(ids[:, i : i + 1], past_key_values=past)
    assert sum(length == 1 for length in lengths) >= 4 * len(past.layers)  # stages of this size are two tokens long


# --- the layers themselves ---


def states(count, rows=2, seed=0):
    return torch.randn(rows, 3, count, 8, generator=torch.Generator().manual_seed(seed))


def test_a_growing_layer_never_writes_over_what_others_look_at():
    layer = GrowingLayer()
    with torch.no_grad():
        before, _ = layer.update(states(5), states(5))
        meant = before.clone()
        other = copy.copy(layer)
        other.rooms = dict(layer.rooms)
        layer.update(states(1, seed=1), states(1, seed=1))
        theirs, _ = other.update(states(1, seed=2), states(1, seed=2))
        layer.crop(-3)
        mine, _ = layer.update(states(2, seed=3), states(2, seed=3))
    assert torch.equal(before, meant)
    assert torch.equal(theirs, torch.cat([meant, states(1, seed=2)], 2))
    assert torch.equal(mine, torch.cat([meant[:, :, :3], states(2, seed=3)], 2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_growing_layer_copies_seldom(mode):
    layer, moves, whole = GrowingLayer(), 0, []
    with mode():
        for i in range(600):
            where = layer.keys.data_ptr() if i else None
            keys, values = layer.update(states(1, seed=i), states(1, seed=-i))
            moves += keys.data_ptr() != where
            whole.append(states(1, seed=i))
        assert torch.equal(keys, torch.cat(whole, 2)) and values.shape == keys.shape
    assert moves < 40 and layer.rooms["keys"].memory.shape[2] - 600 <= 256
    layer.update(states(1), states(1))  # out of inference mode


def test_gradients_pass_through_a_growing_layer():
    layer, x = GrowingLayer(), states(2).requires_grad_()
    layer.update(x, x)
    keys, _ = layer.update(2 * x, x)
    keys.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def all_layers(kind=CacheLayerMixin):
    found = {kind}
    for sub in kind.__subclasses__():
        found |= all_layers(sub)
    return found


def test_no_operation_of_a_cache_is_unknown():
    """A new one in transformers must be looked at: does it move keys?"""
    questions = {"get_mask_sizes", "get_max_length", "get_max_cache_shape", "get_seq_length"}
    writes = {"update", "lazy_initialization", "lazy_initialization_indexer", "update_indexer"}
    linear = {name for name in vars(LinearAttentionCacheLayerMixin) if not name.startswith("_")}
    linear |= {"update_conv_state", "update_recurrent_state", "conv_states", "recurrent_states"}
    for kind in all_layers():
        if kind.__module__ != "transformers.cache_utils":
            continue
        methods = {n for n in dir(kind) if not n.startswith("_") and callable(getattr(kind, n))}
        assert methods <= {*OPERATIONS, *questions, *writes, *linear}, kind


def test_a_carrying_layer_is_of_the_kind_that_it_was():
    for kind in all_layers():
        if kind.__module__ == "transformers.cache_utils" and not getattr(kind, "__abstractmethods__", None):
            made = carrying_class(kind)
            assert issubclass(made, kind) and issubclass(made, CarryingLayer)
            assert hasattr(made, "activate_past_recording") == hasattr(kind, "activate_past_recording")
