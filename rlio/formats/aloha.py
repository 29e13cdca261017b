"""ALOHA's HDF5: one file an episode.

``observations`` has ``qpos``, ``qvel``, perhaps ``effort``, and the group ``images`` with an array for each
camera; ``action`` has the actions. Row t has the observation and the action that was taken. The observation
after the last step, rewards and the reason of an end are not stored: an episode is truncated
where its file ends. Other arrays with a row a step, such as ``base_action``, are further columns.

If the attribute ``compress`` is true, images are rows of JPEG, written by OpenCV, whose order of colours the
file does not state: they are not decoded.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from rlio.batch.columns import Columns
from rlio.errors import UnknownLayout
from rlio.formats.format import Format, Marks
from rlio.formats.place import Place
from rlio.formats.tables.hdf5 import Hdf5Table
from rlio.formats.tables.mapping import MappedSource
from rlio.limits import Limits
from rlio.mapping import DERIVE, Mapping
from rlio.support.calls import closing_on_error
from rlio.support.options import check_choice

_OBS: Final = "observations"
_ACTION: Final = "action"
_IMAGES: Final = ("images", "images_depth")

FORMAT = Format(
    name="aloha",
    title="ALOHA",
    marks=Marks(
        hdf5=lambda paths: (
            {_ACTION, f"{_OBS}/qpos"} <= paths and bool({f"{_OBS}/qvel", f"{_OBS}/images"} & paths)
        ),
        hdf5_names=frozenset((_ACTION, _OBS)),
        endings=(".hdf5", ".h5"),
    ),
    source="rlio.formats.aloha:open_aloha",
    about="A file is an episode, which is truncated. Final observations and rewards are not stored.",
)


def open_aloha(place: Place, *, limits: Limits, images: Literal["read", "skip"] = "read") -> MappedSource:
    """The episodes of ALOHA's files.

    Args:
        place: The files.
        limits: Bounds on the files.
        images: Whether images are read.

    Raises:
        UnknownLayout: The images are JPEG, and are not skipped.
    """
    check_choice("images", images, ("read", "skip"))
    table = Hdf5Table(place, limits=limits)
    with closing_on_error(table):
        obs: dict[str, Any] = {name: f"{_OBS}/{name}" for name in table.tree().get(_OBS, ())}
        left_out = [f"{_OBS}/{name}" for name in _IMAGES if images == "skip" and obs.pop(name, None)]
        if {*_IMAGES} & obs.keys() and table.attribute("compress"):
            raise UnknownLayout(
                "found images that are compressed as JPEG, whose order of colours the file does not state: "
                "pass format_options={'images': 'skip'} to read all else; or decode them with cv2.imdecode, "
                "and pass rlio.from_episodes(episodes)",
                uri=place.uri,
            )
        more, others = table.further(known=(_OBS, _ACTION), like=_ACTION)
        columns: dict[str, Any] = {Columns.OBS: obs, Columns.ACTIONS: _ACTION, **more}
        source = MappedSource(table, Mapping(columns, per_file=True, next_obs=DERIVE))
    source.notes.append(
        "Rewards and reasons of ends are not stored: an episode is truncated where its file ends."
    )
    source.left_out = [*left_out, *others]
    return source
