"""Laws of the mappings of towers and connectors: the adapter of each unit's rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loradock.engine.errors import NotResident
from loradock.engine.kernels import choose_kernels
from loradock.engine.models.image_inputs import ImageInputs
from loradock.engine.models.image_part import ImageMapper, ImagePunicaWrapper, units_of
from loradock.engine.punica import LoRAMapping, MappingType

LAYOUT = (5, 6, None)
IDS = st.lists(st.sampled_from((0, 5, 6)), min_size=1, max_size=6)


def wrapper(ids: list[int], units: int, prompts: tuple[int, ...] = ()) -> ImagePunicaWrapper:
    punica = ImagePunicaWrapper(torch.device("cpu"), 8, choose_kernels("cpu"))
    punica.update_metadata(LoRAMapping(ids, prompts, type=MappingType.TOWER), LAYOUT)
    punica.units = units
    return punica


def slots_of(punica: ImagePunicaWrapper, rows: int) -> list[int]:
    """Return the slot of each row, as the kernels read it."""
    groups = punica.groups_of(rows)
    if groups is None:
        return [-1] * rows
    assert groups.tokens == rows
    return groups.token_slots.tolist()


@given(IDS, st.integers(1, 5), st.permutations([1, 2, 3]))
def test_every_unit_has_the_same_number_of_rows(
    ids: list[int], other_factor: int, factors: list[int]
) -> None:
    punica = wrapper(ids, len(ids))
    for factor in (*factors, other_factor):
        expected = [{0: -1, 5: 0, 6: 1}[id_] for id_ in ids for _ in range(factor)]
        assert slots_of(punica, factor * len(ids)) == expected


@given(IDS, st.integers(2, 4))
def test_a_row_may_cover_several_units_of_one_adapter(ids: list[int], units_per_row: int) -> None:
    units = [id_ for id_ in ids for _ in range(units_per_row)]
    punica = wrapper(units, len(units))
    assert slots_of(punica, len(ids)) == [{0: -1, 5: 0, 6: 1}[id_] for id_ in ids]


def test_a_row_of_units_of_two_adapters_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 rows of 4 units"):
        wrapper([5, 6, 6, 6], 4).groups_of(2)


@pytest.mark.parametrize(("units", "rows"), [(3, 7), (6, 6), (6, 12), (0, 9), (2, 4)])
def test_a_mapping_of_other_images_is_an_error(units: int, rows: int) -> None:
    """Twice the images have twice the rows, so only the encoder's own count shows the error."""
    with pytest.raises(ValueError, match=f"{rows} rows of {units} units .* mapping of 3"):
        wrapper([5, 0, 6], units).groups_of(rows)


def test_entries_may_be_the_rows_themselves() -> None:
    punica = wrapper([5, 5, 0, 6], units=2, prompts=(5, 6))
    assert slots_of(punica, 4) == [0, 0, -1, 1]
    assert slots_of(punica, 2) == [0, 1]
    assert slots_of(punica, 4) == [0, 0, -1, 1]


def test_without_a_mapping_or_adapters_any_rows_use_the_base_model() -> None:
    fresh = ImagePunicaWrapper(torch.device("cpu"), 8, choose_kernels("cpu"))
    for punica in (fresh, wrapper([], 3), wrapper([0, 0], 3)):
        assert punica.groups_of(11) is None


def test_an_id_without_a_slot_is_an_error_and_the_last_mapping_stays() -> None:
    punica = wrapper([5, 6], 2)
    with pytest.raises(NotResident, match="7"):
        punica.update_metadata(LoRAMapping([7, 5], [], type=MappingType.TOWER), LAYOUT)
    assert slots_of(punica, 4) == [0, 0, 1, 1]


def test_adapters_that_change_slots_are_followed() -> None:
    punica = wrapper([5, 6], 2)
    assert slots_of(punica, 2) == [0, 1]
    mapping = LoRAMapping([5, 6], [], type=MappingType.TOWER)
    punica.update_metadata(mapping, (6, None, 5))
    assert slots_of(punica, 2) == [2, 0]


def test_units_are_patches_images_or_tiles_that_are_not_padding() -> None:
    grids = torch.tensor([[1, 2, 2], [1, 2, 6], [2, 4, 4]])
    patches = {"pixel_values": torch.ones(48, 9), "image_grid_thw": grids}
    assert units_of(patches).tolist() == [4, 12, 32]
    assert units_of({"pixel_values": torch.zeros(3, 3, 8, 8)}).tolist() == [1, 1, 1]
    tiles = torch.zeros(2, 3, 3, 4, 4)
    tiles[0, :2] = tiles[1, 0, 2, 3, 3] = 1
    assert units_of({"pixel_values": tiles}).tolist() == [2, 1]


@pytest.mark.parametrize(
    "tensors",
    [
        {"pixel_values": torch.ones(3, 4)},
        # Images of 4 axes with sizes have different numbers of rows.
        {"pixel_values": torch.ones(3, 3, 4, 4), "image_sizes": torch.ones(3, 2)},
        {"input_features": torch.ones(3, 4)},
    ],
)
def test_units_of_unsupported_formats_are_not_guessed(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"images of the shapes .* of 4 axes, all of one size"):
        units_of(tensors)


def test_a_rows_images_use_its_adapter_within_and_the_base_after() -> None:
    punicas = {
        part: ImagePunicaWrapper(torch.device("cpu"), 8, choose_kernels("cpu"))
        for part in (MappingType.TOWER, MappingType.CONNECTOR)
    }
    mapper = ImageMapper(None, punicas)
    images = [ImageInputs({"pixel_values": torch.ones(n, 3, 4, 4)}, {}, None, 0) for n in (1, 2)]
    with mapper.mapped([6, 5, 5], [images[0], None, images[1]], LAYOUT):
        for punica in punicas.values():
            punica.units = 3
            assert slots_of(punica, 6) == [1, 1, 0, 0, 0, 0]
    for punica in punicas.values():
        assert punica.groups_of(6) is None
    with pytest.raises(NotResident), mapper.mapped([6, 9], [images[0], images[1]], LAYOUT):
        raise AssertionError("an id without a slot was accepted")
    assert all(punica.groups_of(3) is None for punica in punicas.values())


def test_there_is_an_adapter_id_for_each_image() -> None:
    with pytest.raises(ValueError, match="2 adapter ids for 3 images"):
        ImageMapper(None).mappings([5, 6], {"pixel_values": torch.ones(3, 3, 8, 8)})
