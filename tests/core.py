"""Which tests are the core: what `make check` runs before every commit, in under two minutes on two cores.

At least one law for every scheme and for every kind of model (test_core.py counts), references by other means, and
everything that is quick. Chosen by measured time: a second each at most.
"""

from typing import Any

import pytest

FILES = (
    "test_bias_references.py",
    "test_check_model.py",
    "test_core.py",
    "test_describe.py",
    "test_frequency_references.py",
    "test_image_references.py",
    "test_manifest.py",
    "test_records.py",
    "test_references.py",
    "test_rooms.py",
    "test_scaled_references.py",
    "test_schemes.py",
    "test_settings.py",
    "test_untrained.py",
)
"""All of these."""
LAWS = {
    "test_laws.py": (
        "test_output_changes_and_unpatching_restores_every_bit",
        "test_no_other_model_is_touched",
        "test_cached_decoding_equals_a_full_pass",
        "test_a_row_does_not_see_padding_or_its_neighbours",
        "test_eager_equals_sdpa",
    ),
    "test_checkpoint.py": ("test_what_is_saved_comes_back_exactly",),
    "test_images.py": (
        "test_output_changes_and_unpatching_restores_every_bit",
        "test_rows_and_columns_are_told_apart",
    ),
    "test_families.py": ("test_a_part_of_the_sweep_gives_what_the_table_says",),
    "test_light.py": ("test_a_patch_needs_three_packages", "test_importing_the_package_imports_nothing_slow"),
}
"""These of the others, on the kinds below."""
RELEASES = (
    "test_compat.py",
    "test_compat_models.py",
    "test_compat_trainers.py",
    "test_plain_load.py",
    "test_trainer.py",
)
"""Beside the core, what other releases of transformers could break: `make compat` runs both."""
KINDS = ("llama", "gpt2", "bert")
"""A rotation, a table in a decoder, a table in an encoder: other text models differ from one of them in details."""
TYPES = ("bart", "bloom", "jamba")
"""Of the sweep: an encoder and a decoder, a bias, no positions beside a recurrence."""


def is_core(item: Any) -> bool:
    file = item.path.name
    if file in FILES:
        return True
    given = getattr(getattr(item, "callspec", None), "params", {})
    name = getattr(item, "originalname", item.name)
    fits = given.get("kind", KINDS[0]) in KINDS and given.get("model_type", TYPES[0]) in TYPES
    return name in LAWS.get(file, ()) and fits


def mark_core(items: list[Any]) -> None:
    for item in items:
        if is_core(item):
            item.add_marker(pytest.mark.core)
        if item.path.name in RELEASES:
            item.add_marker(pytest.mark.release)
