"""Hypothesis strategies for wire types, read off their definitions.

A new field or message is drawn without a change here; its bounds are those msgspec checks.
"""

from typing import Any

import msgspec.inspect as inspect
from hypothesis import strategies as st

_MANY = 4
_LONG_TEXT = 20


def wire(kind: Any) -> st.SearchStrategy[Any]:
    """Valid values of a msgspec struct, or of any type one may hold."""
    return _strategy(inspect.type_info(kind))


def _strategy(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.StructType():
            fields = {field.name: _strategy(field.type) for field in info.fields}
            return st.builds(info.cls, **fields)
        case inspect.UnionType():
            return st.one_of(*map(_strategy, info.types))
        case inspect.ListType():
            return st.lists(_strategy(info.item_type), max_size=_MANY)
        case inspect.DictType():
            keys, values = _strategy(info.key_type), _strategy(info.value_type)
            return st.dictionaries(keys, values, max_size=_MANY)
        case inspect.TupleType():
            return st.tuples(*map(_strategy, info.item_types))
        case inspect.IntType():
            return _integers(info)
        case inspect.FloatType():
            return st.floats(info.ge, info.le, allow_nan=False, allow_infinity=False)
        case inspect.StrType():
            return _texts(info)
        case inspect.EnumType():
            return st.sampled_from(info.cls)
        case inspect.BytesType():
            low, high = info.min_length or 0, info.max_length or _LONG_TEXT
            return st.binary(min_size=low, max_size=high)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
    raise AssertionError(f"wire types hold no {info}; add it here")


def _integers(info: inspect.IntType) -> st.SearchStrategy[int]:
    low = -(1 << 63) if info.ge is None else info.ge
    high = (1 << 63) - 1
    if info.le is not None:
        high = info.le
    if info.lt is not None:
        high = info.lt - 1
    return st.sampled_from([low, high]) | st.integers(low, high)


def _texts(info: inspect.StrType) -> st.SearchStrategy[str]:
    low, high = info.min_length or 0, info.max_length or _LONG_TEXT
    characters = st.characters(exclude_categories=["Cs"])
    short = st.text(characters, min_size=low, max_size=min(high, _LONG_TEXT))
    return short | st.just("\U0001f600" * high)
