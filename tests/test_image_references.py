"""Positions in images against references made by other means."""

import math

import pytest
import torch
from cells import tiny, tokens
from image_cells import FAMILIES, PATCH, SPECIAL, patched_images, pixels, states, tiny_images, tower
from torch.nn.functional import interpolate

from hf_posenc import SCHEMES, patch_model
from hf_posenc.core.axes import grid_coordinates
from hf_posenc.families import places
from hf_posenc.runtime.grids import GridLink, resize_table
from hf_posenc.schemes.axial_rope import AxialRotation, axial_frequencies, mixed_frequencies
from hf_posenc.schemes.sinusoidal import axis_sinusoids

WIDE = (24, 40)
"""Three rows and five columns."""


def close(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


# --- rotation --------------------------------------------------------------------------------------------------------


def complex_scores(layer, hidden, rows, columns, theta):
    """Scores of a layer by complex numbers in fp64: each pair of neighbours is one, turned by its patch's x or y."""
    special = hidden.shape[1] - rows * columns
    pairs = layer.head_dim // 2
    turned = []
    for project in (layer.q_proj, layer.k_proj):
        plain = project(hidden).double().unflatten(-1, (-1, pairs, 2))
        numbers = torch.view_as_complex(plain.contiguous())
        for token in range(special, hidden.shape[1]):
            y, x = divmod(token - special, columns)
            for pair in range(pairs):
                step, position = (pair, x) if pair < pairs // 2 else (pair - pairs // 2, y)
                angle = position * theta ** (-step / (pairs // 2))
                numbers[:, token, :, pair] *= complex(math.cos(angle), math.sin(angle))
        turned.append(numbers)
    query, key = turned
    return torch.einsum("bqhp,bkhp->bhqk", query, key.conj()).real / math.sqrt(layer.head_dim)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(32, 32), WIDE])
def test_axial_rope_is_complex_rotation_on_each_axis(family, size):
    """Also on rectangles, and with classes and registers, which are not turned."""
    model = patch_model(tiny_images(family, attn_implementation="eager"), "axial_rope", rope_theta=50.0)
    layer, seen = places(model).stacks[0].attentions[1], []
    layer.register_forward_hook(
        lambda module, args, kwargs, output: seen.append((args, kwargs, output)), with_kwargs=True
    )
    states(model, pixels(2, *size))
    ((args, kwargs, (_, weights)),) = seen
    hidden = args[0] if args else kwargs["hidden_states"]
    assert hidden.shape[1] == SPECIAL[family] + size[0] * size[1] // PATCH**2
    with torch.no_grad():
        scores = complex_scores(layer, hidden, size[0] // PATCH, size[1] // PATCH, 50.0)
    close(weights, scores.softmax(-1).float())


def rotations():
    yield "axial", AxialRotation(axial_frequencies(8, 100.0)[None, :, None], mixed=False)
    yield "mixed", AxialRotation(mixed_frequencies(8, 10.0, layers=2, heads=3, seed=4), mixed=True)


@pytest.mark.parametrize(("name", "rotation"), list(rotations()))
def test_scores_depend_on_the_offset_between_patches_alone(name, rotation):
    """The same query and key everywhere: what differs between two pairs of patches is how they lie to each other."""
    rows, columns, special = 4, 5, 2
    link = GridLink(torch.nn.Module(), 1, special)
    link.root.posenc_rotation = rotation
    one = torch.randn(2, 1, 3, 1, 8, generator=torch.Generator().manual_seed(0))
    query, key = (part.expand(-1, -1, special + rows * columns, -1) for part in one)
    turned_query, turned_key = link.rotate(query, key, (rows, columns))
    assert torch.equal(turned_query[:, :, :special], query[:, :, :special])  # tokens that are no patches
    assert torch.equal(turned_key[:, :, :special], key[:, :, :special])
    scores = (turned_query @ turned_key.mT)[0, :, special:, special:].detach()
    by_offset = {}
    at = grid_coordinates((rows, columns)).long().tolist()
    for i, (x, y) in enumerate(at):
        for j, (u, v) in enumerate(at):
            by_offset.setdefault((u - x, v - y), []).append(scores[:, i, j])
    assert len(by_offset) == (2 * rows - 1) * (2 * columns - 1)
    for alike in by_offset.values():
        close(torch.stack(alike), alike[0].expand(len(alike), -1), 1e-5)
    firsts = torch.stack([alike[0] for alike in by_offset.values()])
    apart = torch.cdist(firsts, firsts) + torch.eye(len(firsts))
    assert apart.min() > 1e-4, name


def test_mixed_frequencies_start_as_axial_ones_seen_from_an_angle():
    """Two axes at a right angle, one angle per head and layer, of the lengths that the axial ones have."""
    found = mixed_frequencies(16, 10.0, layers=2, heads=3, seed=1)
    assert found.shape == (2, 2, 3, 8)
    lengths = torch.tensor([10.0 ** (-i / 4) for i in range(4)])
    close(found.norm(dim=1), lengths.repeat(2).expand(2, 3, 8), 1e-6)
    first, second = found[..., :4], found[..., 4:]
    close((first * second).sum(1), torch.zeros(2, 3, 4), 1e-6)
    angles = torch.atan2(found[:, 1], found[:, 0])[..., :4]
    close(angles, angles[..., :1].expand(2, 3, 4), 1e-5)
    assert len(angles[..., 0].unique()) == 6
    assert torch.equal(found, mixed_frequencies(16, 10.0, layers=2, heads=3, seed=1))
    assert not torch.equal(found, mixed_frequencies(16, 10.0, layers=2, heads=3, seed=2))


# --- tables ----------------------------------------------------------------------------------------------------------


def formula(rows, columns, size, base, layout):
    """Row by row, channel by channel: half the channels for x, then half for y."""
    half = size // 2
    table = torch.zeros(rows * columns, size, dtype=torch.float64)
    for patch in range(rows * columns):
        y, x = divmod(patch, columns)
        for axis, position in enumerate((x, y)):
            for pair in range(half // 2):
                angle = position / base ** (2 * pair / half)
                first, second = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, half // 2 + pair)
                table[patch, axis * half + first] = math.sin(angle)
                table[patch, axis * half + second] = math.cos(angle)
    return table.float()


@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sinusoids_in_two_dimensions_are_the_table_of_the_formula(family, layout):
    """Put by hand into a model's own table; the class tokens get nothing."""
    ours = patch_model(tiny_images(family), "sinusoidal", layout=layout, base=30.0)
    plain = patch_model(tiny_images(family), "learned")
    stack = places(plain).stacks[0]
    native = stack.table.module
    with torch.no_grad():
        rows = native.weight if isinstance(native, torch.nn.Embedding) else native[0]
        rows.zero_()
        rows[stack.offset :] = formula(4, 4, 32, 30.0, layout)
    close(states(ours, pixels()), states(plain, pixels()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rectangle_has_its_own_rows_and_columns(family):
    ours, bare = (patch_model(tiny_images(family), scheme) for scheme in ("sinusoidal", "none"))
    with torch.no_grad():
        added = [tower(model).embeddings(pixels(1, *WIDE)) for model in (ours, bare)]
    expected = formula(3, 5, 32, 10_000.0, "interleaved")
    close((added[0] - added[1])[0, SPECIAL[family] :], expected, 1e-5)
    if SPECIAL[family]:
        assert torch.equal(added[0][:, : SPECIAL[family]], added[1][:, : SPECIAL[family]])


@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_fourier_with_log_frequencies_on_one_axis_is_sinusoidal(kind, layout):
    outputs = []
    for scheme in ("fourier", "sinusoidal"):
        model = patch_model(tiny(kind), scheme, layout=layout, base=77.0)
        with torch.no_grad():
            outputs.append(model(tokens(2, 20)).logits)
    assert torch.equal(*outputs)


def test_fourier_with_log_frequencies_on_two_axes_is_sinusoidal():
    models = (patch_model(tiny_images("vit"), scheme) for scheme in ("fourier", "sinusoidal"))
    assert torch.equal(*(states(model, pixels()) for model in models))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_any_number_of_axes_is_concatenated(axes):
    values = SCHEMES["fourier"](frequencies="gaussian", sigma=2.0, seed=5).values(24, axes)
    assert values.shape == (axes, 12 // axes)
    positions = torch.randint(0, 9, (7, axes), generator=torch.Generator().manual_seed(0))
    found = axis_sinusoids(positions, values, "interleaved")
    expected = [
        [
            f(position * frequency)
            for position, row in zip(place, values.tolist(), strict=True)
            for frequency in row
            for f in (math.sin, math.cos)
        ]
        for place in positions.tolist()
    ]
    close(found, torch.tensor(expected), 1e-5)


def test_random_frequencies_come_from_their_seed():
    one, again, other = (
        SCHEMES["fourier"](frequencies="gaussian", sigma=3.0, seed=seed).values(4096, 2) for seed in (1, 1, 2)
    )
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert abs(one.std() - 3.0) < 0.1 and abs(one.mean()) < 0.1
    models = [patch_model(tiny_images("vit"), "fourier", frequencies="gaussian", seed=seed) for seed in (1, 1, 2)]
    first, same, differs = (states(model, pixels()) for model in models)
    assert torch.equal(first, same) and not torch.equal(first, differs)


# --- learned grids ---------------------------------------------------------------------------------------------------

INTERPOLATED = [family for family in FAMILIES if not family.startswith("beit")]


def own_states(family, images, **overrides):
    """What an unpatched model says of images of another size, told to resize its table where it must be told."""
    told = {} if family in ("dinov2", "registers", "beit") else {"interpolate_pos_encoding": True}
    return states(tiny_images(family, **overrides), images, **told)


@pytest.mark.parametrize("size", [(32, 32), (48, 48), WIDE, (16, 64)])
@pytest.mark.parametrize("family", INTERPOLATED)
def test_a_learned_grid_is_read_as_the_models_own_code_reads_it(family, size):
    """Without being told to; (16, 64) has as many patches as the table, in another shape."""
    model = patch_model(tiny_images(family), "learned")
    assert torch.equal(states(model, pixels(2, *size)), own_states(family, pixels(2, *size)))


@pytest.mark.parametrize("family", INTERPOLATED)
def test_a_grid_resized_once_is_what_the_models_own_code_makes_of_it(family):
    model = patched_images("learned", family)
    assert model.config.image_size == 48
    close(states(model, pixels(2, 48, 48)), own_states(family, pixels(2, 48, 48)), 1e-5)


def test_beit_keeps_its_table_and_loses_its_bias():
    without = dict(use_relative_position_bias=False)
    model, plain = patch_model(tiny_images("beit"), "learned"), tiny_images("beit", **without)
    plain.load_state_dict({k: v for k, v in tiny_images("beit").state_dict().items() if "relative" not in k})
    for size in ((32, 32), WIDE):
        assert torch.equal(states(model, pixels(2, *size)), states(plain, pixels(2, *size)))
    assert not torch.equal(states(model, pixels()), states(tiny_images("beit"), pixels()))


@pytest.mark.parametrize("antialias", [False, True])
def test_resizing_is_bicubic_with_the_class_apart(antialias):
    table = torch.randn(1 + 16, 6, generator=torch.Generator().manual_seed(0))
    found = resize_table(table, 1, 7, antialias)
    assert torch.equal(found[:1], table[:1])
    square = table[1:].reshape(4, 4, 6).permute(2, 0, 1)[None]
    expected = interpolate(square, size=(7, 7), mode="bicubic", align_corners=False, antialias=antialias)
    close(found[1:], expected[0].permute(1, 2, 0).reshape(49, 6), 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_resizing_to_the_same_grid_is_the_identity(family):
    table = torch.randn(2 + 25, 6)
    assert torch.equal(resize_table(table, 2, 5), table)
    model = patch_model(tiny_images(family), "learned", image_size=32)
    own = patch_model(tiny_images(family), "learned")
    assert torch.equal(states(model, pixels()), states(own, pixels()))
    if not family.startswith("beit"):
        assert torch.equal(states(model, pixels()), states(tiny_images(family), pixels()))
