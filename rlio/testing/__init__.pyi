from .filesystem import (
    FaultyFileSystem as FaultyFileSystem,
)
from .filesystem import (
    FaultyRenamingFileSystem as FaultyRenamingFileSystem,
)
from .filesystem import (
    FileSystemTests as FileSystemTests,
)
from .readers import ReaderTests as ReaderTests
from .readers import assert_resumes as assert_resumes
from .readers import assert_same as assert_same
from .sources import SourceTests as SourceTests
from .writers import WriterTests as WriterTests
