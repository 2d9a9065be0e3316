"""The core leaves no scheme and no kind of model out."""

import pytest
from cells import TEXT
from core import FILES, KINDS, LAWS
from image_cells import FAMILIES as IMAGES

from hf_posenc import SCHEMES


@pytest.fixture
def chosen(request):
    """The tests of the core among those of this session; of the whole suite or of the core, that is all of them."""
    items = [item for item in request.session.items if item.get_closest_marker("core")]
    if not {item.path.name for item in items} >= set(LAWS):
        pytest.skip("only a part of the suite is running")
    return items


def parameters(items, name: str) -> set:
    given = [getattr(getattr(item, "callspec", None), "params", {}) for item in items]
    return {values[name] for values in given if name in values}


def test_every_scheme_and_kind_has_a_law_in_the_core(chosen):
    laws = [item for item in chosen if item.path.name in LAWS]
    assert set(TEXT) <= parameters(laws, "scheme")
    assert set(KINDS) <= parameters(laws, "kind")
    assert set(SCHEMES) <= parameters(laws, "scheme") | parameters(laws, "name")
    assert set(IMAGES) <= parameters(laws, "family")
    assert {"t5", "bloom"} & parameters(laws, "model_type")  # a bias


def test_every_test_that_the_core_names_exists(chosen):
    there = {(item.path.name, getattr(item, "originalname", item.name)) for item in chosen}
    assert [(file, law) for file, laws in LAWS.items() for law in laws if (file, law) not in there] == []
    assert set(FILES) <= {file for file, _ in there}
