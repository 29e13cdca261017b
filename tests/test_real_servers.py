"""The conformance suite of storage on real servers, which the tests start themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from servers import Server

from rlio.storage.filesystem import Storage
from rlio.testing import FileSystemTests


class OnServer(FileSystemTests):
    """The suite on a folder of a server of `servers.SERVERS`."""

    server_name: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _started(self, serve: Callable[[str], Server]) -> None:
        self.server = serve(self.server_name)

    def make_storage(self, tmp_path: Path) -> Storage:
        return Storage.open(self.server.fresh_root(), storage_options=self.server.options)


@pytest.mark.xdist_group("s3")
class TestS3(OnServer):
    server_name = "s3"


@pytest.mark.xdist_group("azure")
@pytest.mark.further
class TestAzure(OnServer):
    server_name = "azure"


@pytest.mark.xdist_group("sftp")
class TestSFTP(OnServer):
    server_name = "sftp"


@pytest.mark.xdist_group("ftp")
@pytest.mark.further
class TestFTP(OnServer):
    server_name = "ftp"
