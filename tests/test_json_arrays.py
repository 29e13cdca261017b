"""orjson parses records into the arrays that NumPy makes of the lists of `json`, or leaves them to `json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlio
from rlio.errors import UnsafeData
from rlio.formats.rllib import decoder as rllib_json
from rlio.formats.rllib.json_arrays import parse_arrays
from rlio.limits import Limits

RECORDINGS = Path(__file__).parents[2] / "shared/data/rllib"


def check(line: bytes) -> bool:
    """Whether orjson parsed it; what it gave is what json gives."""
    found = parse_arrays(line, objects=["infos"])
    if found is None:
        return False
    expected = json.loads(line)
    assert list(found) == list(expected)
    for name, value in found.items():
        if isinstance(value, (str, list)):
            assert repr(value) == repr(expected[name])
        else:
            array = np.array(expected[name])
            assert (value.dtype, value.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(value, array)
            assert value.flags.writeable
    return True


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"a":[1,2.5]}', b'{"a":[[1,2],[3,4]],"type":"SampleBatch"}', b'{"a":[true,false]}'),
        *(
            b'{"a":[-0, 1]}',
            b'{"a":[1e5,2]}',
            b'{"a":[9223372036854775807]}',
            b'{"a":[0.1234567890123456789]}',
        ),
        *(b'{"a":[2.2250738585072011e-308, 1e-400]}', b'{"a":[9007199254740993, 1.5]}', b' {"a" : [ 1 ] } '),
        *(b'{"a":[1,true]}', b'{"a":"2020-01-01"}', b'{"a":"\\u0041"}', '{"ä":[1]}'.encode()),
        *(b'{"infos":[{"b":[1,"c"],"d":{"e":null}},{},-0,1.0],"a":[1,2]}', b'{"infos":[],"a":[1]}'),
        *(b'{"infos":[{"\\u0041":18446744073709551615}],"a":[1]}', b'{"infos":"packed","a":[1]}'),
    ],
)
def test_orjson_parses_numbers_as_json_and_numpy_do(line: bytes) -> None:
    assert check(line)


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"a":[1, 18446744073709551615]}', b'{"a":[1.5, 9223372036854775808]}', b'{"a":[1e400]}'),
        *(b'{"a":[1],"a":[2]}', b'{"a":[1]}{"a":[2]}', b'{"a":[1]}\n{"a":[2]}', b'{"a":[1]} x', b'{"a":[1]'),
        *(b'{"a":[NaN]}', b'{"a":[Infinity]}', b'{"a":[null]}', b'{"a":[1,null]}'),
        *(b'{"a":[[]]}', b'{"a":[[1],[2,3]]}', b'{"a":["2020-01-01"]}', b"[1]", b""),
        *(b'{"a":{"b":[1]}}', b'{"a":3,"b":[1]}', b'{"a":null}', b'{"a":"\\ud800"}'),
        *(b'{"infos":[{"b":1,"b":2}],"a":[1]}', b'{"infos":[18446744073709551616],"a":[1]}'),
        *(b'{"infos":{"b":1},"a":[1]}', b'{"infos":["\\""],"a":[1]}', b'{"infos":[NaN],"a":[1]}'),
        *(b'{"a":[01]}', b'{"a":[1.]}', b'{"a":[.5]}', b'{"a":[+1]}', b'{"a":[1,]}', b'{"a":[0x10]}'),
    ],
)
def test_what_orjson_may_read_in_another_way_is_left_to_json(line: bytes) -> None:
    assert parse_arrays(line, objects=["infos"]) is None


numbers = st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | st.none()
rows = st.lists(numbers | st.lists(numbers | st.lists(numbers, max_size=3), max_size=3), max_size=5)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "infos"]), rows | st.text(max_size=5) | numbers, max_size=3)
)
def test_any_record_is_parsed_alike_or_left(record: dict[str, object]) -> None:
    check(json.dumps(record).encode())


def test_lines_that_nest_or_spread_are_left_or_refused() -> None:
    deep = b"[" * 10**5 + b"]" * 10**5
    assert parse_arrays(b'{"a":' + deep + b"}") is None
    with pytest.raises(UnsafeData):
        parse_arrays(b'{"a":[' + b"[1]," * (5 * 10**6) + b"[1]]}")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["cartpole/large.json", "pendulum/large.json", "cartpole/small.json"])
def test_recordings_are_read_alike_with_and_without_orjson(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not RECORDINGS.exists():
        pytest.skip("the recordings of RLlib's own tests are not there")
    parsed = []

    def parse(line: bytes, limits: Limits, **options: Any) -> object:
        found = parse_arrays(line, limits, **options)
        parsed.append(found is not None)
        return found

    monkeypatch.setattr(rllib_json, "parse_arrays", parse)
    with rlio.read(RECORDINGS / name, epochs=1) as reader:
        found = rlio.concat_samples(list(reader))
    assert parsed
    assert all(parsed)
    monkeypatch.setattr(rllib_json, "parse_arrays", lambda *_, **__: None)
    with rlio.read(RECORDINGS / name, epochs=1) as reader:
        assert rlio.concat_samples(list(reader)).equals(found)
