"""Names of tensors: one to one with paths, valid UTF-8, never the reserved name."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from expect import raises
from laststep.errors import CorruptError, UsageError
from laststep.state.tree import name_of, names_in, path_of

texts = st.text(st.characters() | st.sampled_from("~/#012345"), max_size=6)
scalars = (
    texts
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False)
    | st.binary(max_size=4)
)
keys = scalars | st.tuples(scalars, scalars)
paths = st.lists(keys, max_size=4).map(tuple)


def typed(path: tuple[object, ...]) -> str:
    return repr(path)  # tells 1 from True from 1.0, and 0.0 from -0.0


@settings(max_examples=100, deadline=None)
@given(paths)
@example(())
@example(("",))
@example(("", ""))
@example(("__metadata__",))
@example(("#1", 1, True, 1.0, "~", "/", "~1", "~31", "\ud800"))
def test_the_path_of_a_name_is_the_path(path: tuple[object, ...]) -> None:
    name = name_of(path)
    name.encode()
    assert name != "__metadata__"
    assert typed(path_of(name)) == typed(path)


@settings(max_examples=100, deadline=None)
@given(paths, paths)
def test_different_paths_have_different_names(a: tuple[object, ...], b: tuple[object, ...]) -> None:
    assert (name_of(a) == name_of(b)) == (typed(a) == typed(b))


@settings(deadline=None)
@given(paths, st.lists(keys, max_size=4))
def test_names_in_a_container_are_those_of_the_paths_in_it(
    path: tuple[object, ...], inside: list[object]
) -> None:
    assert names_in(path, inside) == [name_of((*path, key)) for key in inside]


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters() | st.sampled_from("~/#012345-[]"), max_size=8))
def test_any_text_is_a_name_or_corrupt(name: str) -> None:
    try:
        path = path_of(name)
    except CorruptError:
        return
    assert name_of(path) == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("layers.0.weight",), "layers.0.weight"),
        (("state", 0, "exp_avg"), "state/#0/exp_avg"),
        (("a/b", "~"), "a~1b/~0"),
        (("#x",), "~2x"),
        ((True,), "~3true"),
        (("",), "~4"),
        (("__metadata__",), "~5"),
        ((), ""),
        ((-5,), "#-5"),
    ],
)
def test_names_are_as_the_format_says(path: tuple[object, ...], name: str) -> None:
    assert name_of(path) == name
    assert path_of(name) == path


@pytest.mark.parametrize(
    "name",
    [
        "#007",
        "#-0",
        "#",
        "#x",
        "#+1",
        "~9",
        "a~",
        "a//b",
        "/",
        "~3",
        "~3 true",
        "~31",
        "~3{",
        "__metadata__",
        "a/__metadata__",
        "#" + "9" * 5000,
        "#٣",
        "\ud800",
        "~2~",
        "~4x",
    ],
)
def test_what_no_path_has_for_a_name_is_corrupt(name: str) -> None:
    with pytest.raises(CorruptError):
        path_of(name)


def test_a_key_without_a_name_is_refused() -> None:
    with raises(UsageError, found="object"):
        name_of((object(),))
